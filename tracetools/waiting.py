"""Each rank's time in a collective: waiting for the slowest rank, then transfer.

In: paired collectives on one clock. Out: per call its waiting time, from its start to the last rank's start and never longer than
itself; the rest is transfer. Per process the instants at which it waits; per type and size a `CollectiveRow` with bandwidths.
Bandwidths follow nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is size / time, bus
bandwidth is that times a factor of the operation and the number of ranks n, so that it can be held against the hardware's
whatever n is: all-reduce 2(n-1)/n; all-gather, reduce-scatter, all-to-all, gather, scatter (n-1)/n; broadcast, reduce 1. Size is the
whole of what is gathered, scattered or reduced; time is from the last rank's start to the last rank's end.
Knows nothing of how calls were paired or clocks set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracetools.clocks import SLACK_NS
from tracetools.collective_calls import SYNCHRONISING, message_bytes
from tracetools.collectives import Matches
from tracetools.intervals import EMPTY, NONE, Spans, union
from tracetools.model import Bool, CollectiveRank, CollectiveRow, Int64, Problem, Process

_SHARE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_WHOLE = ("broadcast", "reduce")
OUTLIER_SHARE = 0.5  # of a rank's communication in one call ...
OUTLIER_RATIO = 100  # ... that lasts so many times the median of the others
_LATE = 2**62  # ns; beyond any time, and still far from overflow


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """`wait` per call of `matches`, NONE where it is not paired. Per collective: the last start, the last end, the row that came last."""

    matches: Matches
    wait: Int64
    last_start: Int64
    last_end: Int64
    last_row: Int64  # NONE where two came last, or nobody waited

    def matched(self, process: int) -> Spans:
        """When a process is in collectives that could be split."""
        mine = self._rows(process)
        return union(self.matches.start[mine], self.matches.end[mine])

    def waiting(self, process: int) -> Spans:
        """When a process waits in at least one of them."""
        mine = self._rows(process)
        if not mine.any():
            return EMPTY
        return union(self.matches.start[mine], self.matches.start[mine] + self.wait[mine])

    def _rows(self, process: int) -> Bool:
        mine: Bool = (self.matches.process == process) & (self.wait != NONE)
        return mine


def only_possible(matches: Matches, placed: Bool) -> tuple[Matches, list[Problem]]:
    """Without calls of processes whose clock is not placed, and without collectives that one rank left before another entered.

    Where more than half of the collectives of a group that were paired by order are of that kind, the order is not to be trusted.
    """
    if not matches.count:
        return matches, []
    matches = _without_lone(matches, placed)
    paired = matches.collective != NONE
    present = np.unique(matches.collective[paired])
    group = np.full(matches.count, NONE, np.int64)
    group[matches.collective[paired]] = matches.group[paired]
    first_end, last_start = _extremes(matches, matches.kinds(*SYNCHRONISING))
    broken = last_start > first_end + SLACK_NS
    problems = []
    for g in np.unique(group[broken]).tolist():
        mine = present[group[present] == g]
        bad = int(broken[mine].sum())
        doubtful = bool(matches.ordered[mine].all()) and 2 * bad > len(mine)
        if doubtful:
            broken[mine] = True
        what = "none of them is paired" if doubtful else "these are not paired"
        detail = f"{matches.groups[g].label}: in {bad} of {len(mine)} collectives a rank leaves before another enters; {what}"
        problems.append(Problem("collectives_contradict_clocks", bad, detail))
    return matches.without(paired & broken[np.maximum(matches.collective, 0)]), problems


def _without_lone(matches: Matches, placed: Bool) -> Matches:
    """Without calls of processes that are not placed, nor what then is on one rank only (a group of one rank aside)."""
    before = np.bincount(matches.collective[matches.collective != NONE], minlength=matches.count)
    matches = matches.without(~placed[matches.process])
    after = np.bincount(matches.collective[matches.collective != NONE], minlength=matches.count)
    lone = (after == 1) & (before > 1)
    return matches.without((matches.collective != NONE) & lone[np.maximum(matches.collective, 0)])


def _extremes(matches: Matches, rows: Bool) -> tuple[Int64, Int64]:
    """Per collective (earliest end, latest start) of these rows."""
    rows = rows & (matches.collective != NONE)
    first_end, last_start = np.full(matches.count, _LATE), np.full(matches.count, -_LATE)
    np.minimum.at(first_end, matches.collective[rows], matches.end[rows])
    np.maximum.at(last_start, matches.collective[rows], matches.start[rows])
    return first_end, last_start


def split(matches: Matches) -> Waiting:
    """The rule of the module's docstring."""
    paired = matches.collective != NONE
    collective = np.maximum(matches.collective, 0)
    _, last_start = _extremes(matches, paired)
    last_end = np.full(matches.count, -_LATE)
    np.maximum.at(last_end, matches.collective[paired], matches.end[paired])
    if not matches.count:
        return Waiting(matches, np.full(len(matches), NONE, np.int64), last_start, last_end, last_start)
    until = np.minimum(matches.end, last_start[collective])
    wait = np.where(paired, np.maximum(until - matches.start, 0), NONE)
    late = np.flatnonzero(paired & (matches.start == last_start[collective]))
    last_row = np.full(matches.count, NONE, np.int64)
    last_row[matches.collective[late]] = late
    ties = np.bincount(matches.collective[late], minlength=matches.count) > 1
    last_row[ties] = NONE
    waited = np.zeros(matches.count, np.int64)
    np.add.at(waited, matches.collective[paired], wait[paired])
    last_row[waited == 0] = NONE
    return Waiting(matches, wait, last_start, last_end, last_row)


# ---------------------------------------------------------------- per type and size


