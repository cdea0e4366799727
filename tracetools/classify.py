"""Trace -> what each event is: device work by kind, the launch of each piece of work, regions of the host threads.

In: a `Trace` and a `StackProfile`. Out: `Classified`. Rows are rows of Trace.events.
Names decide by the profile's rules, once per distinct name; categories decide what is device work.
Knows nothing of steps, gaps or other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracetools.intervals import NONE, SILENT, Timeline, innermost
from tracetools.model import DEVICE_WORK, Bool, Category, Int64, Problem, Trace
from tracetools.stackprofile import StackProfile, any_match

COMPUTE, COMM, MEMORY = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Device work in order of start. `launch` is the row of the call that put it on the device, NONE where unknown."""

    row: Int64
    start: Int64
    end: Int64
    kind: Int64  # COMPUTE, COMM, MEMORY
    launch: Int64
    early: Bool  # unlinked, before the first linked work of its stream: launched before the recording

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Region spans of all threads in order of (start, longer first). `name` indexes `names`."""

    row: Int64
    start: Int64
    end: Int64
    name: Int64
    thread: Int64
    names: tuple[str, ...]

    def timeline(self, thread: int) -> Timeline:
        """Innermost region of one thread at every instant."""
        mine = self.thread == thread
        return innermost(self.start[mine], self.end[mine], self.name[mine]) if mine.any() else SILENT


@dataclass(frozen=True, slots=True, eq=False)
class Classified:
    trace: Trace
    work: Work
    regions: Regions
    problems: tuple[Problem, ...]


def classify(trace: Trace, profile: StackProfile) -> Classified:
    """Never raises for odd data: what cannot be decided is counted in problems."""
    work, problems = _work(trace, profile)
    return Classified(trace, work, regions_of(trace, profile), tuple(problems))


def names_where(trace: Trace, decide: Callable[[str], bool]) -> Bool:
    """One answer per distinct name; index with Events.name to get one per event."""
    return np.fromiter(map(decide, trace.names), np.bool_, len(trace.names))


def is_communication(trace: Trace, profile: StackProfile) -> Bool:
    """Which names are communication kernels (one per distinct name)."""
    return names_where(trace, lambda name: any_match(profile.communication, name))


def _work(trace: Trace, profile: StackProfile) -> tuple[Work, list[Problem]]:
    ev = trace.events
    row = ev.where(*DEVICE_WORK)
    kernel = ev.category[row] == Category.KERNEL
    comm = is_communication(trace, profile)[ev.name[row]]
    kind = np.where(kernel, np.where(comm, COMM, COMPUTE), MEMORY)
    launch, reused = _launches(trace, row)
    linked = launch != NONE
    early = ~linked & _before_first_linked(trace, row, linked)
    work = Work(row, ev.start[row], ev.end[row], kind, launch, early)
    return work, _link_problems(trace, profile, work, reused)


def _launches(trace: Trace, row: Int64) -> tuple[Int64, int]:
    """(launch row of each piece of work, how many ids were used for more than one launch).

    One launch may own many kernels (graphs). Ids can repeat: as many launches as pieces of work pair in time order;
    otherwise work belongs to the last launch before it. A call inside a call with the same id is the same launch.
    """
    ev = trace.events
    calls = ev.where(Category.RUNTIME)
    calls = calls[ev.correlation[calls] > 0]
    launch = np.full(len(row), NONE, np.int64)
    if not len(calls) or not len(row):
        return launch, 0
    calls = _outermost(trace, calls[np.lexsort((ev.start[calls], ev.correlation[calls]))])
    ids = ev.correlation[calls]
    unique, first, count = np.unique(ids, return_index=True, return_counts=True)
    mine = ev.correlation[row]
    at = np.minimum(np.searchsorted(unique, mine), len(unique) - 1)
    found = (unique[at] == mine) & (mine > 0)
    launch[found] = calls[first[at[found]]]
    repeated = np.flatnonzero(count > 1)
    for which in repeated:
        launches = calls[first[which] : first[which] + count[which]]
        owned = np.flatnonzero(mine == unique[which])
        launch[owned] = _pair_in_time(ev.start[launches], ev.start[row[owned]], launches)
    return launch, len(repeated)


def _outermost(trace: Trace, calls: Int64) -> Int64:
    """Without calls that begin inside an earlier one with the same id. `calls` in order of (id, start)."""
    ev = trace.events
    while len(calls) > 1:
        ids, start, end = ev.correlation[calls], ev.start[calls], ev.end[calls]
        inner = np.concatenate([[False], (ids[1:] == ids[:-1]) & (start[1:] < end[:-1])])
        if not inner.any():
            break
        calls = calls[~inner]  # and again: what followed an inner call may still lie inside the outer one
    return calls


def _pair_in_time(called: Int64, started: Int64, launches: Int64) -> Int64:
    if len(called) == len(started):
        return launches
    return launches[np.maximum(np.searchsorted(called, started, side="right") - 1, 0)]


def _before_first_linked(trace: Trace, row: Int64, linked: Bool) -> Bool:
    """Work that runs before the first linked work of its (device, stream). A stream that is never linked tells nothing."""
    ev = trace.events
    key = ev.device[row].astype(np.int64) << 40 | (ev.stream[row] & 0xFFFFFFFFFF)
    unique, stream = np.unique(key, return_inverse=True)
    first = np.full(len(unique), np.iinfo(np.int64).max)
    np.minimum.at(first, stream[linked], ev.start[row][linked])
    return (ev.start[row] < first[stream]) & (first[stream] < np.iinfo(np.int64).max)


def _link_problems(trace: Trace, profile: StackProfile, work: Work, reused: int) -> list[Problem]:
    ev = trace.events
    linked = work.launch != NONE
    problems = []
    if reused:
        problems.append(
            Problem("correlation_reused", reused, "correlation ids of more than one launch, paired in time order")
        )
    if (n := int(work.early.sum())) and linked.any():
        problems.append(Problem("launched_before_recording", n, "device events whose launch came before the recording"))
    if n := int((~linked & ~(work.early & linked.any())).sum()):
        problems.append(Problem("unlinked", n, "device events without a launch in the trace"))
    delay = (ev.start[work.row] - ev.start[np.maximum(work.launch, 0)])[linked]
    if len(delay) and delay.min() < 0:
        detail = f"device events that start before their launch, by up to {-int(delay.min())} ns: the clocks differ; clamped to 0"
        problems.append(Problem("clock_skew", int((delay < 0).sum()), detail))
    return problems + _unrecorded(trace, profile, work)


def _unrecorded(trace: Trace, profile: StackProfile, work: Work) -> list[Problem]:
    """Launches that have no device event: those records were lost, and idle time is an upper bound."""
    lost = unrecorded_launches(trace, profile, work)
    if not len(lost):
        return []
    graph = names_where(trace, lambda n: any_match(profile.graph_launches, n))[trace.events.name[lost]]
    problems = []
    if n := int(graph.sum()):
        problems.append(
            Problem("graph_not_recorded", n, "graph launches without any device event: idle time is an upper bound")
        )
    if n := int((~graph).sum()):
        what = "launches without a device event: idle time is an upper bound"
        problems.append(Problem("launch_not_recorded", n, what))
    if not (trace.events.category == Category.KERNEL).any():
        problems.append(
            Problem("no_kernels", 1, "launches but not one kernel: was device tracing on? idle time means nothing here")
        )
    return problems


def unrecorded_launches(trace: Trace, profile: StackProfile, work: Work) -> Int64:
    """Rows of launch calls (with an id) that own no device work."""
    ev = trace.events
    calls = ev.where(Category.RUNTIME)
    is_launch = names_where(trace, lambda n: any_match(profile.launch_calls, n))
    calls = calls[is_launch[ev.name[calls]] & (ev.correlation[calls] > 0)]
    return calls[~np.isin(ev.correlation[calls], ev.correlation[work.row])]


def regions_of(trace: Trace, profile: StackProfile) -> Regions:
    """Annotations, under the region that the profile gives their name (else their own name), and operators that a rule names."""
    ev = trace.events
    annotation = [_annotation_region(profile, name) for name in trace.names]
    operator = [profile.region_of(name) for name in trace.names]
    index = {name: i for i, name in enumerate(dict.fromkeys(r for r in annotation + operator if r is not None))}
    as_annotation = np.array([NONE if r is None else index[r] for r in annotation], np.int64)
    as_operator = np.array([NONE if r is None else index[r] for r in operator], np.int64)
    region = np.where(
        ev.category == Category.USER_ANNOTATION,
        as_annotation[ev.name],
        np.where(ev.category == Category.CPU_OP, as_operator[ev.name], NONE),
    )
    row = np.flatnonzero(region != NONE)
    return Regions(row, ev.start[row], ev.end[row], region[row], ev.thread[row].astype(np.int64), tuple(index))


def _annotation_region(profile: StackProfile, name: str) -> str | None:
    if any_match(profile.not_regions, name) or any_match(profile.step_markers, name):
        return None
    return profile.region_of(name) or name
