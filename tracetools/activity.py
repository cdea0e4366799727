"""What a process computes on, instant by instant: device work, or the host's operators where there is no device.

In: a classified trace and the profile. Out: `Activity`, four disjoint sets of instants. On a device they are unions over all
streams. On a CPU-only timeline an instant is compute when the innermost operator of a thread is no collective and no part
of one, communication when a collective runs, and idle otherwise (Python between operators).
Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracetools.classify import COMM, COMPUTE, Classified, names_where
from tracetools.intervals import EMPTY, Spans, Timeline, innermost, merge, minus, union
from tracetools.model import Bool, Category, DeviceSpan, Int64
from tracetools.stackprofile import StackProfile, any_match


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """`kernels` is compute and communication together, `busy` all work."""

    compute: Spans
    comm: Spans
    kernels: Spans
    busy: Spans
    on_device: bool


def activity_of(classified: Classified, profile: StackProfile) -> Activity:
    return _device_activity(classified) if len(classified.work) else _host_activity(classified, profile)


def _device_activity(classified: Classified) -> Activity:
    work = classified.work
    compute = union(work.start[work.kind == COMPUTE], work.end[work.kind == COMPUTE])
    comm = union(work.start[work.kind == COMM], work.end[work.kind == COMM])
    kernels = merge(compute, comm)
    return Activity(compute, comm, kernels, union(work.start, work.end), True)


def _host_activity(classified: Classified, profile: StackProfile) -> Activity:
    ev = classified.trace.events
    collective = collective_names(classified, profile)[ev.name]
    annotated = collective & (ev.category == Category.USER_ANNOTATION)
    comm_parts = [union(ev.start[annotated], ev.end[annotated])]
    compute_parts = [EMPTY]
    for _, line, served in operator_timelines(classified, collective, collective):
        compute_parts.append(minus(spans_of(line, 0), served))
        comm_parts.append(spans_of(line, 1))
    compute, comm = merge(*compute_parts), merge(*comm_parts)
    busy = merge(compute, comm)
    return Activity(compute, comm, busy, busy, False)


def collective_names(classified: Classified, profile: StackProfile) -> Bool:
    """Which names are collectives on the host (one per distinct name)."""
    return names_where(classified.trace, lambda n: any_match(profile.collectives, n))


def operator_timelines(
    classified: Classified, collective: Bool, value: Bool | Int64
) -> Iterator[tuple[int, Timeline, Spans]]:
    """Each thread that runs operators: `value` of the innermost one at every instant, and when it serves a collective.

    Inside an annotation of a collective on its own thread an operator is part of that collective: gloo's threads do no training.
    `collective` (is its name one?) and `value` have an entry per event.
    """
    ev = classified.trace.events
    operators = ev.category == Category.CPU_OP
    serving = collective & (ev.category == Category.USER_ANNOTATION)
    for thread in np.unique(ev.thread[operators]):
        rows = np.flatnonzero(operators & (ev.thread == thread))
        mine = np.flatnonzero(serving & (ev.thread == thread))
        line = innermost(ev.start[rows], ev.end[rows], value[rows].astype(np.int64))
        yield int(thread), line, union(ev.start[mine], ev.end[mine])


def spans_of(line: Timeline, value: int) -> Spans:
    """When a timeline has a value. Its last entry must be NONE (nothing lasts for ever)."""
    here = np.flatnonzero(line.value[:-1] == value)
    return union(line.at[here], line.at[here + 1])


def device_span(classified: Classified, activity: Activity) -> DeviceSpan | None:
    """From the first device work to the end of the last, whatever the steps. None without a device."""
    work, ev = classified.work, classified.trace.events
    if not len(work):
        return None
    category = ev.category[work.row]
    span = int(work.end.max() - work.start.min())
    return DeviceSpan(
        span_ns=span,
        busy_ns=activity.busy.total,
        compute_ns=activity.compute.total,
        comm_ns=activity.comm.total,
        exposed_comm_ns=activity.kernels.total - activity.compute.total,
        exposed_memory_ns=activity.busy.total - activity.kernels.total,
        idle_ns=span - activity.busy.total,
        kernels=int((category == Category.KERNEL).sum()),
        memcpys=int((category == Category.MEMCPY).sum()),
        memsets=int((category == Category.MEMSET).sum()),
    )
