"""How far the clocks of a run's files are apart, told by the collectives they share and by calls between processes.

In: the processes of a run and their paired collectives. Out: `Placement`: what each process's times must be moved by, which
processes cannot be placed, how sure that is, in words; and a run with those times moved.
Processes of one host share a clock and are never moved against each other. Between hosts the *ends* of a collective are one
instant (starts tell who was late); the offset is the median of their differences. Nobody leaves a synchronising collective before
all have entered it, which bounds the offset whatever was late. Where no file names its host, times stay as they are unless they
break that bound. Knows nothing of steps, causes and waiting.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracetools.collective_calls import SYNCHRONISING
from tracetools.collectives import Matches
from tracetools.intervals import NONE
from tracetools.model import Bool, Clock, Int64, Problem, Process, Run

SLACK_NS = 10_000  # device timestamps of one host agree to a few microseconds
SHOWN = 8
_EARLY, _LATE = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Per process of the run: `ahead`, ns that its clock is ahead of the run's, to be taken off; whether it is `placed`."""

    ahead: Int64
    placed: Bool
    clocks: tuple[Clock, ...]
    problems: tuple[Problem, ...]

    @property
    def moves(self) -> bool:
        return bool(self.ahead.any())


def causal_bounds(sent: Int64, started: Int64, ended: Int64, received: Int64) -> tuple[int, int]:
    """Between which values "the worker's clock minus the caller's" lies, ns, for calls paired row by row.

    `sent` and `received` on the caller's clock, `started` and `ended` on the worker's: nothing starts before it is sent or is
    received before it ends. Without calls: the whole range of int64.
    """
    low = int((ended - received).max()) if len(ended) else int(_EARLY)
    high = int((started - sent).min()) if len(started) else int(_LATE)
    return low, high


def place(processes: Sequence[Process], matches: Matches) -> Placement:
    """Never raises. Processes that share no collective with the others stay where their file puts them."""
    return _Places(processes, matches).solve()


def aligned(run: Run, placement: Placement) -> tuple[Run, int]:
    """(the run with its times moved, ns by which everything was moved so that no time is negative)."""
    moved = [
        _moved(p, int(a), run.origin_ns, bool(ok))
        for p, a, ok in zip(run.processes, placement.ahead, placement.placed, strict=True)
    ]
    first = min((int(p.trace.events.start[0]) for p in moved if p.clock_placed and len(p.trace.events)), default=0)
    if first < 0:
        origin = run.origin_ns + first
        moved = [_later(p, -first, origin) if p.clock_placed else p for p in moved]
    else:
        first, origin = 0, run.origin_ns
    stale = [p.kind for p in run.problems if p.kind == "clock"] if all(p.clock_placed for p in moved) else []
    kept = tuple(p for p in run.problems if p.kind not in stale)
    return replace(run, processes=tuple(moved), origin_ns=origin, problems=(*kept, *placement.problems)), -first


def _moved(process: Process, ahead: int, origin_ns: int, placed: bool) -> Process:
    if not placed:
        return replace(process, clock_placed=False)
    if not ahead and process.clock_placed:
        return process
    trace = process.trace
    zero = trace.origin_ns - (trace.info.base_ns or 0) + ahead  # ns in the file's own times that become 0
    info = replace(trace.info, base_ns=origin_ns - zero)
    trace = replace(trace, events=trace.events.shifted(-ahead), info=info, origin_ns=origin_ns)
    return replace(process, trace=trace, clock_placed=True)


def _later(process: Process, by_ns: int, origin_ns: int) -> Process:
    trace = process.trace
    return replace(process, trace=replace(trace, events=trace.events.shifted(by_ns), origin_ns=origin_ns))


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """Per (clock, collective): mean of the ends, earliest end, latest start. Sorted by clock, then collective."""

    clock: Int64
    collective: Int64
    end: Int64
    first_end: Int64
    last_start: Int64

    def of(self, rows: Bool | Int64) -> _Ends:
        return _Ends(
            self.clock[rows], self.collective[rows], self.end[rows], self.first_end[rows], self.last_start[rows]
        )

    def earlier(self, by_ns: int) -> _Ends:
        return replace(self, end=self.end - by_ns, first_end=self.first_end - by_ns, last_start=self.last_start - by_ns)


