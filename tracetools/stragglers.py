"""Ranks that the others waited for in collectives, and what they were doing meanwhile.

In: the split of the collectives (`Waiting`) and what the stages found out about each process. Out: `Straggler` records, the one that
cost most first: in how many collectives it came last, how long the others waited for it, and its own partition and causes of the
time in which they waited. Knows nothing of how any of these were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracetools.breakdown import Explained, causes_per_step
from tracetools.gaps import Gaps
from tracetools.intervals import NONE, Spans, clip, intersect, presence, union
from tracetools.model import Cause, Int64, Straggler
from tracetools.waiting import Waiting


def stragglers(found: Sequence[Explained], waiting: Waiting) -> tuple[Straggler, ...]:
    """Every rank that somebody waited for; `found` in the order of the run's processes."""
    m = waiting.matches
    waited = np.zeros(m.count, np.int64)
    paired = m.collective != NONE
    np.add.at(waited, m.collective[paired], waiting.wait[paired])
    late = waiting.last_row
    which = np.flatnonzero(late != NONE)
    by_process = m.process[late[which]]
    rows = [_straggler(found[p], p, which[by_process == p], waited, waiting) for p in np.unique(by_process).tolist()]
    return tuple(sorted(rows, key=lambda s: (-s.waited_ns, s.rank or 0, s.file)))


def _straggler(found: Explained, process: int, which: Int64, waited: Int64, waiting: Waiting) -> Straggler:
    m = waiting.matches
    in_these = np.zeros(m.count, np.bool_)
    in_these[which] = True
    others = (m.collective != NONE) & (m.process != process) & in_these[np.maximum(m.collective, 0)]
    spans = union(m.start[others], m.start[others] + waiting.wait[others])
    edges = found.steps.edges
    inside = clip(spans, int(edges[0]), int(edges[-1]))
    activity = found.activity
    compute, kernels, busy = (intersect(s, inside).total for s in (activity.compute, activity.kernels, activity.busy))
    took_part = np.unique(m.collective[(m.process == process) & (m.collective != NONE)])
    return Straggler(
        file=found.process.trace.file,
        role=found.process.role,
        rank=found.process.rank,
        last=len(which),
        collectives=len(took_part),
        waited_ns=int(waited[which].sum()),
        meanwhile_ns=spans.total,
        compute_ns=compute,
        exposed_comm_ns=kernels - compute,
        exposed_memory_ns=busy - kernels,
        idle_ns=inside.total - busy,
        not_recorded_ns=spans.total - inside.total,
        causes=_causes_within(found, inside),
    )


def _causes_within(found: Explained, spans: Spans) -> tuple[Cause, ...]:
    """Causes of a process's idle time within disjoint spans, largest first."""
    segments, inside = found.gaps.segments.cut(presence(spans))
    part = replace(found, gaps=Gaps(segments.take(inside == 1), found.gaps.names))
    totals: dict[tuple[str | None, str | None, str], int] = {}
    fillers: dict[tuple[str | None, str | None, str], dict[str, int]] = {}
    for cause in (c for causes in causes_per_step(part) for c in causes):
        key = (cause.process, cause.region, cause.kind)
        totals[key] = totals.get(key, 0) + cause.ns
        mine = fillers.setdefault(key, {})
        for name, ns in cause.filled_by:
            mine[name] = mine.get(name, 0) + ns
    rows = [
        Cause(*key, ns, tuple(sorted(fillers[key].items(), key=lambda f: (-f[1], f[0])))) for key, ns in totals.items()
    ]
    return tuple(sorted(rows, key=lambda c: (-c.ns, c.region or "", c.kind)))
