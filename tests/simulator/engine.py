"""The clock of the simulation.

In: threads, written as generators that yield a number of nanoseconds to let pass, or a `Signal` to wait for. Out: they run, in order of
time; at one instant in the order in which they became ready, so that a run can be repeated exactly.
Knows nothing of what the threads stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator


class Signal:
    """Fires once. `at` is when, None before."""

    __slots__ = ("at", "waiting")

    def __init__(self) -> None:
        self.at: int | None = None
        self.waiting: list[Work] = []


Work = Generator["int | Signal", None, None]


class Engine:
    """`now` is the time in ns."""

    def __init__(self) -> None:
        self.now = 0
        self._order = 0
        self._ready: list[tuple[int, int, Work]] = []

    def spawn(self, work: Work, delay: int = 0) -> None:
        """Run `work` from `delay` ns on."""
        self._order += 1
        heapq.heappush(self._ready, (self.now + delay, self._order, work))

    def fire(self, signal: Signal) -> None:
        """Raises ValueError where it has fired already."""
        if signal.at is not None:
            raise ValueError("a signal fires once")
        signal.at = self.now
        for work in signal.waiting:
            self.spawn(work)
        signal.waiting.clear()

    def fire_after(self, signal: Signal, delay: int) -> None:
        self.spawn(self._firing(signal), delay)

    def _firing(self, signal: Signal) -> Work:
        self.fire(signal)
        yield 0

    def run(self) -> None:
        """Until nothing is left that time alone would move."""
        while self._ready:
            self.now, _, work = heapq.heappop(self._ready)
            for wanted in work:
                if isinstance(wanted, Signal):
                    if wanted.at is None:
                        wanted.waiting.append(work)
                        break
                elif wanted > 0:
                    self.spawn(work, wanted)
                    break
