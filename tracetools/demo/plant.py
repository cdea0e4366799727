"""A delay put into one half on purpose, to see whether the analysis finds it.

In: `CAUSE:MILLISECONDS` from the command line. Out: a `Plant`, and the sleep where the cause lives. Knows nothing of who measures it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tracetools.errors import UsageError

CAUSES = ("data_processing",)  # regions of the Ray driver's loop that call `sleep_for`


@dataclass(frozen=True, slots=True)
class Plant:
    """`milliseconds` of sleep per step, in the region `cause` of the Ray driver."""

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


def sleep_for(cause: str, plants: Iterable[Plant]) -> None:
    """Sleep as long as the plants for this cause say; without any, return at once."""
    for plant in plants:
        if plant.cause == cause:
            time.sleep(plant.milliseconds / 1e3)
