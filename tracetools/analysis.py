"""The whole way for a run: every process through every stage.

In: a `Run` (or two) and a stack profile. Out: `RunBreakdown`, `Diff`, files. The public functions `analyze`, `compare`, `write_report`.
Knows the order of the stages and which process drives which; each stage knows only its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracetools.activity import activity_of
from tracetools.breakdown import Explained, break_down
from tracetools.chains import comm_causes
from tracetools.classify import Classified, classify
from tracetools.conditions import conditions
from tracetools.gaps import DriverView, between_markers, explain, own_methods
from tracetools.intervals import EMPTY, NONE, Spans, merge, union
from tracetools.model import Process, Run, RunBreakdown
from tracetools.ranks import Ranks, across_ranks
from tracetools.stackprofile import DEFAULT_PROFILE, StackProfile, load_profile
from tracetools.steps import Markers, find_markers, find_steps
from tracetools.stragglers import stragglers
from tracetools.waiting import rows_of

if TYPE_CHECKING:
    from tracetools.diff_records import Diff
    from tracetools.load.run import Progress
    from tracetools.render.perfetto import Tally

DRIVEN = ("policy", "generation", "other")


def profile_for(run: Run, profile: StackProfile | None = None) -> StackProfile:
    """The profile asked for, else the one the run was recorded with, else the generic one."""
    return profile or load_profile(run.stack or DEFAULT_PROFILE)


def explain_run(run: Run, profile: StackProfile | None = None) -> tuple[Ranks, list[Explained]]:
    """All stages for all processes: what they tell of each other (`Ranks.run` has their clocks aligned), and each of its processes."""
    rules = profile_for(run, profile)
    classified = [classify(p.trace, rules) for p in run.processes]
    markers = [find_markers(c, rules) for c in classified]
    ranks = across_ranks(run, classified, _marks(run, markers))
    moved = [a.trace is not b.trace for a, b in zip(ranks.run.processes, run.processes, strict=True)]
    run = ranks.run
    classified = [
        classify(p.trace, rules) if m else c for p, c, m in zip(run.processes, classified, moved, strict=True)
    ]
    markers = [find_markers(c, rules) if m else old for c, old, m in zip(classified, markers, moved, strict=True)]
    marks, views = _marks(run, markers), _views(run, classified, markers, rules)
    found = []
    for i, process in enumerate(run.processes):
        steps = find_steps(classified[i], marks[i])
        activity = activity_of(classified[i], rules)
        gaps = explain(classified[i], activity, steps, rules, views[i])
        split = (ranks.waiting.matched(i), ranks.waiting.waiting(i)) if ranks.waiting else None
        found.append(Explained(process, classified[i], activity, steps, gaps, split))
    if ranks.waiting:
        charged = comm_causes(found, ranks.waiting)
        found = [replace(f, comm_causes=causes) for f, causes in zip(found, charged, strict=True)]
    return ranks, found


def _marks(run: Run, markers: list[Markers]) -> list[Markers]:
    """Step markers of each process: its driver's where it is driven."""
    driver = run.driver
    if driver is None:
        return markers
    drivers = markers[run.processes.index(driver)]
    return [
        _drivers_markers(m, drivers) if _is_driven(p, driver) else m
        for p, m in zip(run.processes, markers, strict=True)
    ]


def _views(
    run: Run, classified: list[Classified], markers: list[Markers], rules: StackProfile
) -> list[DriverView | None]:
    """What each process sees of its driver; None for one that is not driven."""
    driver = run.driver
    if driver is None:
        return [None] * len(run.processes)
    at = run.processes.index(driver)
    methods = {i: own_methods(classified[i]) for i, p in enumerate(run.processes) if _is_driven(p, driver)}
    return [
        _driver_view(classified[at], markers[at], rules, [methods[j] for j in methods if j != i])
        if i in methods
        else None
        for i in range(len(run.processes))
    ]


def _is_driven(process: Process, driver: Process) -> bool:
    """On the driver's host and clock, and doing its work."""
    same_clock = process.clock_placed and driver.clock_placed and process.host == driver.host
    return process is not driver and process.role in DRIVEN and same_clock


def _driver_view(driver: Classified, markers: Markers, rules: StackProfile, peers: list[Spans]) -> DriverView:
    line = driver.regions.timeline(markers.thread)
    waits = [i for i, name in enumerate(driver.regions.names) if name in rules.waits]
    rows = np.flatnonzero(np.isin(line.value[:-1], waits))
    return DriverView(
        line=line,
        names=driver.regions.names,
        waiting=union(line.at[rows], line.at[rows + 1]),
        between_steps=between_markers(markers) if len(markers) else EMPTY,
        others_active=merge(*peers) if peers else EMPTY,
    )


def _drivers_markers(own: Markers, drivers: Markers) -> Markers:
    """The driver's steps are its workers' steps; the worker's own thread stays the one that is looked at."""
    if not len(drivers):
        return own
    thread = own.thread if own.thread != NONE else drivers.thread
    return Markers(drivers.name, drivers.start, drivers.end, thread, f"the driver's {drivers.source}")


def analyze(run: Run, profile: StackProfile | None = None) -> RunBreakdown:
    """Partition, causes and classes of every process of a run."""
    rules = profile_for(run, profile)
    ranks, found = explain_run(run, rules)
    run = ranks.run
    infos = [p.trace.info for p in run.processes]
    return RunBreakdown(
        path=run.path,
        stack=run.stack,
        processes=tuple(break_down(f, rules) for f in found),
        problems=run.problems,
        profiler=tuple(sorted({flag for info in infos for flag in info.profiler})),
        devices=tuple(dict.fromkeys(d for info in infos for d in info.devices)),
        collectives=rows_of(ranks.waiting, run.processes) if ranks.waiting else (),
        stragglers=stragglers(found, ranks.waiting) if ranks.waiting else (),
        clocks=ranks.clocks,
        conditions=conditions(run.record),
    )


def compare(a: RunBreakdown, b: RunBreakdown, *, skip: int = 0) -> Diff:
    """Explain the difference between two analysed runs (see tracetools.diff)."""
    from tracetools.diff import diff

    return diff(a, b, skip=skip)


def write_report(result: RunBreakdown | Diff, path: Path | str) -> None:
    """Write a result as JSON (design of the keys: docs/json.md) to `path`, atomically."""
    from tracetools.output import write_atomically
    from tracetools.render.jsonout import render

    write_atomically(Path(path), render(result))


def export_run(run: Run, out: Path, profile: StackProfile | None = None, progress: Progress | None = None) -> Tally:
    """Write the run as one Chrome-JSON file for Perfetto, compressed where the name ends in .gz. Returns what it holds."""
    from tracetools.load.document import Document, read_document
    from tracetools.output import write_atomically
    from tracetools.render.perfetto import Tally, chrome_trace, gzipped, tracks_of
    from tracetools.render.rawrows import RawEvent

    rules = profile_for(run, profile)
    ranks, explained = explain_run(run, rules)
    run = ranks.run
    tracks = [tracks_of(found, break_down(found, rules)) for found in explained]
    source = Path(run.path)
    done = count()

    def read(process: Process) -> Document[RawEvent]:
        file = source / process.trace.file if source.is_dir() else source
        if progress:
            progress(file.name, next(done), len(tracks))
        return read_document(file, RawEvent)

    tally = Tally()
    pieces = chrome_trace(run, tracks, read, tally)
    write_atomically(out, gzipped(pieces) if out.suffix == ".gz" else pieces)
    return tally
