"""Every idle instant of a process -> the cause it is charged to.

In: a classified trace, its activity and steps, the profile, and what the driver was doing (for a process that is driven).
Out: `Gaps`: disjoint pieces of idle time, each with step, process, region and kind; the pieces of a step sum to its idle time.

A gap ends with the device work K that begins there; L is the call that launched K, on thread T.
  until L began    host time: the innermost region of T at each instant; else that of the thread that carries the step
                   markers; else, when the process is in no method of its own, what its driver was doing
  from L to K      launch latency, or waiting for another stream's event where the trace shows one: of the region that T was in when
                   it called L, for what T does meanwhile does not delay K
  inside either    profiler overhead, and synchronising calls, where they are recorded
  K not linked     unknown; and so is what follows a launch whose device events were never recorded
Without a device every idle instant is host time. Knows nothing of other ranks' work.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from tracetools.activity import Activity
from tracetools.classify import Classified, Work, names_where, unrecorded_launches
from tracetools.intervals import NONE, Spans, Timeline, complement, overlay, presence, union, value_at
from tracetools.model import Bool, Category, Int64
from tracetools.stackprofile import StackProfile, any_match
from tracetools.steps import Markers, Steps

HOST, SYNC, LAUNCH_LATENCY, RAY_TRANSPORT, DEPENDENCY, PROFILER_OVERHEAD, UNKNOWN = range(7)
KINDS = ("host", "sync", "launch_latency", "ray_transport", "dependency", "profiler_overhead", "unknown")
OWN, DRIVER = 0, 1
BETWEEN_STEPS = "between_steps"
UNRECORDED = "unrecorded_launch"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Pieces of idle time, one row each. `region` indexes Gaps.names (NONE: no region); `stream` and `thread` are K's and L's.

    `called`: when L began, of what follows it; NONE elsewhere.
    """

    start: Int64
    end: Int64
    step: Int64
    thread: Int64
    stream: Int64
    kind: Int64
    process: Int64
    region: Int64
    called: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def spans(self) -> Spans:
        return Spans(self.start, self.end)

    def take(self, rows: Int64 | Bool) -> Segments:
        return Segments(*(getattr(self, f.name)[rows] for f in fields(self)))

    def cut(self, line: Timeline) -> tuple[Segments, Int64]:
        """These segments cut where `line` changes, and its value in each part."""
        pieces = overlay(self.spans, line)
        parts = self.take(pieces.parent)
        return replace(parts, start=pieces.spans.start, end=pieces.spans.end), pieces.value


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    segments: Segments
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DriverView:
    """What the driver of a process did, on the clock of the run, as that process sees it."""

    line: Timeline  # innermost region of the driver's main thread, indexes names
    names: tuple[str, ...]
    between_steps: Spans  # between two of its own step markers
    waiting: Spans  # in one of these regions
    others_active: Spans  # when any other process of the run is inside a method of its own


def explain(
    classified: Classified, activity: Activity, steps: Steps, profile: StackProfile, driver: DriverView | None = None
) -> Gaps:
    """Charge all idle time between the first and the last edge of the steps."""
    own = classified.regions.names  # their indices, then these two, then the driver's: other functions count on it
    names = (*own, BETWEEN_STEPS, UNRECORDED, *(driver.names if driver else ()))
    edges = steps.edges
    segments = _split_at_launches(classified, activity, profile, steps, int(edges[0]), int(edges[-1]))
    segments, step = segments.cut(Timeline(edges, np.append(np.arange(len(steps.steps)), NONE)))
    segments = replace(segments, step=step)
    segments = _regions_by_thread(segments, classified, steps)
    segments = _synchronising(segments, classified, profile, steps.markers.thread)
    segments = _waiting_for_events(segments, classified)
    segments = _overhead(segments, classified)
    segments = _outside_markers(segments, classified, steps, driver)
    return Gaps(segments.take(np.argsort(segments.start, kind="stable")), names)


def _split_at_launches(
    classified: Classified, activity: Activity, profile: StackProfile, steps: Steps, lo: int, hi: int
) -> Segments:
    gaps = complement(activity.busy, lo, hi)
    main = steps.markers.thread
    if not activity.on_device:
        return _segments(gaps.start, gaps.end, HOST, main)
    work = classified.work
    closing = _closing_work(work, gaps)
    has_work = closing != NONE
    launch = np.where(has_work, work.launch[np.maximum(closing, 0)], NONE)
    ev = classified.trace.events
    linked = launch != NONE
    at = np.where(linked, ev.start[np.maximum(launch, 0)], np.where(has_work, gaps.start, gaps.end))
    at = np.clip(at, gaps.start, gaps.end)
    thread = np.where(linked, ev.thread[np.maximum(launch, 0)], main)
    stream = np.where(has_work, _stream_key(classified, work.row[np.maximum(closing, 0)]), NONE)
    host = _segments(gaps.start, at, HOST, thread, stream)
    called = np.where(linked, ev.start[np.maximum(launch, 0)], NONE)
    after = _segments(at, gaps.end, np.where(linked, LAUNCH_LATENCY, UNKNOWN), thread, stream, called)
    return _after_unrecorded(_concat(host, after), classified, profile, gaps)