class _Places:
    """Clocks are placed one after another, from the reference outwards along shared collectives."""

    def __init__(self, processes: Sequence[Process], matches: Matches) -> None:
        self.processes = processes
        self.names = [_clock_of(p, i) for i, p in enumerate(processes)]
        index = {name: i for i, name in enumerate(dict.fromkeys(self.names))}
        self.clock = np.array([index[name] for name in self.names], np.int64)
        self.ends = _ends(matches, self.clock)
        self.ahead = np.zeros(len(index), np.int64)
        self.placed = np.ones(len(index), np.bool_)
        self.clocks: list[Clock] = []
        self.problems: list[Problem] = []
        self.base_hosts: set[str | None] = set()

    def solve(self) -> Placement:
        for i, process in enumerate(self.processes):
            self.placed[self.clock[i]] &= process.clock_placed
        if len(self.ends.clock) and len(self.ahead) > 1:
            self._outwards()
        self._unchecked()
        shown = self.problems[:SHOWN]
        if len(self.problems) > SHOWN:
            shown.append(
                Problem(
                    "clock_offset",
                    len(self.problems) - SHOWN,
                    "more clocks that were looked at; see `clocks` in --json",
                )
            )
        return Placement(self.ahead[self.clock], self.placed[self.clock], tuple(self.clocks), tuple(shown))

    def _outwards(self) -> None:
        reference = self._reference()
        known = {reference}
        self.base_hosts = {p.host for i, p in enumerate(self.processes) if self.clock[i] == reference}
        base = self.ends.of(self.ends.clock == reference)
        while True:
            rest = self.ends.of(~np.isin(self.ends.clock, list(known)))
            shared = np.isin(rest.collective, base.collective)
            reached = np.unique(rest.clock[shared]).tolist()
            if not reached:
                return
            added = [base]
            for clock in reached:
                known.add(clock)
                mine = rest.of(rest.clock == clock)
                if self._decide(clock, mine, base, reference):
                    added.append(mine.earlier(int(self.ahead[clock])))
            base = _joined(added)

    def _unchecked(self) -> None:
        """Hosts whose clock nothing in the files can be held against."""
        hosts = {p.host for p in self.processes if p.host and p.clock_placed}
        checked = {c.host for c in self.clocks} | ({self.processes[0].host} if not self.clocks else set())
        lone = sorted(h for h in hosts - checked if h not in self.base_hosts)
        if len(hosts) > 1 and lone:
            detail = f"host {', '.join(lone[:SHOWN])}: no collective in common with the others, times are as its own clock has them"
            self.problems.append(Problem("clock_unchecked", len(lone), detail))

    def _reference(self) -> int:
        """The driver's clock if ranks share it, else that of the first process that is placed."""
        present = set(self.ends.clock.tolist())
        order = [i for i, p in enumerate(self.processes) if self.clock[i] in present]
        order.sort(key=lambda i: not self.placed[self.clock[i]])
        driver = [
            i
            for i, p in enumerate(self.processes)
            if p.role == "driver" and self.clock[i] in present and p.clock_placed
        ]
        return int(self.clock[(driver or order)[0]])

    def _decide(self, clock: int, mine: _Ends, base: _Ends, reference: int) -> bool:
        """Place one clock against what is placed. False: it cannot be."""
        at = np.searchsorted(base.collective, mine.collective)
        at = np.minimum(at, len(base.collective) - 1)
        both = base.collective[at] == mine.collective
        theirs, mine = base.of(at[both]), mine.of(both)
        apart = mine.end - theirs.end
        low, high = causal_bounds(theirs.last_start, mine.first_end, mine.last_start, theirs.first_end)
        who = self._who(clock)
        if low > high + 2 * SLACK_NS:
            self.placed[clock] = False
            self._note(clock, None, low, high, len(apart), None)
            bounds = f"at least {_us(low)}, at most {_us(high)} us"
            detail = f"{who}: no clock offset fits all {len(apart)} shared collectives ({bounds}): analysed alone"
            self.problems.append(Problem("clock_contradiction", self._files(clock), detail))
            return False
        offset = int(np.median(apart)) if low > high else int(np.clip(np.median(apart), low, high))
        stays = self._unnamed(clock, reference) and low - SLACK_NS <= 0 <= high + SLACK_NS
        spread = int(np.abs(apart - offset).max())
        self.ahead[clock] = 0 if stays else offset
        self.placed[clock] = True
        self._note(clock, int(self.ahead[clock]), low, high, len(apart), spread)
        if not stays:
            detail = (
                f"{who}: clock {_us(offset)} us ahead of {self._who(reference)}, times moved; the ends of {len(apart)} collectives agree "
                f"within {_us(spread)} us, bounds {_us(low)} to {_us(high)}"
            )
            self.problems.append(Problem("clock_offset", self._files(clock), detail))
        return True

    def _unnamed(self, clock: int, reference: int) -> bool:
        """No host is known on one of the sides, and the file's clock looked like the others'."""
        mine = [p for i, p in enumerate(self.processes) if self.clock[i] == clock]
        others = [p for i, p in enumerate(self.processes) if self.clock[i] == reference]
        return all(p.clock_placed for p in mine) and (mine[0].host is None or others[0].host is None)

    def _note(self, clock: int, offset: int | None, low: int, high: int, collectives: int, spread: int | None) -> None:
        for i, p in enumerate(self.processes):
            if self.clock[i] == clock:
                self.clocks.append(Clock(p.trace.file, p.role, p.rank, p.host, offset, low, high, spread, collectives))

    def _files(self, clock: int) -> int:
        return int((self.clock == clock).sum())

    def _who(self, clock: int) -> str:
        mine = [p for i, p in enumerate(self.processes) if self.clock[i] == clock]
        return f"host {mine[0].host}" if mine[0].host and mine[0].clock_placed else mine[0].label


