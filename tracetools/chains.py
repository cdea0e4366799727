"""Exposed communication, charged: transfer, or waiting for another rank, and then what that rank was doing longer.

In: what the stages found out about each process, and the split of the collectives (`Waiting`). Out: per process and step, causes that
sum to the step's exposed communication.
A rank that waits in a collective waits for the rank that entered it last, since both last left a collective together. From there
on each spent its time on computing, on idle regions of its code or of its driver's, on other collectives. The last one came
later by exactly what it spent more, less what it spent less, and that is what the wait is charged to: what it was doing while
the other waited may be just what the other had done before. Where it waited more for a third rank, that one's share is in turn
what the third rank was doing longer, to the end of the chain. A transfer beside which the last rank computes is no reason to wait: on
a rank that has nothing left to do meanwhile it is part of the wait.
Knows nothing of how calls were paired or idle time was explained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracetools.breakdown import Explained
from tracetools.gaps import DRIVER, HOST
from tracetools.intervals import NONE, Spans, Timeline, covered, innermost, minus, overlay, presence, union, value_at
from tracetools.model import Bool, Cause, Int64
from tracetools.waiting import Waiting

PEER = "peer"  # another rank, as `process` of a cause
TRANSFER, UNPAIRED = "transfer", "unpaired"
WAIT, WAIT_COMPUTE, WAIT_COMM, WAIT_MEMORY = "wait", "wait_compute", "wait_comm", "wait_memory"
_NOBODY = -2  # the two that came last entered together
_FOR = "for"  # kind of a cause that is not the end yet: (who waits, or None, for which process, _FOR)
_NOT_RECORDED = ("", None, "")  # before and after a process's steps

Key = tuple[str | int | None, str | int | None, str]  # process, region, kind
Shares = dict[Key, float]  # ns


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Pieces of one process's exposed communication in which it waits for the process `target`."""

    start: Int64
    end: Int64
    step: Int64
    target: Int64

    def take(self, rows: Int64) -> _Waits:
        return _Waits(self.start[rows], self.end[rows], self.step[rows], self.target[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One process: its waits, what it does at each instant otherwise, and its exposed communication that is no wait, by step."""

    waits: _Waits
    doing: Mapping[Key, Spans]
    rest: tuple[tuple[int, str, int], ...]  # step, kind, ns


def comm_causes(found: Sequence[Explained], waiting: Waiting) -> list[list[tuple[Cause, ...]]]:
    """Per process, in the order of `found`, and per step: causes of its exposed communication, largest first."""
    sides = [_side(found, waiting, p) for p in range(len(found))]
    # process -> (step, process waited for) -> what is charged
    charged = [_charged(found, waiting, sides, p) for p in range(len(found))]
    for _ in found:
        charged = [_followed(of_process, charged) for of_process in charged]
    return [_causes(side, of, len(f.steps.steps)) for side, of, f in zip(sides, charged, found, strict=True)]


# ---------------------------------------------------------------- one process


def _side(everyone: Sequence[Explained], waiting: Waiting, process: int) -> _Side:
    found = everyone[process]
    activity, edges = found.activity, found.steps.edges
    exposed = minus(activity.kernels, activity.compute)
    pieces = overlay(exposed, Timeline(edges, np.append(np.arange(len(edges) - 1), NONE)))
    inside = pieces.value != NONE
    spans, step = Spans(pieces.spans.start[inside], pieces.spans.end[inside]), pieces.value[inside]
    pieces = overlay(spans, presence(waiting.matched(process)))
    spans, step, paired = pieces.spans, step[pieces.parent], pieces.value != NONE
    pieces = overlay(spans, _targets(everyone, waiting, process))
    spans, step, paired, target = pieces.spans, step[pieces.parent], paired[pieces.parent], pieces.value
    full = spans.end > spans.start
    waits = full & paired & (target != NONE)
    rest = [
        (int(i), kind, int((spans.end - spans.start)[rows & (step == i)].sum()))
        for kind, rows in ((UNPAIRED, full & ~paired), (TRANSFER, full & paired & (target == NONE)))
        for i in np.unique(step[rows])
    ]
    all_waits = _Waits(spans.start, spans.end, step, target)
    others = full & ~waits
    doing = _doing(found, Spans(spans.start[others], spans.end[others]))
    mine = all_waits.take(np.flatnonzero(waits))
    for q in np.unique(mine.target).tolist():
        there = mine.target == q
        doing[None, q, _FOR] = Spans(mine.start[there], mine.end[there])
    return _Side(mine, doing, tuple(rest))


def _targets(found: Sequence[Explained], waiting: Waiting, process: int) -> Timeline:
    """Which process this one waits for at every instant; NONE: for nobody.

    Where the last rank computes beside the transfer, the transfer does not hold it up: it is this one that has nothing left to do.
    """
    m = waiting.matches
    rows = np.flatnonzero((m.process == process) & (waiting.wait > 0))
    last = waiting.last_row[m.collective[rows]]
    target = np.where(last == NONE, _NOBODY, m.process[np.maximum(last, 0)])
    start, end = m.start[rows], m.start[rows] + waiting.wait[rows]
    parts = [(start, end, target)]
    for q in np.unique(target[target >= 0]).tolist():
        mine = np.flatnonzero(target == q)
        beside = overlay(Spans(end[mine], m.end[rows[mine]]), presence(found[q].activity.compute))
        hit = (beside.value != NONE) & (beside.spans.end > beside.spans.start)
        parts.append((beside.spans.start[hit], beside.spans.end[hit], np.full(int(hit.sum()), q)))
    start, end, target = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((-end, start))
    return innermost(start[order], end[order], target[order])


def _doing(found: Explained, communicating: Spans) -> dict[Key, Spans]:
    """What a process does at every instant, but for its waits; before and after its steps nothing is known of it."""
    a, edges, ever = found.activity, found.steps.edges, 2**60
    doing: dict[Key, Spans] = {
        (PEER, None, WAIT_COMPUTE): a.compute,
        (PEER, None, WAIT_COMM): communicating,
        (PEER, None, WAIT_MEMORY): minus(a.busy, a.kernels),
        _NOT_RECORDED: Spans(np.array([-ever, edges[-1]]), np.array([edges[0], ever])),
    }
    segments, names = found.gaps.segments, found.gaps.names
    keys, inverse = np.unique(np.stack([segments.process == DRIVER, segments.region]), axis=1, return_inverse=True)
    for i, (driver, region) in enumerate(keys.T.tolist()):
        rows = np.flatnonzero(inverse.reshape(-1) == i)
        key = ("driver" if driver else PEER, names[region] if region != NONE else None, WAIT)
        doing[key] = Spans(segments.start[rows], segments.end[rows])
    return doing


# ---------------------------------------------------------------- who was late, and why

Charged = dict[tuple[int, int], Shares]  # (step, process waited for) -> what for


def _charged(found: Sequence[Explained], waiting: Waiting, sides: Sequence[_Side], process: int) -> Charged:
    waits = sides[process].waits
    out: Charged = {}
    for q in np.unique(waits.target).tolist():
        mine = waits.take(np.flatnonzero(waits.target == q))
        length = mine.end - mine.start
        if q == _NOBODY:
            keys: list[Key] = [(PEER, None, WAIT)]
            shares = length[:, None].astype(np.float64)
        else:
            since = _since(found, waiting, process, q, mine.start)
            keys, longer = _longer(sides, process, q, since, mine.start, mine.end)
            shares = _in_turn(longer, since, length, keys.index((PEER, None, WAIT_COMM)))
        for step in np.unique(mine.step).tolist():
            total = shares[mine.step == step].sum(axis=0)
            bucket = out[step, q] = defaultdict(float)
            for i in np.flatnonzero(total).tolist():
                bucket[_told(keys[i], q)] += float(total[i])
    return out


def _since(found: Sequence[Explained], waiting: Waiting, p: int, q: int, at: Int64) -> Int64:
    """When both last left a collective together before each instant; where they never did, when the first of them began."""
    m = waiting.matches
    common = np.intersect1d(*(m.collective[(m.process == i) & (m.collective != NONE)] for i in (p, q)))
    left = np.sort(waiting.last_end[common])
    for i in (p, q):
        left = left[~_goes_on(found[i], left)]
    first = min(int(found[i].steps.edges[0]) for i in (p, q))
    before = np.searchsorted(left, at, side="right") - 1
    since: Int64 = np.where(before >= 0, np.append(left, first)[before], np.minimum(first, at))
    return since


def _goes_on(found: Explained, left: Int64) -> Bool:
    """Did the process's own work not wait for a collective that ended then? It computed beside it, or its host had launched nothing."""
    computes: Bool = value_at(presence(found.activity.compute), left - 1) != NONE
    if not found.activity.on_device:
        return computes
    segments = found.gaps.segments
    host = segments.kind == HOST
    launches_late: Bool = value_at(presence(union(segments.start[host], segments.end[host])), left) != NONE
    return np.logical_or(computes, launches_late)


def _longer(
    sides: Sequence[_Side], p: int, q: int, since: Int64, start: Int64, end: Int64
) -> tuple[list[Key], NDArray[np.float64]]:
    """For each wait of p and each thing that is done: how much longer q did it, from `since` to `end`, than p, from `since` to `start`.

    Waits of the two for each other are what is to be explained: they are left out. Waits for a third count.
    """
    of_p = {k: s for k, s in sides[p].doing.items() if k != (None, q, _FOR)}
    of_q = {k: s for k, s in sides[q].doing.items() if k != (None, p, _FOR)}
    longer = {k: covered(s, end) - covered(s, since) for k, s in of_q.items()}
    for key in of_p.keys() & longer.keys():
        longer[key] -= covered(of_p[key], start) - covered(of_p[key], since)
    return list(longer), np.stack(list(longer.values()), axis=1).astype(np.float64)


def _in_turn(longer: NDArray[np.float64], since: Int64, length: Int64, other: int) -> NDArray[np.float64]:
    """Each wait divided among what was done longer; of several waits since the same instant, the later have what the earlier left.

    Column `other` has the waits in which nothing was done longer: clocks contradict each other.
    """
    out = np.maximum(longer, 0.0)
    out[out.sum(axis=1) == 0, other] = 1.0
    out *= (length / out.sum(axis=1))[:, None]
    had = np.zeros_like(out)
    for i in np.flatnonzero(np.append(False, since[1:] == since[:-1])).tolist():
        had[i] = had[i - 1] + out[i - 1]
        left = np.maximum(longer[i] - had[i], 0.0)
        if left.any():
            out[i] = left * (length[i] / left.sum())
    return out


def _told(key: Key, waiter: int) -> Key:
    """As a cause: who waits for a third, and that nothing is known outside the steps."""
    _, third, kind = key
    if key == _NOT_RECORDED or (kind == _FOR and third == _NOBODY):
        return PEER, None, WAIT
    return (waiter, third, _FOR) if kind == _FOR else key


def _shares(amounts: Mapping[Key, float]) -> Shares:
    """Amounts as shares of 1. Where there are none, clocks contradict each other, and the last rank communicates for all we know."""
    total = sum(amounts.values())
    return {key: ns / total for key, ns in amounts.items()} if total else {(PEER, None, WAIT_COMM): 1.0}


def _followed(charged: Charged, of_all: Sequence[Charged]) -> Charged:
    """What was charged to a rank that waits for a third, charged to what that wait was charged to in the same step."""
    out: Charged = {}
    for (step, q), amounts in charged.items():
        bucket = out[step, q] = defaultdict(float)
        for (who, third, kind), ns in amounts.items():
            if kind != _FOR:
                bucket[who, third, kind] += ns
                continue
            assert isinstance(who, int) and isinstance(third, int)
            for key, share in _shares(of_all[who].get((step, third), {})).items():
                bucket[key] += share * ns
    return out


# ---------------------------------------------------------------- sums


def _causes(side: _Side, charged: Charged, steps: int) -> list[tuple[Cause, ...]]:
    """In whole ns, so that the waits of a step sum to what they were (largest remainder)."""
    length = side.waits.end - side.waits.start
    out = []
    for step in range(steps):
        amounts: Shares = defaultdict(float)
        for (i, _), shares in charged.items():
            if i == step:
                for (process, region, kind), ns in shares.items():
                    # a circle, which no clock without error can show
                    amounts[(PEER, None, WAIT_COMM) if kind == _FOR else (process, region, kind)] += ns
        whole = _rounded(amounts, int(length[side.waits.step == step].sum()))
        causes = [Cause(*key, ns) for key, ns in whole.items() if ns]  # type: ignore[arg-type]
        causes += [Cause(None, None, kind, ns) for i, kind, ns in side.rest if i == step and ns]
        out.append(tuple(sorted(causes, key=lambda c: (-c.ns, c.region or "", c.kind))))
    return out


def _rounded(amounts: Mapping[Key, float], total: int) -> dict[Key, int]:
    whole = {key: int(ns) for key, ns in amounts.items()}
    order = sorted(amounts, key=lambda k: (whole[k] - amounts[k], str(k)))
    missing = total - sum(whole.values())
    for i in range(abs(missing)):
        whole[order[i % len(order)]] += 1 if missing > 0 else -1
    return whole
