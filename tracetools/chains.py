"""Exposed communication, charged: transfer, or waiting for another rank, and then what that rank was doing.

In: what the stages found out about each process, and the split of the collectives (`Waiting`). Out: per process and step, causes that
sum to the step's exposed communication. A rank that waits in a collective waits for the rank that entered it last. What that rank
did at the same instant is the cause; where it was waiting in a collective of its own, what the rank did for which *it* waited, and
so on to the end of the chain: another rank's computation, a region of its host's code, or the driver of both.
Knows nothing of how calls were paired or idle time was explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracetools.breakdown import Explained
from tracetools.gaps import DRIVER, Segments
from tracetools.intervals import NONE, Spans, Timeline, innermost, minus, overlay, presence
from tracetools.model import Cause, Int64
from tracetools.waiting import Waiting

PEER = "peer"  # another rank, as `process` of a cause
TRANSFER, UNPAIRED = "transfer", "unpaired"
WAIT, WAIT_COMPUTE, WAIT_COMM, WAIT_MEMORY = "wait", "wait_compute", "wait_comm", "wait_memory"
_NOBODY = -2  # the two that came last entered together
_COMPUTE, _COMM, _MEMORY, _IDLE = range(4)  # what a process does; from _IDLE on: its idle segment, by row

Key = tuple[int, str | None, str | None, str]  # step, process, region, kind


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Pieces of one process's exposed communication. `target`: the process that is waited for."""

    start: Int64
    end: Int64
    step: Int64
    target: Int64

    def take(self, rows: Int64) -> _Parts:
        return _Parts(self.start[rows], self.end[rows], self.step[rows], self.target[rows])

    def cut(self, line: Timeline) -> tuple[_Parts, Int64]:
        """Cut where `line` changes, and its value in each part."""
        pieces = overlay(Spans(self.start, self.end), line)
        full = np.flatnonzero(pieces.spans.end > pieces.spans.start)
        parent = pieces.parent[full]
        parts = _Parts(pieces.spans.start[full], pieces.spans.end[full], self.step[parent], self.target[parent])
        return parts, pieces.value[full]


def comm_causes(found: Sequence[Explained], waiting: Waiting) -> list[list[tuple[Cause, ...]]]:
    """Per process, in the order of `found`, and per step: causes of its exposed communication, largest first."""
    targets = [_targets(waiting, i) for i in range(len(found))]
    doing = [_doing(f) for f in found]
    return [_of_process(found, waiting, targets, doing, i) for i in range(len(found))]


def _targets(waiting: Waiting, process: int) -> Timeline:
    """Which process this one waits for at every instant; NONE: for nobody."""
    m = waiting.matches
    rows = np.flatnonzero((m.process == process) & (waiting.wait > 0))
    last = waiting.last_row[m.collective[rows]]
    target = np.where(last == NONE, _NOBODY, m.process[np.maximum(last, 0)])
    start, end = m.start[rows], m.start[rows] + waiting.wait[rows]
    order = np.lexsort((-end, start))
    return innermost(start[order], end[order], target[order])


def _doing(found: Explained) -> Timeline:
    """What a process does at every instant of its steps."""
    a, idle = found.activity, found.gaps.segments.spans
    sets = (a.compute, minus(a.kernels, a.compute), minus(a.busy, a.kernels))
    start = np.concatenate([*(s.start for s in sets), idle.start])
    end = np.concatenate([*(s.end for s in sets), idle.end])
    codes = [np.full(len(s), code, np.int64) for code, s in enumerate(sets)]
    value = np.concatenate([*codes, _IDLE + np.arange(len(idle))])
    order = np.argsort(start, kind="stable")  # they are disjoint
    at = np.stack([start[order], end[order]], 1).reshape(-1)
    return Timeline(at, np.stack([value[order], np.full(len(order), NONE)], 1).reshape(-1))


