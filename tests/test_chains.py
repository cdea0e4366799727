"""Who a rank waits for in a collective, and what that one did longer: tiny runs, times in microseconds."""

from __future__ import annotations

import json
from pathlib import Path

from builders import Event, kernel, launch, region, step, write, x

from tracetools.analysis import analyze, compare
from tracetools.diff_records import Row
from tracetools.load import load_run
from tracetools.model import RunBreakdown, StepBreakdown
from tracetools.verdict import label

US = 1000


def all_reduce(at: float, end: float, number: int, *, ranks: int = 2) -> Event:
    told = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": str(list(range(ranks))),
            "Group size": ranks, "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Seq": number}  # fmt: skip
    return x(
        "ncclDevKernel_AllReduce",
        "kernel",
        at,
        end - at,
        pid=0,
        tid=20,
        device=0,
        stream=20,
        correlation=900 + number,
        **told,
    )


def call(at: float, number: int) -> Event:
    return launch(at, 900 + number, 1)


def run_of(folder: Path, *ranks: list[Event]) -> RunBreakdown:
    folder.mkdir(exist_ok=True)
    for rank, events in enumerate(ranks):
        write(folder / f"rank{rank}.json", events, rank=rank, world=len(ranks), baseTimeNanoseconds=10**18)
    return analyze(load_run(folder))