def rows_of(w: Waiting, processes: tuple[Process, ...]) -> tuple[CollectiveRow, ...]:
    """One row per group, operation, type and size; most time first."""
    m = w.matches
    paired = np.flatnonzero(m.collective != NONE)
    if not len(paired):
        return ()
    size, what = _sizes(w), _told(m)[m.collective[paired]]
    kinds = {k: i for i, k in enumerate(dict.fromkeys(x.kind for x in m.whats))}
    types = {t: i for i, t in enumerate(dict.fromkeys(x.dtype for x in m.whats))}
    kind = np.array([kinds[x.kind] for x in m.whats], np.int64)[what]
    dtype = np.array([types[x.dtype] for x in m.whats], np.int64)[what]
    sizes, of_size = np.unique(size[m.collective[paired]], return_inverse=True)
    key = ((m.group[paired] * len(kinds) + kind) * len(types) + dtype) * len(sizes) + of_size
    order = np.argsort(key, kind="stable")
    unique, first = np.unique(key[order], return_index=True)
    rows = []
    for number, calls in zip(unique.tolist(), np.split(paired[order], first[1:]), strict=True):
        rest, at = divmod(number, len(sizes))
        of_kind, of_type = divmod(rest % (len(kinds) * len(types)), len(types))
        rows.append(_row(w, processes, calls, list(kinds)[of_kind], list(types)[of_type], int(sizes[at])))
    return tuple(sorted(rows, key=lambda r: (-r.duration_ns, r.group, r.type, r.bytes or 0)))


def _told(m: Matches) -> Int64:
    """Per collective what its best-informed call says it does."""
    score = np.array([2 * (x.kind != "other") + (x.dtype is not None) for x in m.whats] or [0], np.int64)
    rows = np.flatnonzero(m.collective != NONE)
    rows = rows[np.argsort(score[m.what[rows]], kind="stable")]
    what = np.zeros(m.count, np.int64)
    what[m.collective[rows]] = m.what[rows]  # the last one written stays
    return what


def _sizes(w: Waiting) -> Int64:
    """Bytes per collective, the largest that a rank tells (of an all-to-all each rank has its own); NONE where unknown."""
    m = w.matches
    ranks = np.bincount(m.collective[m.collective != NONE], minlength=m.count)
    size = np.full(m.count, NONE, np.int64)
    n = np.array([m.groups[g].size or 0 for g in range(len(m.groups))], np.int64)
    paired = np.flatnonzero(m.collective != NONE)
    members = np.maximum(n[m.group[paired]], ranks[m.collective[paired]])
    many = int(members.max(initial=0)) + 1
    table, inverse = np.unique(m.what[paired] * many + members, return_inverse=True)
    told = [message_bytes(m.whats[code // many], code % many) for code in table.tolist()]
    per_row = np.array([NONE if b is None else b for b in told], np.int64)[inverse]
    np.maximum.at(size, m.collective[paired], per_row)
    return size


def _row(
    w: Waiting, processes: tuple[Process, ...], rows: Int64, kind: str, dtype: str | None, size: int
) -> CollectiveRow:
    m = w.matches
    group = m.groups[int(m.group[rows[0]])]
    which = np.unique(m.collective[rows])
    present = np.unique(m.process[rows])
    length, wait = m.end[rows] - m.start[rows], w.wait[rows]
    members = max(group.size or 0, len(present))
    took = int((w.last_end[which] - w.last_start[which]).clip(0).sum())
    algorithm = size * len(which) / took if size != NONE and size > 0 and took > 0 else None
    factor = _factor(kind, members)
    return CollectiveRow(
        type=kind,
        group=group.label,
        ranks=members,
        recorded_ranks=len(present),
        dtype=dtype,
        bytes=size if size != NONE else None,
        count=len(which),
        duration_ns=int(length.sum()),
        wait_ns=int(wait.sum()),
        transfer_ns=int(length.sum() - wait.sum()),
        longest_ns=int(length.max()),
        median_ns=int(np.median(length)),
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=None if algorithm is None or factor is None else algorithm * factor,
        per_rank=tuple(_rank(w, processes[p], rows[m.process[rows] == p], which) for p in present.tolist()),
    )


def _rank(w: Waiting, process: Process, rows: Int64, which: Int64) -> CollectiveRank:
    m = w.matches
    length, wait = int((m.end[rows] - m.start[rows]).sum()), int(w.wait[rows].sum())
    last = int(np.isin(w.last_row[which], rows).sum())
    return CollectiveRank(process.trace.file, process.rank, len(rows), length, wait, length - wait, last)


def _factor(kind: str, ranks: int) -> float | None:
    """Bus bandwidth over algorithm bandwidth; None where nccl-tests has no such factor."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in _SHARE:
        return (ranks - 1) / ranks
    return 1.0 if kind in _WHOLE else None


def outliers(start: Int64, end: Int64) -> list[Problem]:
    """One call that holds most of a process's communication: averages over its calls say nothing then."""
    length = end - start
    if len(length) < 3 or not length.sum():
        return []
    longest = int(length.argmax())
    rest = np.delete(length, longest)
    usual = int(np.median(rest))
    share = length[longest] / length.sum()
    if share < OUTLIER_SHARE or length[longest] < OUTLIER_RATIO * max(usual, 1):
        return []
    place = "first" if longest == 0 else f"{longest + 1}th"
    detail = (
        f"the {place} of {len(length)} collectives lasts {length[longest] / 1e6:,.3f} ms, {100 * share:.4f}% of the time in them; "
        f"the median of the others is {usual / 1e6:,.3f} ms"
    )
    return [Problem("outlier_collective", 1, detail)]
