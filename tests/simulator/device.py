"""Device streams with launch queues, and collectives over ranks.

In: work, as host threads put it on a stream. Out: slices of device work, and signals when it is done. Work of one stream runs in
order. A collective begins on each rank when the stream comes to it, and ends on all ranks at once, a transfer after the last began.
Knows nothing of host threads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from simulator.engine import Engine, Signal
from simulator.engine import Work as Running
from simulator.record import Record


class Meeting:
    """One collective: of so many ranks, with so long a transfer once all are there."""

    __slots__ = ("_absent", "_engine", "_transfer", "over")

    def __init__(self, engine: Engine, ranks: int, transfer_ns: int) -> None:
        self._engine = engine
        self._absent = ranks
        self._transfer = transfer_ns
        self.over = Signal()

    def join(self) -> Signal:
        self._absent -= 1
        if not self._absent:
            self._engine.fire_after(self.over, self._transfer)
        return self.over


@dataclass(slots=True, eq=False)
class Work:
    """`arrives`: when the launch has reached the device. `after`: it waits for these (events of other streams)."""

    name: str
    category: str
    duration: int
    correlation: int
    arrives: int
    meeting: Meeting | None = None
    told: str = ""
    after: tuple[Signal, ...] = ()
    done: Signal = field(default_factory=Signal)


class Stream:
    """`depth`: so many launches may be under way; `gap_ns` passes between two pieces of work that are both there."""

    def __init__(self, engine: Engine, record: Record, number: int, depth: int, gap_ns: int) -> None:
        self._engine = engine
        self._record = record
        self.number = number
        self._depth = depth
        self._gap = gap_ns
        self._queue: deque[Work] = deque()
        self._under_way = 0
        self._filled = Signal()
        self._freed = Signal()
        self._after: list[Signal] = []
        self.last = Signal()  # of the last work so far
        engine.fire(self.last)
        engine.spawn(self._serve())

    def room(self) -> Signal | None:
        """What to wait for before another launch; None where there is room."""
        return self._freed if self._under_way >= self._depth else None

    def wait_for(self, signal: Signal) -> None:
        """What is enqueued from now on waits for this event."""
        if signal.at is None:
            self._after.append(signal)

    def put(self, work: Work) -> None:
        work.after, self._after = tuple(self._after), []
        self._under_way += 1
        self._queue.append(work)
        self.last = work.done
        if self._filled.at is None:
            self._engine.fire(self._filled)

    def _serve(self) -> Running:
        free = 0
        while True:
            if not self._queue:
                self._filled = Signal()
                yield self._filled
            work = self._queue.popleft()
            yield from work.after
            yield max(work.arrives, free + self._gap) - self._engine.now
            start = self._engine.now
            yield work.meeting.join() if work.meeting else work.duration
            free = self._engine.now
            self._record.device(work.name, work.category, self.number, start, free, work.correlation, work.told)
            self._under_way -= 1
            freed, self._freed = self._freed, Signal()
            self._engine.fire(freed)
            self._engine.fire(work.done)
