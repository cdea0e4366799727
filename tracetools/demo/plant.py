"""A delay put into a half on purpose, to see whether the analysis finds it.

In: `CAUSE:MILLISECONDS` from the command line. Out: a `Plant`, and the delay where the cause lives. Each takes its time the way the
real fault would: most sleep in the region they are named for, `ray_transport` in the argument's deserialisation in the worker,
`gc` in real collections of real garbage. Knows nothing of who measures it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tracetools.errors import UsageError

DRIVER_CAUSES = {  # in the Ray driver; in the plain half, where a rank does its own, in the rank
    "data_processing": "sleep in the driver's (or rank's) data processing",
    "ray_submit": "sleep in the driver while it submits",
    "ray_transport": "the first actor's arguments take that long to deserialise",
    "logging": "sleep in the driver's (or rank's) logging",
}
RANK_CAUSES = {
    "setup": "sleep in every rank before the model runs",
    "forward": "sleep between the operators of every forward pass: a launch-bound host",
    "optimizer": "sleep in every rank's optimizer step",
    "straggler": "sleep in the forward passes of the last rank only",
    "late_collective": "the last rank enters the last all-reduce of the step that much later",
    "gc": "collections of real garbage in every rank's forward passes",
}
CAUSES = {**DRIVER_CAUSES, **RANK_CAUSES}
OF_RAY = ("ray_submit", "ray_transport")  # the plain half has none
_GARBAGE = 2000  # cycles of one round: well below a millisecond


@dataclass(frozen=True, slots=True)
class Plant:
    """`milliseconds` per step of `cause`, one of CAUSES."""

    cause: str
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.cause}:{self.milliseconds:g}"


def parse_plant(text: str) -> Plant:
    """`data_processing:40` -> 40 ms per step. Raises UsageError that names what can be planted."""
    cause, colon, amount = text.partition(":")
    if cause not in CAUSES:
        raise UsageError(f"--plant {text}: there is no cause {cause!r} to plant. There is: {', '.join(CAUSES)}.")
    try:
        milliseconds = float(amount) if colon else -1.0
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= 10_000:
        raise UsageError(f"--plant {text}: write CAUSE:MILLISECONDS, above 0 and at most 10000 ms, e.g. {cause}:40.")
    return Plant(cause, milliseconds)


def sleep_for(cause: str, plants: Iterable[Plant], share: float = 1.0) -> None:
    """Sleep `share` of what the plants for this cause say; without any, return at once."""
    for plant in plants:
        if plant.cause == cause:
            time.sleep(share * plant.milliseconds / 1e3)


def collect_garbage_for(plants: Iterable[Plant], share: float = 1.0) -> None:
    """Make and collect garbage as long as the plants for `gc` say."""
    for plant in plants:
        if plant.cause == "gc":
            until = time.perf_counter() + share * plant.milliseconds / 1e3
            while time.perf_counter() < until:
                for _ in range(_GARBAGE):
                    cycle: list[Any] = []
                    cycle.append(cycle)
                del cycle
                gc.collect()


@dataclass(frozen=True, slots=True)
class SlowArgument:
    """Wraps an argument whose deserialisation takes its time."""

    value: Any
    plants: Sequence[Plant]

    def __reduce__(self) -> tuple[Any, ...]:
        return _deserialise, (self.value, tuple(self.plants))


def _deserialise(value: Any, plants: Sequence[Plant]) -> Any:
    sleep_for("ray_transport", plants)
    return value
