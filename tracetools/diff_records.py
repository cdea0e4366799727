"""The result of a comparison: what `tracetools.diff` makes and the renderers show.

In: nothing. Out: frozen records. Times are integer nanoseconds. Knows nothing of how a figure is computed or shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracetools.model import Coverage, Problem


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of the comparison is. `ranks` are those compared."""

    path: str
    stack: str | None
    device: str | None
    world_size: int | None
    ranks: tuple[int | None, ...]
    steps: tuple[str, ...]
    tokens_per_step: int | None  # of one rank


@dataclass(frozen=True, slots=True)
class Comparability:
    what: str
    a: str | None
    b: str | None
    severity: str  # "note", "warning"


@dataclass(frozen=True, slots=True)
class StepDelta:
    a: int
    b: int
    delta: int
    ratio: float | None
    interval: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PerToken:
    a: float
    b: float
    ratio: float
    interval: tuple[float, float] | None  # of the ratio


@dataclass(frozen=True, slots=True)
class Row:
    """One signed part of the waterfall. For idle time, who caused it; `process` is "rank" for the rank itself."""

    part: str
    process: str | None
    region: str | None
    kind: str | None
    a_ns: int
    b_ns: int
    delta_ns: int
    interval: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ClassDelta:
    """Per step of one rank. delta = from_count + from_duration."""

    name: str
    count_a: float
    count_b: float
    total_a_ns: int
    total_b_ns: int
    delta_ns: int
    from_count_ns: int
    from_duration_ns: int


@dataclass(frozen=True, slots=True)
class Diff:
    verdict: str  # slower, faster, no difference, inconclusive: B against A
    sentence: str
    a: Side
    b: Side
    comparability: tuple[Comparability, ...]
    pairing: str
    step: StepDelta
    per_token: PerToken | None
    waterfall: tuple[Row, ...]
    kernel_classes: tuple[ClassDelta, ...]
    noise_ns: int | None
    coverage: tuple[Coverage, Coverage]
    problems: tuple[tuple[str, Problem], ...]
