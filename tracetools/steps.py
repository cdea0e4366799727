"""Step markers and walls: where each step of a process begins and ends on its device's timeline.

In: a classified trace, the profile, and (for a process that a driver drives) the driver's markers.
Out: `Steps`: half-open walls that follow each other, and how they were found.
Device backlog stays with the step that launched it: the wall between steps i and i+1 is at
max(CPU start of step i+1, end of the last device work launched before it). Knows nothing of what fills a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tracetools.classify import Classified, names_where
from tracetools.intervals import NONE
from tracetools.model import Category, Int64, Step
from tracetools.stackprofile import StackProfile

WHOLE_TRACE = "whole trace"
_NUMBER = re.compile(r"#(\d+)$")


@dataclass(frozen=True, slots=True, eq=False)
class Markers:
    """CPU intervals that mark steps, in order of start. `source` says how they were found."""

    name: tuple[str, ...]
    start: Int64
    end: Int64
    thread: int  # that carries the markers; NONE where none does
    source: str

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    steps: tuple[Step, ...]
    markers: Markers

    @property
    def edges(self) -> Int64:
        """Starts of all steps and the end of the last."""
        return np.array([s.start_ns for s in self.steps] + [self.steps[-1].end_ns], np.int64)


def find_markers(classified: Classified, profile: StackProfile) -> Markers:
    """By the profile's patterns, in their order; else a region that repeats; else none."""
    trace = classified.trace
    ev = trace.events
    host = ev.category != Category.GPU_USER_ANNOTATION
    for pattern in profile.step_markers:
        is_marker = names_where(trace, lambda name, p=pattern: p.search(name) is not None)  # type: ignore[misc]
        rows = np.flatnonzero(is_marker[ev.name] & host)
        if len(rows):
            names = tuple(trace.names[i] for i in ev.name[rows])
            thread = int(np.bincount(ev.thread[rows]).argmax())
            return Markers(names, ev.start[rows], ev.end[rows], thread, f"annotation {_NUMBER.sub('#N', names[0])}")
    return _repeated_region(classified) or Markers(
        (), ev.start[:0], ev.end[:0], _busiest_thread(classified), WHOLE_TRACE
    )


def _repeated_region(classified: Classified, least: int = 3, share: float = 0.5) -> Markers | None:
    """The outermost annotation that repeats without overlapping itself and covers most of the host's time."""
    ev, regions = classified.trace.events, classified.regions
    if not len(ev):
        return None
    host = np.isin(ev.category, (Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON_FUNCTION))
    span = int(ev.end[host].max() - ev.start[host].min()) if host.any() else 0
    best: tuple[int, Markers] | None = None
    rows = regions.row[ev.category[regions.row] == Category.USER_ANNOTATION]
    for key in np.unique(np.stack([ev.thread[rows], ev.name[rows]], 1), axis=0) if len(rows) else ():
        mine = rows[(ev.thread[rows] == key[0]) & (ev.name[rows] == key[1])]
        if len(mine) < least or (ev.start[mine][1:] < ev.end[mine][:-1]).any():
            continue
        cover = int((ev.end[mine] - ev.start[mine]).sum())
        if cover >= share * span and (best is None or cover > best[0]):
            name = classified.trace.names[key[1]]
            names = tuple(f"{name}#{i}" for i in range(len(mine)))
            best = cover, Markers(names, ev.start[mine], ev.end[mine], int(key[0]), f"repeated region {name!r}")
    return best[1] if best else None


def _busiest_thread(classified: Classified) -> int:
    """The thread that launches most device work; else the one with most operators; NONE where there is no host thread."""
    ev, work = classified.trace.events, classified.work
    launches = work.launch[work.launch != NONE]
    rows = launches if len(launches) else ev.where(Category.CPU_OP, Category.USER_ANNOTATION)
    return int(np.bincount(ev.thread[rows]).argmax()) if len(rows) else NONE


def find_steps(classified: Classified, markers: Markers) -> Steps:
    """Walls from markers. Without markers the whole trace is one step: its device span, or its host span on a CPU."""
    if not len(markers):
        return Steps((_whole(classified),), markers)
    edges = _edges(classified, markers)
    steps = tuple(Step(name, _number(name), int(edges[i]), int(edges[i + 1])) for i, name in enumerate(markers.name))
    return Steps(steps, markers)


def _edges(classified: Classified, markers: Markers) -> Int64:
    """Rule of the module's docstring; the last edge is the later of the last marker's end and the end of its work."""
    ev, work = classified.trace.events, classified.work
    linked = work.launch != NONE
    launched = np.where(linked, ev.start[np.maximum(work.launch, 0)], np.iinfo(np.int64).min)
    counts = linked | work.early
    order = np.argsort(launched[counts], kind="stable")
    launched, end = launched[counts][order], work.end[counts][order]
    never = np.array([np.iinfo(np.int64).min])
    reach = np.concatenate([never, np.maximum.accumulate(end)])
    at = np.concatenate([markers.start, [markers.end[-1]]])
    edges: Int64 = np.maximum(at, reach[np.searchsorted(launched, at, side="left")])
    return edges


def _whole(classified: Classified) -> Step:
    work, ev = classified.work, classified.trace.events
    if len(work):
        return Step(WHOLE_TRACE, None, int(work.start.min()), int(work.end.max()))
    return Step(WHOLE_TRACE, None, int(ev.start.min()), int(ev.end.max()))


def _number(name: str) -> int | None:
    match = _NUMBER.search(name)
    return int(match[1]) if match else None


def step_of_work(classified: Classified, steps: Steps) -> Int64:
    """Index of the step that each piece of device work belongs to: the one whose CPU interval holds its launch.

    Work without a launch belongs to the step on whose device interval it begins; NONE: outside all steps.
    """
    ev, work, markers = classified.trace.events, classified.work, steps.markers
    edges = steps.edges
    begun = np.searchsorted(edges, work.start, side="right") - 1
    by_start = np.where((begun < 0) | (begun >= len(steps.steps)), NONE, begun)
    if not len(markers):
        return by_start
    launched = ev.start[np.maximum(work.launch, 0)]
    called = np.searchsorted(markers.start, launched, side="right") - 1
    by_launch = np.where((called < 0) | (launched >= markers.end[-1]), NONE, called)
    return np.where(work.launch != NONE, by_launch, by_start)
