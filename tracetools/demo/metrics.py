"""What a step reports, and the log of a half: one JSON line per step.

In: results of steps, or the path of a log. Out: lines of a file, or `Line` values. Knows nothing of training, nor of torch: a Ray
driver that receives a `StepResult` imports no more than this.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step over all ranks: mean loss per token, the tokens it is the mean of, the gradients' norm before clipping."""

    loss: float
    tokens: int
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Line:
    """A step in the log. `step_ns`: from the step's start until it is logged, by the clock of the process that logs."""

    step: int
    loss: float
    tokens: int
    grad_norm: float
    step_ns: int


class MetricsLog:
    """Writes lines as they come: another process may follow them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(asdict(line)) + "\n")
        self._file.flush()


def read_metrics(path: Path) -> list[Line]:
    return [Line(**json.loads(text)) for text in path.read_text(encoding="utf-8").splitlines()]