def charged(s: StepBreakdown) -> dict[tuple[str | None, str | None, str], int]:
    assert not s.comm_causes or sum(c.ns for c in s.comm_causes) == s.exposed_comm_ns
    return {(c.process, c.region, c.kind): c.ns // US for c in s.comm_causes}


def test_waiting_is_charged_to_what_the_last_rank_did_longer(tmp_path: Path) -> None:
    # Rank 0 computes 0-10 and enters at 10, rank 1 at 60, both leave at 70. Rank 1 until 60: computes 0-20, idle 20-50 in `load`,
    # computes 50-60. It came 50 later: it computed 20 more, and loaded 30.
    first = [
        step(0, 0, 100),
        launch(0, 9),
        kernel("gemm", 0, 10, 9),
        call(5, 1),
        all_reduce(10, 70, 1),
        launch(80, 2),
        kernel("gemm", 80, 20, 2),
    ]
    second = [
        step(0, 0, 100), launch(0, 1), kernel("gemm", 0, 20, 1), region("load", 20, 30), launch(50, 2), kernel("gemm", 50, 10, 2),
        call(55, 1), all_reduce(60, 70, 1), launch(80, 3), kernel("gemm", 80, 20, 3),
    ]  # fmt: skip
    run = run_of(tmp_path / "run", first, second)

    assert charged(run.processes[0].steps[0]) == {
        ("peer", None, "wait_compute"): 20,
        ("peer", "load", "wait"): 30,
        (None, None, "transfer"): 10,
    }
    assert charged(run.processes[1].steps[0]) == {(None, None, "transfer"): 10}


def test_a_delay_of_long_ago_is_charged_not_what_the_late_rank_does_meanwhile(tmp_path: Path) -> None:
    # Both compute 40. Rank 1 loads 30 before: when rank 0 waits, 40-70, rank 1 computes what rank 0 had computed before.
    first = [step(0, 0, 90), launch(0, 2), kernel("gemm", 0, 40, 2), call(5, 1), all_reduce(40, 80, 1)]
    second = [
        step(0, 0, 90),
        region("load", 0, 30),
        launch(30, 2),
        kernel("gemm", 30, 40, 2),
        call(35, 1),
        all_reduce(70, 80, 1),
    ]
    run = run_of(tmp_path / "run", first, second)

    assert charged(run.processes[0].steps[0]) == {("peer", "load", "wait"): 30, (None, None, "transfer"): 10}


def test_a_collective_that_nobody_waits_for_does_not_bring_ranks_together(tmp_path: Path) -> None:
    # Rank 1 loads 30, then both compute 40. Half way each starts collective 1, which ends at 60, while rank 1 still computes: it is
    # still 30 behind. Rank 0 waits 40-50 and 60-70 for it: for `load`, not because it computes 60-70. The transfer 50-60 holds up nobody:
    # rank 1 computes beside it, rank 0 would wait for rank 1 without it, too.
    first = [
        step(0, 0, 90), launch(0, 2), kernel("gemm", 0, 40, 2), call(5, 1), all_reduce(20, 60, 1), call(6, 3), all_reduce(60, 80, 3),
    ]  # fmt: skip
    second = [
        step(0, 0, 90), region("load", 0, 30), launch(30, 2), kernel("gemm", 30, 40, 2), call(35, 1), all_reduce(50, 60, 1),
        call(36, 3), all_reduce(70, 80, 3),
    ]  # fmt: skip
    run = run_of(tmp_path / "run", first, second)

    assert charged(run.processes[0].steps[0]) == {("peer", "load", "wait"): 30, (None, None, "transfer"): 10}
    assert run.processes[0].steps[0].comm_wait_ns == (30 + 10) * US  # 20-50, of which 40-50 is exposed, and 60-70


def test_what_the_late_rank_did_less_is_taken_off_in_proportion(tmp_path: Path) -> None:
    # Rank 1 loads 30 and saves 10; rank 0 computes 20 more than rank 1 before it enters, 20 earlier than rank 1.
    first = [step(0, 0, 90), launch(0, 2), kernel("gemm", 0, 40, 2), call(5, 1), all_reduce(40, 80, 1)]
    second = [
        step(0, 0, 90), region("load", 0, 30), region("save", 30, 10), launch(40, 2), kernel("gemm", 40, 20, 2), call(45, 1),
        all_reduce(60, 80, 1),
    ]  # fmt: skip
    run = run_of(tmp_path / "run", first, second)

    # 20 = 30 + 10 - 20: three quarters of it for `load`
    assert charged(run.processes[0].steps[0]) == {
        ("peer", "load", "wait"): 15, ("peer", "save", "wait"): 5, (None, None, "transfer"): 20,
    }  # fmt: skip


def test_a_chain_is_followed_to_its_end(tmp_path: Path) -> None:
    # Ranks 0, 1, 2. Collective 1 of ranks 0 and 1 (their own group): rank 0 enters at 10, rank 1 at 80, because it waits from 20 to
    # 70 in collective 2, of all three, for rank 2, which is idle in `save` until 70. So rank 0's wait 20-70 is rank 2's `save`.
    pair = {"Collective name": "allreduce", "Process Group Name": "1", "Process Group Ranks": "[0, 1]", "Group size": 2,
            "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Seq": 1}  # fmt: skip

    def of_pair(at: float, end: float) -> Event:
        return x(
            "ncclDevKernel_AllReduce",
            "kernel",
            at,
            end - at,
            pid=0,
            tid=21,
            device=0,
            stream=21,
            correlation=800,
            **pair,
        )

    zero = [
        step(0, 0, 100),
        launch(0, 9),
        kernel("gemm", 0, 10, 9),
        launch(5, 800),
        of_pair(10, 90),
        call(6, 2),
        all_reduce(69, 75, 2, ranks=3),
    ]
    one = [step(0, 0, 100), launch(0, 1), kernel("gemm", 0, 20, 1), call(15, 2), all_reduce(20, 75, 2, ranks=3),
           launch(75, 3), kernel("gemm", 75, 5, 3), launch(79, 800), of_pair(80, 90)]  # fmt: skip
    two = [
        step(0, 0, 100),
        launch(0, 1),
        kernel("gemm", 0, 10, 1),
        region("save", 10, 60),
        call(70, 2),
        all_reduce(70, 75, 2, ranks=3),
    ]
    run = run_of(tmp_path / "run", zero, one, two)

    # All compute 0-10. Rank 0 is exposed 10-90, of which it waits 70 for rank 1, which computed 15 more (10-20 and 75-80), waited 50 for
    # rank 2, and transferred 5 (70-75); 80-90 is transfer. (From 69 to 70 rank 0 is in collective 2, too, and waits for rank 2.)
    assert charged(run.processes[0].steps[0]) == {
        ("peer", None, "wait_compute"): 15,
        ("peer", "save", "wait"): 50,
        ("peer", None, "wait_comm"): 5,
        (None, None, "transfer"): 10,
    }
    assert charged(run.processes[1].steps[0]) == {
        ("peer", "save", "wait"): 50,
        (None, None, "transfer"): 15,  # 70-75 and 80-90
    }


def test_a_rank_that_waits_for_one_that_its_driver_kept_waiting_waits_for_the_driver(tmp_path: Path) -> None:
    # The driver prepares rank 1's data from 8 to 60; rank 1's method runs from 60 on, rank 0's from 8 on.
    folder = tmp_path / "run"
    folder.mkdir()
    processes: list[dict[str, object]] = []

    def add(name: str, role: str, rank: int | None, pid: int, events: list[Event]) -> None:
        write(folder / name, events, rank=rank, world=2, baseTimeNanoseconds=10**18)
        processes.append(
            {"file": name, "role": role, "rank": rank, "world_size": 2, "host": "h", "pid": pid, "steps": []}
        )

    add("d.json", "driver", None, 1, [
        region("tracetools.step#0", 0, 100) | {"pid": 1}, region("data_processing", 8, 52) | {"pid": 1},
    ])  # fmt: skip
    add("w0.json", "policy", 0, 2, [
        region("train", 8, 82), call(8, 1), all_reduce(10, 70, 1),
    ])  # fmt: skip
    add("w1.json", "policy", 1, 3, [
        region("train", 60, 30), launch(62, 7), kernel("gemm", 62, 3, 7), call(65, 1), all_reduce(65, 70, 1),
    ])  # fmt: skip
    record = {"schema": "tracetools.run/1", "profile": "ray", "processes": processes, "missing": []}
    (folder / "run.json").write_text(json.dumps(record))
    run = analyze(load_run(folder))

    first = next(p for p in run.processes if p.rank == 0 and p.role == "policy")
    # Rank 1 enters at 65, 55 later than rank 0: the driver prepared 52 for it, it computed 3. Both idle 2 in `train`.
    assert charged(first.steps[0]) == {
        ("driver", "data_processing", "wait"): 52,
        ("peer", None, "wait_compute"): 3,
        (None, None, "transfer"): 5,
    }


def test_a_comparison_splits_communication_only_where_both_sides_can(tmp_path: Path) -> None:
    steps = [step(0, 0, 100), step(1, 100, 100)]
    first = [*steps, call(5, 1), all_reduce(10, 70, 1), call(105, 2), all_reduce(110, 170, 2)]
    second = [*steps, region("load", 0, 55), call(55, 1), all_reduce(60, 70, 1), call(155, 2), all_reduce(160, 170, 2)]
    both = run_of(tmp_path / "both", first, second)
    alone = analyze(load_run(write(tmp_path / "alone.json", first, rank=0, world=2)))

    split = [r for r in compare(both, both).waterfall if r.part == "exposed_comm"]
    assert {r.kind for r in split} == {"transfer", "wait"}
    # Rank 0 waits 50 in each step, rank 1 never: in the first all for `load` (55, less the 5 that rank 0 was idle longer), in the
    # second for what `load` has left, 5, and 45 in no region. Means of two ranks and two steps.
    assert {(r.region, r.a_ns) for r in split if r.kind == "wait"} == {("load", 13_750), (None, 11_250)}
    (one,) = [r for r in compare(both, alone).waterfall if r.part == "exposed_comm"]
    assert (one.kind, one.a_ns, one.b_ns) == (None, 35_000, 60_000)


def test_words_for_what_was_waited_for() -> None:
    def words(process: str | None, region: str | None, kind: str | None) -> str:
        return label(Row("exposed_comm", process, region, kind, 0, 0, 0, None))

    assert words(None, None, None) == "exposed communication"
    assert words(None, None, "transfer") == "exposed comm, transfer"
    assert words("peer", "load", "wait") == "exposed comm, waiting for a slower rank: load"
    assert words("driver", None, "wait") == "exposed comm, waiting for the driver: no region"
    assert words("peer", None, "wait_compute") == "exposed comm, a slower rank computes"