def _of_process(
    found: Sequence[Explained], waiting: Waiting, targets: Sequence[Timeline], doing: Sequence[Timeline], process: int
) -> list[tuple[Cause, ...]]:
    activity, steps = found[process].activity, found[process].steps
    exposed = minus(activity.kernels, activity.compute)
    none = np.full(len(exposed), NONE, np.int64)
    parts, step = _Parts(exposed.start, exposed.end, none, none).cut(
        Timeline(steps.edges, np.append(np.arange(len(steps.steps)), NONE))
    )
    parts = _Parts(parts.start, parts.end, step, parts.target).take(np.flatnonzero(step != NONE))
    totals: dict[Key, int] = {}
    parts, paired = parts.cut(presence(waiting.matched(process)))
    _add(totals, parts.take(np.flatnonzero(paired == NONE)), None, None, UNPAIRED)
    parts, target = parts.take(np.flatnonzero(paired != NONE)).cut(targets[process])
    _add(totals, parts.take(np.flatnonzero(target == NONE)), None, None, TRANSFER)
    parts = _Parts(parts.start, parts.end, parts.step, target).take(np.flatnonzero(target != NONE))
    for _ in range(len(found)):
        parts = _one_link(found, targets, doing, parts, totals)
    _add(totals, parts, PEER, None, WAIT_COMM)  # a circle, which no clock without error can show
    return _by_step(totals, len(steps.steps))


def _one_link(
    found: Sequence[Explained],
    targets: Sequence[Timeline],
    doing: Sequence[Timeline],
    parts: _Parts,
    totals: dict[Key, int],
) -> _Parts:
    """Charge what ends here; return what has to be followed further."""
    _add(totals, parts.take(np.flatnonzero(parts.target == _NOBODY)), PEER, None, WAIT)
    further: list[_Parts] = []
    for q in np.unique(parts.target[parts.target >= 0]).tolist():
        mine, what = parts.take(np.flatnonzero(parts.target == q)).cut(doing[q])
        _add(totals, mine.take(np.flatnonzero(what == NONE)), PEER, None, WAIT)  # outside its steps
        _add(totals, mine.take(np.flatnonzero(what == _COMPUTE)), PEER, None, WAIT_COMPUTE)
        _add(totals, mine.take(np.flatnonzero(what == _MEMORY)), PEER, None, WAIT_MEMORY)
        idle = np.flatnonzero(what >= _IDLE)
        _add_idle(totals, mine.take(idle), found[q].gaps.segments.take(what[idle] - _IDLE), found[q].gaps.names)
        comm, target = mine.take(np.flatnonzero(what == _COMM)).cut(targets[q])
        _add(totals, comm.take(np.flatnonzero(target == NONE)), PEER, None, WAIT_COMM)
        follow = np.flatnonzero(target != NONE)
        further.append(_Parts(comm.start[follow], comm.end[follow], comm.step[follow], target[follow]))
    if not further:
        return parts.take(np.zeros(0, np.int64))
    return _Parts(*(np.concatenate([getattr(f, c) for f in further]) for c in ("start", "end", "step", "target")))


def _add(totals: dict[Key, int], parts: _Parts, process: str | None, region: str | None, kind: str) -> None:
    for step in np.unique(parts.step).tolist():
        mine = parts.step == step
        key = (step, process, region, kind)
        totals[key] = totals.get(key, 0) + int((parts.end[mine] - parts.start[mine]).sum())


def _add_idle(totals: dict[Key, int], parts: _Parts, segments: Segments, names: Sequence[str]) -> None:
    keys, inverse = np.unique(np.stack([segments.process, segments.region]), axis=1, return_inverse=True)
    for i, (process, region) in enumerate(keys.T.tolist()):
        rows = np.flatnonzero(inverse.reshape(-1) == i)
        who = "driver" if process == DRIVER else PEER
        _add(totals, parts.take(rows), who, names[region] if region != NONE else None, WAIT)


def _by_step(totals: dict[Key, int], steps: int) -> list[tuple[Cause, ...]]:
    out: list[list[Cause]] = [[] for _ in range(steps)]
    for (step, process, region, kind), ns in totals.items():
        if ns:
            out[step].append(Cause(process, region, kind, ns))
    return [tuple(sorted(causes, key=lambda c: (-c.ns, c.region or "", c.kind))) for causes in out]
