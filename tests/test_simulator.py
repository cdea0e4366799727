"""The simulator against numbers worked out by hand, and the analysis against the simulator's truth. Times in us unless said otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulator.device import Meeting, Stream, Work
from simulator.engine import Engine, Signal
from simulator.engine import Work as Running
from simulator.host import Stop, Thread
from simulator.job import run, worth
from simulator.program import US, Op, Program, random_program
from simulator.record import Record, _us

from tracetools.analysis import analyze, compare
from tracetools.diff_records import Diff
from tracetools.load import load_run
from tracetools.model import RunBreakdown


class Noted(Record):
    """A record that can be asked, in us."""

    def __init__(self) -> None:
        super().__init__(1, 0, {})

    def of(self, name: str) -> list[tuple[float, float]]:
        return [(start / US, end / US) for what, start, end in self.slices if what == name]


# ---------------------------------------------------------------- the parts


def test_threads_run_in_order_of_time_and_of_becoming_ready() -> None:
    engine, signal, seen = Engine(), Signal(), []

    def thread(name: str, wait: int) -> Running:
        yield wait
        seen.append((name, engine.now))
        yield signal
        seen.append((name, engine.now))

    def firing() -> Running:
        yield 9
        engine.fire(signal)

    for name, wait in (("a", 5), ("b", 5), ("c", 12)):
        engine.spawn(thread(name, wait))
    engine.spawn(firing())
    engine.run()

    assert seen == [("a", 5), ("b", 5), ("a", 9), ("b", 9), ("c", 12), ("c", 12)]
    with pytest.raises(ValueError, match="once"):
        engine.fire(signal)


def test_a_launch_blocks_while_the_queue_is_full() -> None:
    # Calls take 2, arrive after 5, kernels last 20, two may be under way. k0: called 0, runs 5-25. k1: called 2, runs 25-45. The
    # third call begins at 4 and finds no room until 25; k2 arrives at 30 and runs when k1 is over, 45-65.
    engine, record = Engine(), Noted()
    stream = Stream(engine, record, 7, depth=2, gap_ns=0)
    thread = Thread(engine, record, 1, launch_ns=2 * US, latency_ns=5 * US)

    def host() -> Running:
        for i in range(3):
            yield from thread.launch(stream, f"k{i}", 20 * US)

    engine.spawn(host())
    engine.run()

    assert [record.of(f"k{i}") for i in range(3)] == [[(5, 25)], [(25, 45)], [(45, 65)]]
    assert record.of("cudaLaunchKernel") == [(0, 2), (2, 4), (4, 27)]


def test_a_collective_begins_on_each_rank_and_ends_on_all() -> None:
    # Rank 0 is there at 10, rank 1 at 35, the transfer takes 7: both leave at 42.
    engine, record = Engine(), Noted()
    meeting = Meeting(engine, 2, 7 * US)
    for rank, arrives in enumerate((10, 35)):
        Stream(engine, record, rank, 9, 0).put(Work(f"r{rank}", "kernel", 0, 1, arrives * US, meeting))
    engine.run()

    assert (record.of("r0"), record.of("r1")) == ([(10, 42)], [(35, 42)])


def test_a_stream_waits_for_another_ones_event_and_a_host_for_a_stream() -> None:
    # Calls take 1 and arrive after 2. a runs 2-32 on stream 7. The event's record and wait take 1 each (1-3). b, called at 3, waits for
    # a: 32-42 on stream 20. The host's wait for stream 20 returns 3 after that.
    engine, record = Engine(), Noted()
    first, second = (Stream(engine, record, n, 9, 0) for n in (7, 20))
    thread = Thread(engine, record, 1, launch_ns=US, latency_ns=2 * US)

    def host() -> Running:
        yield from thread.launch(first, "a", 30 * US)
        yield from thread.order(first, second)
        yield from thread.launch(second, "b", 10 * US)
        yield from thread.synchronise(second)

    engine.spawn(host())
    engine.run()

    assert (record.of("a"), record.of("b")) == ([(2, 32)], [(32, 42)])
    assert record.of("cudaStreamSynchronize") == [(4, 45)]


def test_stops_come_at_the_same_place_of_the_program_whatever_is_added() -> None:
    # A collection of 5 after every 10 of work. 12 of work that takes 12: stopped at 10. The same work taking 24: stopped at 20.
    for takes, stopped, over in ((12, (10, 15), 17), (24, (20, 25), 29), (0, (0, 5), 5)):
        engine, record = Engine(), Noted()
        thread = Thread(engine, record, 1, stops=(Stop("gc", 10 * US, 5 * US, 10 * US),))
        engine.spawn(thread.spend(takes * US, 12 * US))
        engine.run()
        assert (record.of("gc"), engine.now) == ([stopped], over * US)


def test_times_are_written_exactly() -> None:
    assert [_us(ns) for ns in (0, 7, 1_234_567, -1_500)] == ["0.000", "0.007", "1234.567", "-1.500"]


# ---------------------------------------------------------------- whole jobs


def analysed(program: Program, folder: Path) -> RunBreakdown:
    folder.mkdir(parents=True)
    run(program, folder)
    return analyze(load_run(folder))


def compared(program: Program, cause: str, ns: int, folder: Path) -> tuple[Diff, float]:
    """`diff` of the program as it is and with more of a cause; the true difference of the steps."""
    more = program.having(cause, program.amount(cause) + ns)
    diff = compare(analysed(program, folder / "a"), analysed(more, folder / "b"))
    return diff, float(run(more).step_ns - run(program).step_ns)


def by_region(diff: Diff, region: str) -> int:
    return sum(r.delta_ns for r in diff.waterfall if r.region == region)


@pytest.mark.parametrize("seed", range(12))
def test_the_analysis_finds_every_step_of_random_programs_as_long_as_it_was(tmp_path: Path, seed: int) -> None:
    program = random_program(seed)
    found = analysed(program, tmp_path / "run")
    ranks = [p for p in found.processes if p.role != "driver"]

    assert [p.rank for p in ranks] == list(range(program.ranks))
    assert {len(p.steps) for p in ranks} == {program.steps}
    assert sum(s.wall_ns for p in ranks for s in p.steps) == run(program).step_ns * program.steps * program.ranks
    assert found.all_problems == ()
    # every all-reduce is found on all ranks
    assert {row.recorded_ranks for row in found.collectives} <= {program.ranks}


def test_a_program_runs_alike_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(random_program(3), tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())

    assert files == ["driver.json", "policy-0.json", "policy-1.json", "run.json"]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


RAY = Program(stack="ray", ranks=2, natural={"data_processing": 300 * US, "ray_submit": 100 * US})


def test_what_the_driver_does_is_worth_what_it_takes(tmp_path: Path) -> None:
    # The ranks wait for the driver in every step: nothing hides it.
    assert worth(RAY, "data_processing") == 300 * US
    diff, true = compared(RAY, "data_processing", 5_000 * US, tmp_path)

    assert diff.step.delta == true == 5_000 * US
    assert by_region(diff, "data_processing") == 5_000 * US


def test_a_call_that_is_long_on_its_way_to_one_rank_is_transport_on_both(tmp_path: Path) -> None:
    # The last rank's call is under way 5 ms longer; the first waits for it in the gradients' all-reduce.
    diff, true = compared(replace(RAY, transport="one"), "ray_transport", 5_000 * US, tmp_path)
    transport = sum(
        r.delta_ns
        for r in diff.waterfall
        if r.kind == "ray_transport" or (r.process, r.region) == ("driver", "ray_wait")
    )

    assert diff.step.delta == true
    assert transport == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize(("cause", "region"), [("straggler", "forward"), ("late_collective", "metrics")])
def test_one_late_rank_is_found_on_all(tmp_path: Path, cause: str, region: str) -> None:
    # Launch-bound, so that nearly all of the delay counts. On three ranks of four it is a wait in a collective, long after the delay.
    program = Program(ranks=4, forward=(Op(30 * US, 5 * US),) * 6, backward=(Op(30 * US, 5 * US),) * 6)
    diff, true = compared(program, cause, 2_000 * US, tmp_path)

    assert true >= 1_700 * US
    assert by_region(diff, region) == pytest.approx(true, rel=0.02)


def test_a_delay_that_the_devices_backlog_hides_is_charged_nothing(tmp_path: Path) -> None:
    # The host is 4 ms ahead of the device when it comes to the optimizer, and 1 ms more changes nothing. The device pauses 1 us between
    # two kernels meanwhile: these pauses are forward's, backward's and the optimizer's latency as before.
    program = Program(forward=(Op(10 * US, 900 * US),) * 4, backward=(Op(10 * US, 900 * US),) * 4, gap_ns=US)
    diff, true = compared(program, "optimizer", 1_000 * US, tmp_path)

    assert diff.step.delta == true == 0
    assert [r for r in diff.waterfall if r.delta_ns] == []
