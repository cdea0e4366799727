"""What each region of the host's code cost its process: device work it launched, idle time it is charged with, waits it made.

In: a classified process, its steps, its activity and its explained gaps. Out: `RegionUse` and `SyncSite` rows, largest first.
Device work belongs to the innermost region of the thread that launched it, at the launch (where that has none, to the region of
the thread with the step markers). Durations are added up: work of two streams at once counts twice, unlike in the partition.
Knows nothing of other processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracetools.activity import Activity, collective_names, operator_timelines
from tracetools.classify import COMM, COMPUTE, MEMORY, Classified, names_where
from tracetools.gaps import KINDS, OWN, Gaps, Segments
from tracetools.intervals import NONE, Spans, covered, innermost, overlay, value_at
from tracetools.model import Category, Int64, RegionUse, SyncSite
from tracetools.stackprofile import StackProfile, any_match
from tracetools.steps import Steps, step_of_work

_HOST, _SYNC, _LATENCY = (KINDS.index(k) for k in ("host", "sync", "launch_latency"))
_NOT_THE_USERS = (
    "<built-in",
    "nn.Module",
    "torch/",
    "<frozen",
    "<string>",
)  # frames that say nothing of the call's place
_PACKAGES = ("site-packages/", "dist-packages/")


def region_use(
    classified: Classified, steps: Steps, activity: Activity, gaps: Gaps, profile: StackProfile
) -> tuple[RegionUse, ...]:
    """Per region, within the steps. Region None: no region was active. Times in ns."""
    names = gaps.names
    if activity.on_device:
        kind, region, length = _launched(classified, steps)
    else:
        kind, region, length = _operated(classified, steps, profile)
    mine = gaps.segments.take(gaps.segments.process == OWN)
    idle = mine.end - mine.start
    rows = []
    for index in np.unique(np.concatenate([region, mine.region])).tolist():
        work, waits = region == index, mine.region == index
        compute, comm, memory = (int(length[work & (kind == k)].sum()) for k in (COMPUTE, COMM, MEMORY))
        rows.append(
            RegionUse(
                region=names[index] if index != NONE else None,
                kernels=int((work & (kind != MEMORY)).sum()) if activity.on_device else 0,
                compute_ns=compute,
                comm_ns=comm,
                memory_ns=memory,
                idle_ns=int(idle[waits].sum()),
                launch_bound_ns=int(idle[waits & np.isin(mine.kind, (_HOST, _LATENCY))].sum()),
                sync_ns=int(idle[waits & (mine.kind == _SYNC)].sum()),
            )
        )
    rows.sort(key=lambda r: (-(r.compute_ns + r.comm_ns + r.memory_ns + r.idle_ns), r.region or ""))
    return tuple(rows)


Parts = tuple[Int64, Int64, Int64]  # kind, region, ns


def _launched(classified: Classified, steps: Steps) -> Parts:
    work, ev = classified.work, classified.trace.events
    inside = step_of_work(classified, steps) != NONE
    launch = work.launch[inside]
    region = np.full(len(launch), NONE, np.int64)
    linked = np.flatnonzero(launch != NONE)
    at, thread = ev.start[launch[linked]], ev.thread[launch[linked]]
    for t in np.unique(thread):
        here = thread == t
        region[linked[here]] = value_at(classified.regions.timeline(int(t)), at[here])
    rest = linked[region[linked] == NONE]
    region[rest] = value_at(classified.regions.timeline(steps.markers.thread), ev.start[launch[rest]])
    return work.kind[inside], region, (work.end - work.start)[inside]


def _operated(classified: Classified, steps: Steps, profile: StackProfile) -> Parts:
    """On a CPU: the stretches in which an operator runs, by the region of its thread."""
    lo, hi = int(steps.edges[0]), int(steps.edges[-1])
    ev = classified.trace.events
    collective = collective_names(classified, profile)[ev.name]
    kinds, regions, lengths = [], [], []
    for thread, line, served in operator_timelines(classified, collective, collective):
        here = np.flatnonzero(line.value[:-1] != NONE)
        start, end = np.clip(line.at[here], lo, hi), np.clip(line.at[here + 1], lo, hi)
        pieces = overlay(Spans(start, end), classified.regions.timeline(thread))
        kind = np.where(line.value[here] == 1, COMM, COMPUTE)[pieces.parent]
        inside = covered(served, pieces.spans.end) - covered(served, pieces.spans.start)
        kinds.append(kind)
        regions.append(_or_of(classified, steps, pieces.value, pieces.spans.start))
        lengths.append(pieces.spans.end - pieces.spans.start - inside)
    if not kinds:
        none = np.zeros(0, np.int64)
        return none, none, none
    kind, region, length = (np.concatenate(p) for p in (kinds, regions, lengths))
    full = length > 0
    return kind[full], region[full], length[full]


def _or_of(classified: Classified, steps: Steps, region: Int64, at: Int64) -> Int64:
    """The regions given, and where there is none that of the thread with the step markers."""
    return np.where(region != NONE, region, value_at(classified.regions.timeline(steps.markers.thread), at))


# ---------------------------------------------------------------- synchronisations


def sync_sites(classified: Classified, gaps: Gaps, profile: StackProfile) -> tuple[SyncSite, ...]:
    """How much idle time each place that waits for the device caused, as far as it was charged to `sync`."""
    mine = gaps.segments.take((gaps.segments.kind == _SYNC) & (gaps.segments.process == OWN))
    trace = classified.trace
    name = trace.events.name
    calls: dict[tuple[str, str | None, str | None, str | None], dict[int, int]] = {}  # idle ns of each call of a place
    for thread in np.unique(mine.thread):
        for call, operator, frame, region, ns in _waits(
            classified, mine.take(mine.thread == thread), int(thread), profile
        ):
            place = (
                trace.names[name[call]],
                trace.names[name[operator]] if operator != NONE else None,
                gaps.names[region] if region != NONE else None,
                trace.names[name[frame]] if frame != NONE else None,
            )
            of_call = calls.setdefault(place, {})
            of_call[call] = of_call.get(call, 0) + ns
    rows = [SyncSite(*place, calls=len(ns), idle_ns=sum(ns.values())) for place, ns in calls.items()]
    return tuple(sorted(rows, key=lambda s: (-s.idle_ns, s.call, s.source or "")))


def _waits(
    classified: Classified, segments: Segments, thread: int, profile: StackProfile
) -> Iterator[tuple[int, int, int, int, int]]:
    """(call, operator, frame, region, ns) of each stretch of one thread's waits, as rows; NONE where there is none.

    The outermost call that waits (aten::item, not the cudaStreamSynchronize in it), the innermost operator that is no such call.
    """
    trace = classified.trace
    ev = trace.events
    is_sync = names_where(trace, lambda n: any_match(profile.sync_calls, n))
    users = names_where(trace, _is_the_users)
    on_thread = np.flatnonzero(ev.thread == thread)
    touching = covered(segments.spans, ev.end[on_thread]) > covered(segments.spans, ev.start[on_thread])
    rows = on_thread[touching]
    category = ev.category[rows]
    waiting = is_sync[ev.name[rows]] & np.isin(category, (Category.RUNTIME, Category.CPU_OP))
    calls = rows[waiting]
    outer = np.append(True, ev.start[calls][1:] >= np.maximum.accumulate(ev.end[calls])[:-1])[: len(calls)]
    operators = rows[(category == Category.CPU_OP) & ~waiting]
    frames = rows[(category == Category.PYTHON_FUNCTION) & users[ev.name[rows]]]
    lines = [innermost(ev.start[chosen], ev.end[chosen], chosen) for chosen in (calls[outer], operators, frames)]
    for line in lines:
        segments, _ = segments.cut(line)
    rows_at = [value_at(line, segments.start) for line in lines]
    columns = (*rows_at, segments.region, segments.end - segments.start)
    yield from zip(*(c.tolist() for c in columns), strict=True)


def _is_the_users(frame: str) -> bool:
    return not frame.startswith(_NOT_THE_USERS) and not any(p in frame for p in _PACKAGES)
