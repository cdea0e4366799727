"""A delay put into a half on purpose, to see whether the analysis finds it.

In: `CAUSE:MILLISECONDS` from the command line, with `@I/N` behind it for step I of every N steps only. Out: a `Plant`, and the
delay where the cause lives. Each takes its time the way the real fault would: what waits for something else sleeps in the region
it is named for; `forward` computes in Python between the model's modules; `ray_transport` is a large argument that the worker
unpickles; `gc` is real collections.
Knows nothing of who measures it.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tracetools.errors import UsageError

DRIVER_CAUSES = {  # in the Ray driver; in the plain half, where a rank does its own, in the rank
    "data_processing": "sleep in the driver's (or rank's) data processing",
    "ray_submit": "sleep in the driver while it submits",
    "ray_transport": "a large argument of the first actor, which takes that long to unpickle",
    "logging": "sleep in the driver's (or rank's) logging",
}
RANK_CAUSES = {
    "setup": "sleep in every rank before the model runs",
    "forward": "Python that computes between the modules of every rank's forward passes: a launch-bound host",
    "optimizer": "sleep in every rank's optimizer step, before its operators",
    "straggler": "sleep in the forward passes of the last rank only",
    "late_collective": "the last rank enters the last all-reduce of the step that much later",
    "gc": "Python's garbage collections in every rank's forward passes",
}
CAUSES = {**DRIVER_CAUSES, **RANK_CAUSES}
OF_RAY = ("ray_submit", "ray_transport")  # the plain half has none
_LISTS = 150  # that refer to each other
_PAGE = 1000  # documents of one page of a large argument, which also takes well below a millisecond


@dataclass(frozen=True, slots=True)
class Plant:
    """`milliseconds` per step of `cause`, one of CAUSES, in the steps whose number is `first` modulo `every`."""

    cause: str
    milliseconds: float
    first: int = 0
    every: int = 1

    def __str__(self) -> str:
        steps = "" if self.every == 1 else f"@{self.first}/{self.every}"
        return f"{self.cause}:{self.milliseconds:g}{steps}"


def parse_plant(text: str) -> Plant:
    """`data_processing:40` -> 40 ms per step; `data_processing:40@1/4`: in steps 1, 5, 9, ... only.

    Raises UsageError that names what can be planted, and how.
    """
    cause, colon, rest = text.partition(":")
    if cause not in CAUSES:
        raise UsageError(f"--plant {text}: there is no cause {cause!r} to plant. There is: {', '.join(CAUSES)}.")
    amount, at, steps = rest.partition("@")
    try:
        milliseconds = float(amount) if colon else -1.0
        first, every = (int(number) for number in steps.split("/")) if at else (0, 1)
    except ValueError:
        milliseconds, first, every = -1.0, 0, 1
    if not 0 < milliseconds <= 10_000 or not 0 <= first < every:
        raise UsageError(
            f"--plant {text}: write CAUSE:MILLISECONDS, above 0 and at most 10000 ms, e.g. {cause}:40; "
            f"or, for step 1 of every 4 only, {cause}:40@1/4."
        )
    return Plant(cause, milliseconds, first, every)


def due(plants: Iterable[Plant], step: int) -> tuple[Plant, ...]:
    """Those that are for this step."""
    return tuple(plant for plant in plants if step % plant.every == plant.first)


def sleep_for(cause: str, plants: Iterable[Plant], share: float = 1.0) -> None:
    """Sleep `share` of what the plants for this cause say; without any, return at once."""
    for plant in plants:
        if plant.cause == cause:
            time.sleep(share * plant.milliseconds / 1e3)


def collect_garbage_for(plants: Iterable[Plant], share: float = 1.0) -> None:
    """Have Python collect garbage as long as the plants for `gc` say: a little of it each time, among much that is in use."""
    for plant in plants:
        if plant.cause == "gc":
            in_use, left = _in_use(), share * plant.milliseconds / 1e3
            while left > 0:
                garbage: list[Any] = [in_use]
                garbage.append(garbage)
                del garbage
                began = time.perf_counter()
                gc.collect()
                left -= time.perf_counter() - began


@cache
def _in_use() -> list[Any]:
    """What every collection has to look through: some tenths of a millisecond."""
    lists: list[Any] = [[] for _ in range(_LISTS)]
    for each in lists:
        each.extend(lists)
    return lists


def compute_for(cause: str, plants: Iterable[Plant], share: float = 1.0) -> None:
    """Keep this thread's Python busy for `share` of what the plants for this cause say."""
    for plant in plants:
        if plant.cause == cause:
            until = time.perf_counter() + share * plant.milliseconds / 1e3
            while time.perf_counter() < until:
                pass


class LargeArgument:
    """Wraps an argument with many more, in pages that the receiver unpickles one by one as long as the plants say.

    The pages are made once: sending them costs no more than their bytes.
    """

    def __init__(self, value: Any, milliseconds: float) -> None:
        self.value = value
        self.milliseconds = milliseconds
        self.pages = _pages(max(1, round(milliseconds)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.value, self.milliseconds, self.pages)


@cache
def _pages(count: int) -> bytes:
    return count * _page()


@cache
def _page() -> bytes:
    return pickle.dumps([{"document": number, "lengths": (number, number + 1)} for number in range(_PAGE)])


def _unpickled(value: Any, milliseconds: float, pages: bytes) -> Any:
    until = time.perf_counter() + milliseconds / 1e3
    size = len(_page())
    at = 0
    while time.perf_counter() < until:
        pickle.loads(pages[at : at + size])
        at = (at + size) % len(pages)
    return value
