"""Clocks of several hosts: placed by the ends of collectives, bounded by causality, never moved without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Event, kernel, write

from tracetools.analysis import analyze, export_run
from tracetools.clocks import causal_bounds
from tracetools.load import load_run
from tracetools.model import RunBreakdown

US = 1000
NAME = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def calls(*at: tuple[float, float]) -> list[Event]:
    """All-reduces of a numbered group, as (start, end) in microseconds."""
    named: dict[str, Any] = {"Collective name": "allreduce", "Process Group Name": "g"}
    return [kernel(NAME, s, e - s, stream=20, **named, Seq=i) for i, (s, e) in enumerate(at)]


def rank(folder: Path, number: int, events: Sequence[Event], world: int, **top: Any) -> None:
    write(folder / f"rank-{number}.json", events, rank=number, world=world, **top)


def waits(run: RunBreakdown) -> list[int | None]:
    return [None if s.comm_wait_ns is None else s.comm_wait_ns // US for p in run.processes for s in p.steps]


def said(run: RunBreakdown, kind: str) -> list[str]:
    return [p.detail for p in run.all_problems if p.kind == kind]


def test_two_hosts_are_aligned_on_the_ends(tmp_path: Path) -> None:
    # host b is 500 us ahead; its rank is late by 20 us (a: 0-60, b: 20-60) and early by 10 (a: 110-150, b: 100-150)
    rank(tmp_path, 0, calls((0, 60), (110, 150)), 2, host_name="a")
    rank(tmp_path, 1, calls((520, 560), (600, 650)), 2, host_name="b")
    run = analyze(load_run(tmp_path))
    (clock,) = run.clocks

    assert waits(run) == [20, 10]
    # low: latest of (b's start - a's end): 520-60, 600-150 -> 460; high: earliest of (b's end - a's start): 560-0, 650-110 -> 540
    assert (clock.ahead_ns, clock.low_ns, clock.high_ns, clock.spread_ns) == (500 * US, 460 * US, 540 * US, 0)
    assert said(run, "clock_offset") == [
        "host b: clock 500.000 us ahead of host a, times moved; the ends of 2 collectives agree within 0.000 us, bounds 460.000 to 540.000"
    ]
    assert [p.steps[0].start_ns for p in run.processes] == [0, 20 * US]


def test_the_offset_is_the_median_of_the_ends(tmp_path: Path) -> None:
    # ends differ by 300, 302, 390: one end that was recorded late does not move the clock
    rank(tmp_path, 0, calls((0, 200), (300, 500), (600, 800)), 2, host_name="a")
    rank(tmp_path, 1, calls((310, 500), (610, 802), (910, 1190)), 2, host_name="b")
    (clock,) = analyze(load_run(tmp_path)).clocks

    assert (clock.ahead_ns, clock.spread_ns) == (302 * US, 88 * US)


def test_processes_of_one_host_are_never_moved(tmp_path: Path) -> None:
    # ends 30 us apart: on one host that is how it was
    rank(tmp_path, 0, calls((0, 60), (100, 160)), 2, host_name="a")
    rank(tmp_path, 1, calls((20, 90), (120, 190)), 2, host_name="a")
    run = analyze(load_run(tmp_path))

    assert waits(run) == [40, 0]
    assert (run.clocks, run.problems) == ((), ())


def test_files_without_a_host_stay_where_they_are_if_causality_allows_it(tmp_path: Path) -> None:
    rank(tmp_path, 0, calls((0, 60), (100, 160)), 2)
    rank(tmp_path, 1, calls((20, 90), (120, 190)), 2)
    run = analyze(load_run(tmp_path))

    assert waits(run) == [40, 0]
    assert [c.ahead_ns for c in run.clocks] == [0]
    assert run.problems == ()


def test_all_ranks_of_a_host_move_together(tmp_path: Path) -> None:
    # ranks 2 and 3 on host b, 1000 us ahead; rank 3 is 5 us later than rank 2
    for number in range(4):
        at = 1000 * (number > 1) + 5 * (number % 2)
        rank(tmp_path, number, calls((at, at - 5 * (number % 2) + 50)), 4, host_name="ab"[number > 1])
    run = analyze(load_run(tmp_path))

    assert waits(run) == [5, 0, 5, 0]
    assert [(c.rank, c.ahead_ns) for c in run.clocks] == [(2, 1000 * US), (3, 1000 * US)]


def test_hosts_are_placed_along_a_chain(tmp_path: Path) -> None:
    # a and b share group x, b and c group y: c is 300 + 70 us ahead of a
    def pair(name: str, start: float) -> Event:
        named: dict[str, Any] = {"Collective name": "allreduce", "Process Group Name": name, "Seq": 1}
        return kernel(NAME, start, 40, stream=20, **named)

    rank(tmp_path, 0, [pair("x", 0)], 3, host_name="a")
    rank(tmp_path, 1, [pair("x", 300), pair("y", 400)], 3, host_name="b")
    rank(tmp_path, 2, [pair("y", 470)], 3, host_name="c")
    run = analyze(load_run(tmp_path))

    assert [c.ahead_ns for c in run.clocks] == [300 * US, 370 * US]
    assert [p.steps[0].start_ns for p in run.processes] == [0, 0, 100 * US]


def test_a_clock_that_no_offset_fits_is_analysed_alone(tmp_path: Path) -> None:
    # first collective: b at least 970 ahead; second: at most 540
    rank(tmp_path, 0, calls((0, 30), (100, 140)), 2, host_name="a")
    rank(tmp_path, 1, calls((1000, 1030), (610, 640)), 2, host_name="b")
    run = analyze(load_run(tmp_path))

    assert waits(run) == [None, None]
    assert [c.ahead_ns for c in run.clocks] == [None]
    assert said(run, "clock_contradiction") == [
        "host b: no clock offset fits all 2 shared collectives (at least 970.000, at most 540.000 us): analysed alone"
    ]


def test_a_file_with_a_clock_of_its_own_is_placed_by_its_collectives(tmp_path: Path) -> None:
    # rank 2 lost its wall clock: its times begin at 0, 7 us before the collective that rank 0 entered 5 us after the run's origin
    for number in range(2):
        rank(tmp_path, number, calls((5, 45)), 3, host_name="a", baseTimeNanoseconds=10**18)
    rank(tmp_path, 2, [kernel("gemm", 0, 1), *calls((12, 37))], 3, host_name="a")
    loaded = load_run(tmp_path)
    run = analyze(loaded)

    assert [p.clock_placed for p in loaded.processes] == [True, True, False]
    assert waits(run) == [15, 15, 0]
    assert not said(run, "clock")
    assert "rank 2" in said(run, "clock_offset")[0]
    assert (
        min(p.steps[0].start_ns for p in run.processes) == 0
    )  # the gemm is the first event of the run now, 8 us before the others


def test_a_file_that_shares_nothing_stays_alone_and_says_so(tmp_path: Path) -> None:
    for number in range(2):
        rank(tmp_path, number, calls((5 * number, 45)), 3, baseTimeNanoseconds=10**18)
    rank(tmp_path, 2, [kernel("gemm", 0, 1)], 3)
    run = analyze(load_run(tmp_path))

    assert waits(run) == [5, 0, 0]
    assert said(run, "clock") == ["clock cannot be set against the other files, analysed alone: rank-2.json"]


def test_hosts_without_a_common_collective_say_so(tmp_path: Path) -> None:
    for number in range(2):
        rank(tmp_path, number, [kernel("gemm", 0, 1)], 2, host_name="ab"[number])

    assert said(analyze(load_run(tmp_path)), "clock_unchecked") == [
        "host b: no collective in common with the others, times are as its own clock has them"
    ]


def test_an_export_has_the_aligned_times(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    rank(source, 0, calls((0, 60)), 2, host_name="a", baseTimeNanoseconds=10**18)
    rank(source, 1, calls((520, 560)), 2, host_name="b", baseTimeNanoseconds=10**18)
    export_run(load_run(source), tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    ends = {round(e["ts"] + e["dur"], 3) for e in events if e.get("ph") == "X" and e["name"] == NAME}

    assert ends == {60.0}


def test_bounds_from_calls_between_processes() -> None:
    # sent 0 and 100, started 55 and 160; ended 80 and 170, received 40 and 125: ahead by 45 to 55
    columns = [np.array(c, np.int64) for c in ((0, 100), (55, 160), (80, 170), (40, 125))]

    assert causal_bounds(*columns) == (45, 55)


@pytest.mark.parametrize("swap", [False, True])
def test_case_36_two_hosts_4000_us_apart(corpus: Path, tmp_path: Path, swap: bool) -> None:
    for file in sorted(corpus.glob("cases/36_*")):
        shutil.copy(file, tmp_path / (f"z{file.name}" if swap and "rank0" in file.name else file.name))
    run = analyze(load_run(tmp_path))
    (row,) = run.collectives

    assert [c.ahead_ns for c in run.clocks] == [4_000_000]
    assert waits(run) == [40, 0]
    assert [s.comm_ns for p in run.processes for s in p.steps] == [140 * US, 100 * US]
    assert [s.compute_ns for p in run.processes for s in p.steps] == [150 * US, 150 * US]
    assert [(r.rank, r.wait_ns // US, r.last) for r in row.per_rank] == [(0, 40, 0), (1, 0, 2)]
    assert [(s.rank, s.waited_ns) for s in run.stragglers] == [(1, 40 * US)]
    assert [p.steps[0].start_ns for p in run.processes] == [0, 30 * US]
