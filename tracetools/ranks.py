"""What the processes of a run tell about each other through their collectives.

In: a run, its processes classified, their step markers. Out: `Ranks`: the run on one clock as far as that can be, and the split of
its collectives. Knows the order of the steps on that way (calls, groups, pairs, clocks, waiting); each of them knows only its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracetools.classify import Classified
from tracetools.clocks import aligned, place
from tracetools.collective_calls import Calls, calls_of
from tracetools.collectives import match, members_of
from tracetools.host_groups import with_groups
from tracetools.model import Clock, Problem, Process, Run
from tracetools.steps import Markers
from tracetools.waiting import Waiting, only_possible, outliers, split


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """`run` is the run that came in where no clock had to be moved. `waiting` is None where there is one process only."""

    run: Run
    waiting: Waiting | None
    clocks: tuple[Clock, ...] = ()


def across_ranks(run: Run, classified: Sequence[Classified], markers: Sequence[Markers]) -> Ranks:
    """Never raises: what cannot be paired or placed is a problem of the run."""
    calls = [calls_of(c, m) for c, m in zip(classified, markers, strict=True)]
    run = _with_outliers(run, calls)
    members = members_of(run.processes, calls)
    if len(members) < 2:
        return Ranks(run, None)
    members, group_problems = with_groups(members)
    matches, pair_problems = match(run.processes, members)
    placement = place(run.processes, matches)
    run, later_ns = aligned(run, placement)
    ahead = placement.ahead[matches.process] - later_ns
    matches = replace(matches, start=matches.start - ahead, end=matches.end - ahead)
    matches, time_problems = only_possible(matches, placement.placed)
    between_two = sum(m.calls.point_to_point for m in members)
    told = [
        Problem(
            "point_to_point", between_two, "sends and receives between two ranks, not split into waiting and transfer"
        )
    ]
    problems = (*run.problems, *group_problems, *pair_problems, *time_problems, *(told if between_two else ()))
    return Ranks(replace(run, problems=problems), split(matches), placement.clocks)


def _with_outliers(run: Run, calls: Sequence[Calls]) -> Run:
    """The run, with a word on every process in which one call holds most of the communication."""
    processes = [_noted(p, outliers(c.start, c.end)) for p, c in zip(run.processes, calls, strict=True)]
    return (
        run
        if all(a is b for a, b in zip(processes, run.processes, strict=True))
        else replace(run, processes=tuple(processes))
    )


def _noted(process: Process, problems: list[Problem]) -> Process:
    return replace(process, problems=(*process.problems, *problems)) if problems else process