def _closing_work(work: Work, gaps: Spans) -> Int64:
    """Index of the work that ends each gap (where the steps end first: the next work), linked first; NONE where none does."""
    order = np.lexsort((work.launch == NONE, work.start))
    index = np.searchsorted(work.start[order], gaps.end, side="left")
    return np.where(index < len(order), order[np.minimum(index, len(order) - 1)], NONE)


def _stream_key(classified: Classified, rows: Int64) -> Int64:
    ev = classified.trace.events
    return ev.device[rows].astype(np.int64) << 32 | (ev.stream[rows] & 0xFFFFFFFF)


def _after_unrecorded(segments: Segments, classified: Classified, profile: StackProfile, gaps: Spans) -> Segments:
    """From a launch whose device events were lost to the end of the gap that follows the device may have been busy."""
    ev = classified.trace.events
    lost = ev.start[unrecorded_launches(classified.trace, profile, classified.work)]
    if not len(lost) or not len(gaps):
        return segments
    lost = np.sort(lost)
    index = np.searchsorted(lost, _launched_before(classified, gaps), side="right")
    first = np.where(index < len(lost), lost[np.minimum(index, len(lost) - 1)], np.iinfo(np.int64).max)
    first = np.maximum(first, gaps.start)
    hit = first < gaps.end
    doubtful = presence(Spans(first[hit], gaps.end[hit]))
    parts, value = segments.cut(doubtful)
    inside = value == 1
    return replace(
        parts,
        kind=np.where(inside, UNKNOWN, parts.kind),
        region=np.where(inside, len(classified.regions.names) + 1, parts.region),  # UNRECORDED
    )


def _launched_before(classified: Classified, gaps: Spans) -> Int64:
    """For each gap, the latest launch of all work that began before it: what was launched later had not run by then."""
    work, ev = classified.work, classified.trace.events
    never = np.iinfo(np.int64).min
    order = np.argsort(work.start, kind="stable")
    launched = np.where(work.launch != NONE, ev.start[np.maximum(work.launch, 0)], never)[order]
    latest = np.concatenate([[never], np.maximum.accumulate(launched)])
    return latest[np.searchsorted(work.start[order], gaps.start, side="left")]


def _segments(
    start: Int64,
    end: Int64,
    kind: int | Int64,
    thread: int | Int64,
    stream: int | Int64 = NONE,
    called: int | Int64 = NONE,
) -> Segments:
    full = end > start
    n = len(start)

    def column(value: int | Int64) -> Int64:
        return np.broadcast_to(np.asarray(value, np.int64), n)[full]

    none = column(NONE)
    own = column(OWN)
    return Segments(
        start[full], end[full], none, column(thread), column(stream), column(kind), own, none, column(called)
    )


def _concat(*parts: Segments) -> Segments:
    """All rows in order of start."""
    joined = Segments(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Segments)))
    return joined.take(np.argsort(joined.start, kind="stable"))


def _regions_by_thread(segments: Segments, classified: Classified, steps: Steps) -> Segments:
    """Innermost region of L's thread; where it has none, of the thread that carries the markers."""
    main = steps.markers.thread
    main_line = classified.regions.timeline(main)
    parts: list[Segments] = []
    for thread in np.unique(segments.thread):
        mine = _named(segments.take(segments.thread == thread), classified.regions.timeline(int(thread)))
        parts.append(_named(mine, main_line) if thread != main else mine)
    return _concat(*parts) if parts else segments


def _named(segments: Segments, line: Timeline) -> Segments:
    """With the regions of `line` where there is none yet; after a launch, the one at the launch.

    Unknown time has no region: what the host did then is not known to have caused it.
    """
    after = segments.kind == LAUNCH_LATENCY
    before, region = segments.take(~after).cut(line)
    free = (before.kind != UNKNOWN) & (before.region == NONE)
    before = replace(before, region=np.where(free, region, before.region))
    late = segments.take(after)
    late = replace(late, region=np.where(late.region == NONE, value_at(line, late.called), late.region))
    return _concat(before, late)


def _synchronising(segments: Segments, classified: Classified, profile: StackProfile, main: int) -> Segments:
    """Host time in which L's thread was inside a call that waits for the device, or the thread that speaks for it was."""
    ev = classified.trace.events
    is_sync = names_where(classified.trace, lambda n: any_match(profile.sync_calls, n))
    calls = np.flatnonzero(is_sync[ev.name] & np.isin(ev.category, (Category.RUNTIME, Category.CPU_OP)))
    if not len(calls) or not len(segments):
        return segments

    def waits(thread: int) -> Timeline:
        mine = calls[ev.thread[calls] == thread]
        return presence(union(ev.start[mine], ev.end[mine]))

    parts: list[Segments] = []
    for thread in np.unique(segments.thread).tolist():
        mine, inside = segments.take(segments.thread == thread).cut(waits(thread))
        mine = replace(mine, kind=np.where((inside == 1) & (mine.kind == HOST), SYNC, mine.kind))
        if thread != main:
            mine, inside = mine.cut(waits(main))
            silent = value_at(classified.regions.timeline(thread), mine.start) == NONE
            mine = replace(mine, kind=np.where((inside == 1) & silent & (mine.kind == HOST), SYNC, mine.kind))
        parts.append(mine)
    return _concat(*parts)


