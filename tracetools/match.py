"""Which steps of two runs are compared.

In: two analysed runs. Out: `Matched`: per side, the steps that are used, as one row per (step, rank).
Steps are paired by nearest tokens where both sides know them; else all steps of each side are used.
Knows nothing of what is computed from the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tracetools.errors import TracetoolsError
from tracetools.model import ProcessBreakdown, RunBreakdown, StepBreakdown

TOLERANCE = 0.05  # of the tokens of a step


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a run on all ranks that have it."""

    name: str
    ranks: tuple[StepBreakdown, ...]

    @property
    def tokens(self) -> float | None:
        """Mean tokens of a rank in this step; None where one rank does not say."""
        known = [s.card.tokens for s in self.ranks if s.card.tokens is not None]
        return sum(known) / len(known) if len(known) == len(self.ranks) and known else None


@dataclass(frozen=True, slots=True)
class Matched:
    a: tuple[RunStep, ...]
    b: tuple[RunStep, ...]
    how: str


def working(run: RunBreakdown) -> list[ProcessBreakdown]:
    """The processes whose steps are compared: those that train. A driver only explains their idle time."""
    ranks = [p for p in run.processes if p.role in ("rank", "policy")]
    return ranks or [p for p in run.processes if p.role != "driver"] or list(run.processes)


def run_steps(run: RunBreakdown, skip: int) -> list[RunStep]:
    """Steps by position in each process's recording, without the first `skip`. Raises TracetoolsError where none is left."""
    rows: dict[tuple[int, str], list[StepBreakdown]] = defaultdict(list)
    for process in working(run):
        for i, step in enumerate(process.steps[skip:]):
            rows[step.number if step.number is not None else i, step.name].append(step)
    steps = [RunStep(name, tuple(ranks)) for (_, name), ranks in sorted(rows.items(), key=lambda r: r[0][0])]
    if not steps:
        raise TracetoolsError(f"{run.path}: no steps are left after skipping {skip}. Record more steps or skip fewer.")
    return steps


def match(a: RunBreakdown, b: RunBreakdown, skip: int = 0) -> Matched:
    steps_a, steps_b = run_steps(a, skip), run_steps(b, skip)
    if any(s.tokens is None for s in (*steps_a, *steps_b)):
        return Matched(tuple(steps_a), tuple(steps_b), _all_steps(steps_a, steps_b))
    pairs = _nearest(steps_a, steps_b)
    if not pairs:
        how = f"no two steps have token counts within {TOLERANCE:.0%} of each other: all steps used, the per-token figures tell more"
        return Matched(tuple(steps_a), tuple(steps_b), how)
    used = f"{len(pairs)} of {len(steps_a)} and {len(steps_b)} steps paired by nearest tokens (within {TOLERANCE:.0%})"
    return Matched(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), used)


def _all_steps(a: Sequence[RunStep], b: Sequence[RunStep]) -> str:
    return f"means over {len(a)} and {len(b)} steps; token counts unknown, so the work of a step is assumed to be equal"


def _nearest(a: Sequence[RunStep], b: Sequence[RunStep]) -> list[tuple[RunStep, RunStep]]:
    """Each step at most once, closest pairs first, then in order of the steps."""
    distance = sorted(
        (abs((x.tokens or 0) - (y.tokens or 0)), abs(i - j), i, j) for i, x in enumerate(a) for j, y in enumerate(b)
    )
    free_a, free_b = set(range(len(a))), set(range(len(b)))
    pairs = []
    for gap, _, i, j in distance:
        limit = TOLERANCE * max(a[i].tokens or 0, b[j].tokens or 0)
        if i in free_a and j in free_b and gap <= limit:
            free_a.discard(i)
            free_b.discard(j)
            pairs.append((i, j))
    return [(a[i], b[j]) for i, j in sorted(pairs)]
