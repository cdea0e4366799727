"""Partition of every step, its causes of idle time, kernel classes and coverage, for one process.

In: a process's trace, classified, with its activity, steps and gaps. Out: `ProcessBreakdown`.
compute + exposed communication + exposed memory + idle == wall, and causes sum to idle, to the nanosecond, per step;
both are asserted where they are made. Knows nothing of other processes and of output formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracetools.activity import Activity, collective_names, device_span, operator_timelines
from tracetools.attribution import region_use, sync_sites
from tracetools.classify import COMM, MEMORY, Classified
from tracetools.gaps import DRIVER, KINDS, UNKNOWN, Gaps, Segments
from tracetools.intervals import NONE, Spans, clip, covered, innermost, overlay, presence
from tracetools.model import (
    Card,
    Category,
    Cause,
    Coverage,
    Int64,
    KernelClass,
    Problem,
    Process,
    ProcessBreakdown,
    StepBreakdown,
)
from tracetools.stackprofile import StackProfile
from tracetools.steps import Steps, step_of_work

Strings = NDArray[np.str_]

FILLED_BY = 3  # operators named for host time without a region
OUTLIER = 2.0  # a step this many times the median of the others is pointed out


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """Everything the stages found out about one process."""

    process: Process
    classified: Classified
    activity: Activity
    steps: Steps
    gaps: Gaps
    split: tuple[Spans, Spans] | None = None  # in collectives paired with other ranks; of these, waiting for another
    comm_causes: Sequence[tuple[Cause, ...]] | None = None  # of each step's exposed communication


def break_down(found: Explained, profile: StackProfile) -> ProcessBreakdown:
    """All figures of one process."""
    process, classified = found.process, found.classified
    steps = _steps(found)
    return ProcessBreakdown(
        file=process.trace.file,
        role=process.role,
        rank=process.rank,
        host=process.host,
        pid=process.pid,
        device=_device(found),
        world_size=process.world_size,
        steps_from=found.steps.markers.source,
        device_span=device_span(classified, found.activity),
        steps=steps,
        kernel_classes=_kernel_classes(found, profile),
        coverage=_coverage(found, steps),
        problems=(*process.trace.problems, *classified.problems, *process.problems, *_odd_steps(found, steps)),
        regions=region_use(classified, found.steps, found.activity, found.gaps, profile),
        synchronisations=sync_sites(classified, found.gaps, profile),
    )


def _device(found: Explained) -> str | None:
    """Name of the device that did most of the work; "cpu" where operators stand in for one; None where the file does not say."""
    if not found.activity.on_device:
        return "cpu"
    names = found.process.trace.info.devices
    used = found.process.trace.events.device[found.classified.work.row]
    used = used[used >= 0]
    index = int(np.bincount(used).argmax()) if len(used) else 0
    return (names[index] if index < len(names) else names[0]) or None if names else None


def _steps(found: Explained) -> tuple[StepBreakdown, ...]:
    activity, steps, process = found.activity, found.steps, found.process
    edges = steps.edges
    compute, kernels, busy, comm = (
        np.diff(covered(s, edges)) for s in (activity.compute, activity.kernels, activity.busy, activity.comm)
    )
    wall = np.diff(edges)
    owner = step_of_work(found.classified, steps)
    kernel_count = np.bincount(owner[(owner != NONE) & (found.classified.work.kind != MEMORY)], minlength=len(wall))
    causes = causes_per_step(found)
    waits = _waits(found, comm)
    rows = []
    for i, step in enumerate(steps.steps):
        idle = int(wall[i] - busy[i])
        if sum(c.ns for c in causes[i]) != idle:
            raise AssertionError(
                f"{process.trace.file}, {step.name}: causes sum to {sum(c.ns for c in causes[i])}, idle is {idle}"
            )
        rows.append(
            StepBreakdown(
                name=step.name,
                number=step.number,
                start_ns=step.start_ns,
                wall_ns=int(wall[i]),
                compute_ns=int(compute[i]),
                exposed_comm_ns=int(kernels[i] - compute[i]),
                exposed_memory_ns=int(busy[i] - kernels[i]),
                idle_ns=idle,
                comm_ns=int(comm[i]),
                overlapped_comm_ns=int(comm[i] - (kernels[i] - compute[i])),
                comm_wait_ns=waits[i],
                comm_causes=_checked(found, i, int(kernels[i] - compute[i])),
                kernels=int(kernel_count[i]),
                card=process.cards.get(step.number, Card()) if step.number is not None else Card(),
                causes=causes[i],
            )
        )
    return tuple(rows)


def _checked(found: Explained, step: int, exposed_ns: int) -> tuple[Cause, ...]:
    """The causes of a step's exposed communication, which must sum to it."""
    causes = found.comm_causes[step] if found.comm_causes is not None else ()
    if causes and sum(c.ns for c in causes) != exposed_ns:
        raise AssertionError(
            f"{found.process.trace.file}, step {step}: causes of exposed communication sum to {sum(c.ns for c in causes)}, not {exposed_ns}"
        )
    return causes