def _waiting_for_events(segments: Segments, classified: Classified) -> Segments:
    """Launch latency in which K's stream was waiting for an event of another stream, as far as that was recorded."""
    trace = classified.trace
    ev = trace.events
    waits = ev.where(Category.SYNC)
    waits = waits[names_where(trace, lambda n: n.startswith("Stream Wait Event"))[ev.name[waits]]]
    if not len(waits) or not len(segments):
        return segments
    parts: list[Segments] = []
    keys = _stream_key(classified, waits)
    for stream in np.unique(segments.stream):
        mine = segments.take(segments.stream == stream)
        on_stream = waits[keys == stream]
        mine, inside = mine.cut(presence(union(ev.start[on_stream], ev.end[on_stream])))
        parts.append(replace(mine, kind=np.where((inside == 1) & (mine.kind == LAUNCH_LATENCY), DEPENDENCY, mine.kind)))
    return _concat(*parts)


def _overhead(segments: Segments, classified: Classified) -> Segments:
    """Profiler overhead, which the profiler records without a thread, takes precedence over what the host did."""
    ev = classified.trace.events
    rows = ev.where(Category.OVERHEAD)
    if not len(rows):
        return segments
    mine, inside = segments.cut(presence(union(ev.start[rows], ev.end[rows])))
    # after a launch whose work was lost it may be no idle time
    known_idle = (mine.kind != UNKNOWN) | (mine.region == NONE)
    mine = replace(mine, kind=np.where((inside == 1) & known_idle, PROFILER_OVERHEAD, mine.kind))
    return replace(mine, region=np.where(mine.kind == PROFILER_OVERHEAD, NONE, mine.region))


def _outside_markers(segments: Segments, classified: Classified, steps: Steps, driver: DriverView | None) -> Segments:
    """Time with no region: the driver's doing where the process is in no method, else between_steps or nothing."""
    markers = steps.markers
    nameless = (segments.region == NONE) & np.isin(segments.kind, (HOST, SYNC, LAUNCH_LATENCY, DEPENDENCY))
    if driver is not None:
        nameless &= segments.kind == HOST
    if not nameless.any() or not len(markers):
        return segments
    between = len(classified.regions.names)
    rest, mine = segments.take(~nameless), segments.take(nameless)
    if driver is None:
        mine, apart = mine.cut(presence(between_markers(markers)))
        return _concat(rest, replace(mine, region=np.where(apart == 1, between, NONE)))
    methods = own_methods(classified)
    mine, inside = mine.cut(presence(methods))
    return _concat(rest, mine.take(inside == 1), _drivers(mine.take(inside != 1), driver, between, methods.start))


def between_markers(markers: Markers) -> Spans:
    """What lies between two step markers. Before the first and after the last there is no step to be between."""
    return complement(union(markers.start, markers.end), int(markers.start[0]), int(markers.end[-1]))


def own_methods(classified: Classified) -> Spans:
    """When any thread of a process is inside an annotation: for a Ray actor, inside one of its methods."""
    ev = classified.trace.events
    rows = ev.where(Category.USER_ANNOTATION)
    return union(ev.start[rows], ev.end[rows])


def _drivers(segments: Segments, driver: DriverView, between: int, method_starts: Int64) -> Segments:
    """What the driver did. While it waits for workers: before the process's own method begins, its call is on its way; after
    the method, the driver waits for the other workers as long as one of them is in a method, else the result is on its way.
    """
    segments, apart = segments.cut(presence(driver.between_steps))
    segments = replace(
        segments,
        process=np.full(len(segments), DRIVER, np.int64),
        region=np.where(apart == 1, between, NONE),
    )
    segments, region = segments.cut(driver.line)
    segments = replace(segments, region=np.where(region == NONE, segments.region, region + between + 2))
    segments, busy_peer = segments.cut(presence(driver.others_active))
    called = _begins_within(segments, driver.waiting, method_starts)
    waits = value_at(presence(driver.waiting), segments.start) == 1
    return replace(segments, kind=np.where(waits & (called | (busy_peer != 1)), RAY_TRANSPORT, segments.kind))


def _begins_within(segments: Segments, waiting: Spans, starts: Int64) -> Bool:
    """Is there a start after the segment, and before the end of the wait that the segment lies in?"""
    until = np.append(waiting.end, np.iinfo(np.int64).min)
    end = until[np.searchsorted(waiting.start, segments.start, side="right") - 1]
    following = np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, segments.end, side="left")]
    return following < end