def _clock_of(process: Process, index: int) -> Hashable:
    return ("host", process.host) if process.host and process.clock_placed else ("file", index)


def _ends(matches: Matches, clock: Int64) -> _Ends:
    rows = np.flatnonzero(matches.kinds(*SYNCHRONISING) & (matches.collective != NONE))
    return _grouped(
        clock[matches.process[rows]],
        matches.collective[rows],
        matches.end[rows],
        matches.end[rows],
        matches.start[rows],
    )


def _joined(parts: Sequence[_Ends]) -> _Ends:
    """Of several clocks, already aligned, as of one."""
    collective, end, first, last = (
        np.concatenate([getattr(p, c) for p in parts]) for c in ("collective", "end", "first_end", "last_start")
    )
    return _grouped(np.zeros(len(end), np.int64), collective, end, first, last)


def _grouped(clock: Int64, collective: Int64, end: Int64, first_end: Int64, last_start: Int64) -> _Ends:
    many = int(collective.max(initial=0)) + 1
    keys, inverse, count = np.unique(clock * many + collective, return_inverse=True, return_counts=True)
    total, first, last = np.zeros(len(count), np.int64), np.full(len(count), _LATE), np.full(len(count), _EARLY)
    np.add.at(total, inverse, end)
    np.minimum.at(first, inverse, first_end)
    np.maximum.at(last, inverse, last_start)
    return _Ends(keys // many, keys % many, total // np.maximum(count, 1), first, last)


def _us(ns: int) -> str:
    return f"{ns / 1e3:,.3f}"