def _waits(found: Explained, comm: Int64) -> list[int | None]:
    """Per step, time in which a collective waits for another rank. None: there is communication, and none of it is paired."""
    if found.split is None:
        return [None] * len(comm)
    paired, waiting = (np.diff(covered(s, found.steps.edges)) for s in found.split)
    return [int(w) if p or not c else None for p, w, c in zip(paired, waiting, comm, strict=True)]


def causes_per_step(found: Explained) -> list[tuple[Cause, ...]]:
    """Causes of each step, largest first."""
    segments, names = found.gaps.segments, found.gaps.names
    length = segments.end - segments.start
    filled = _filled_by(found)
    keys = np.stack([segments.step, segments.process, segments.region, segments.kind], 1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True) if len(keys) else (keys, np.zeros(0, np.int64))
    totals = np.zeros(len(unique), np.int64)
    np.add.at(totals, inverse.reshape(-1), length)
    out: list[list[Cause]] = [[] for _ in found.steps.steps]
    for (step, process, region, kind), ns in zip(unique.tolist(), totals.tolist(), strict=True):
        nameless = region == NONE and kind == KINDS.index("host") and process != DRIVER
        out[step].append(
            Cause(
                process="driver" if process == DRIVER else None if kind == UNKNOWN else found.process.role,
                region=names[region] if region != NONE else None,
                kind=KINDS[kind],
                ns=ns,
                filled_by=filled.get(step, ()) if nameless else (),
            )
        )
    return [tuple(sorted(causes, key=lambda c: (-c.ns, c.region or "", c.kind))) for causes in out]


def _filled_by(found: Explained) -> Mapping[int, tuple[tuple[str, int], ...]]:
    """Per step, the operators and runtime calls that fill most of the own host time that has no region."""
    segments = found.gaps.segments
    mine = segments.take(
        (segments.kind == KINDS.index("host")) & (segments.region == NONE) & (segments.process != DRIVER)
    )
    totals: dict[int, Counter[str]] = {}
    for thread in np.unique(mine.thread):
        _add_fillers(found, mine.take(mine.thread == thread), int(thread), totals)
    return {step: tuple(c.most_common(FILLED_BY)) for step, c in totals.items()}


def _add_fillers(found: Explained, segments: Segments, thread: int, totals: dict[int, Counter[str]]) -> None:
    trace = found.process.trace
    ev = trace.events
    rows = np.flatnonzero((ev.thread == thread) & np.isin(ev.category, (Category.CPU_OP, Category.RUNTIME)))
    touching = covered(segments.spans, ev.end[rows]) > covered(segments.spans, ev.start[rows])
    rows = rows[touching]
    pieces = overlay(segments.spans, innermost(ev.start[rows], ev.end[rows], ev.name[rows].astype(np.int64)))
    step = segments.step[pieces.parent]
    for s, name, ns in zip(
        step.tolist(), pieces.value.tolist(), (pieces.spans.end - pieces.spans.start).tolist(), strict=True
    ):
        if name != NONE:
            totals.setdefault(s, Counter())[trace.names[name]] += ns


def _kernel_classes(found: Explained, profile: StackProfile) -> tuple[KernelClass, ...]:
    """Of the work that belongs to a step; of the operators that begin within the steps."""
    on_device = found.activity.on_device
    name, row, start, end = _classed_work(found, profile) if on_device else _classed_operators(found, profile)
    totals: dict[str, list[int]] = {}
    for cls in np.unique(name):
        mine = name == cls
        totals[str(cls)] = [len(np.unique(row[mine])), int((end[mine] - start[mine]).sum())]
    rows = [KernelClass(cls, count, ns) for cls, (count, ns) in totals.items()]
    return tuple(sorted(rows, key=lambda k: (-k.total_ns, k.name)))


def _classed_work(found: Explained, profile: StackProfile) -> tuple[Strings, Int64, Int64, Int64]:
    """(class, row, start, end) of device work."""
    trace, work = found.process.trace, found.classified.work
    by_name = np.array([profile.kernel_class_of(n) for n in trace.names], object)
    cls = by_name[trace.events.name[work.row]]
    cls = np.where(work.kind == COMM, "communication", np.where(work.kind == MEMORY, "memory", cls)).astype(str)
    inside = step_of_work(found.classified, found.steps) != NONE
    return cls[inside], work.row[inside], work.start[inside], work.end[inside]


def _classed_operators(found: Explained, profile: StackProfile) -> tuple[Strings, Int64, Int64, Int64]:
    """On a CPU: the stretches of time in which each operator is the innermost one; an operator may have several."""
    lo, hi = int(found.steps.edges[0]), int(found.steps.edges[-1])
    trace, classified = found.process.trace, found.classified
    ev = trace.events
    collective = collective_names(classified, profile)
    by_name = np.array(
        ["communication" if c else profile.operator_class_of(n) for n, c in zip(trace.names, collective, strict=True)],
        object,
    )
    parts: list[tuple[Int64, Int64, Int64]] = []
    for _, line, served in operator_timelines(classified, collective[ev.name], np.arange(len(ev))):
        here = np.flatnonzero(line.value[:-1] != NONE)
        pieces = overlay(Spans(line.at[here], line.at[here + 1]), presence(served))
        row, start, end = line.value[here][pieces.parent], pieces.spans.start, pieces.spans.end
        row, start, end = (column[pieces.value == NONE] for column in (row, start, end))
        inside = (start >= lo) & (start < hi)
        parts.append((row[inside], start[inside], end[inside]))
    if not parts:
        none = np.zeros(0, np.int64)
        return np.zeros(0, np.str_), none, none, none
    row, start, end = (np.concatenate(p) for p in zip(*parts, strict=True))
    return by_name[ev.name[row]].astype(str), row, start, end


def _coverage(found: Explained, steps: tuple[StepBreakdown, ...]) -> Coverage:
    work, activity = found.classified.work, found.activity
    edges = found.steps.edges
    linked = work.launch != NONE
    length = work.end - work.start
    explained = sum(c.ns for s in steps for c in s.causes if c.kind != "unknown")
    return Coverage(
        linked_ns=int(length[linked].sum()),
        unlinked_ns=int(length[~linked].sum()),
        outside_steps_ns=activity.busy.total - clip(activity.busy, int(edges[0]), int(edges[-1])).total,
        idle_explained_ns=explained,
    )


def _odd_steps(found: Explained, steps: tuple[StepBreakdown, ...]) -> list[Problem]:
    """Things about the steps that a reader of averages must know."""
    problems = []
    markers = found.steps.markers
    if not len(markers):
        problems.append(Problem("no_steps", 1, "no step markers: the whole trace is taken as one unnamed step"))
    if found.activity.on_device and len(steps) > 1:
        empty = [s.name for s in steps if s.kernels == 0 and s.compute_ns == 0]
        if empty:
            problems.append(
                Problem(
                    "steps_without_device_work", len(empty), f"steps in which no kernel runs: {', '.join(empty[:6])}"
                )
            )
    walls = np.array([s.wall_ns for s in steps])
    if len(walls) >= 3:
        for i, step in enumerate(steps):
            others = float(np.median(np.delete(walls, i)))
            if walls[i] > OUTLIER * others > 0:
                what = "first step, warm-up?" if i == 0 else "outlier"
                detail = f"{step.name} lasts {walls[i] / others:.1f} times the median of the other steps ({what})"
                problems.append(Problem("outlier_step", 1, detail))
    early = found.classified.work
    if (n := int((early.end <= found.steps.edges[0]).sum())) and len(markers):
        problems.append(Problem("before_first_step", n, "device events before the first step, in no step"))
    if (n := int((early.start >= found.steps.edges[-1]).sum())) and len(markers):
        problems.append(Problem("after_last_step", n, "device events after the last step, in no step"))
    return problems
