"""Step walls, the partition and the causes of idle time, on traces small enough to work out by hand (times in us)."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import HOST, MAIN, Event, kernel, launch, memcpy, op, region, step, write, x

from tracetools.analysis import analyze
from tracetools.load import load_run
from tracetools.model import ProcessBreakdown, StepBreakdown


def broken_down(tmp_path: Path, events: list[Event], name: str = "rank-0.json") -> ProcessBreakdown:
    return analyze(load_run(write(tmp_path / name, events))).processes[0]


def parts(s: StepBreakdown) -> tuple[float, ...]:
    """(wall, compute, exposed comm, exposed memory, idle) in us."""
    return tuple(ns / 1000 for ns in (s.wall_ns, s.compute_ns, s.exposed_comm_ns, s.exposed_memory_ns, s.idle_ns))


def causes(s: StepBreakdown) -> dict[tuple[str | None, str], float]:
    """us by (region, kind)."""
    return {(c.region, c.kind): c.ns / 1000 for c in s.causes}


def test_the_wall_moves_with_the_backlog_of_the_step_before(tmp_path: Path) -> None:
    # k1 was launched in step 1 and runs until 130, 30 us into step 2 on the host
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        launch(10, 1),
        kernel("k1", 20, 110, 1),
        launch(120, 2),
        kernel("k2", 150, 80, 2),
    ]
    first, second = broken_down(tmp_path, events).steps

    assert parts(first) == (130, 110, 0, 0, 20)  # 0-130, idle before k1
    assert parts(second) == (100, 80, 0, 0, 20)  # 130-230: the last step ends with its last kernel


def test_work_from_before_the_recording_moves_the_first_wall(tmp_path: Path) -> None:
    # `early` has no launch and runs before the first linked work of its stream; `stray` comes after it
    events = [
        step(1, 10, 90),
        kernel("early", 0, 25, 99),
        launch(30, 1),
        kernel("k", 40, 20, 1),
        kernel("stray", 70, 5, 98),
    ]
    found = broken_down(tmp_path, events)

    assert found.steps[0].start_ns == 25_000
    assert parts(found.steps[0]) == (75, 25, 0, 0, 50)
    kinds = {p.kind: p.count for p in found.problems}
    assert (kinds["launched_before_recording"], kinds["unlinked"], kinds["before_first_step"]) == (1, 1, 1)


def test_priority_of_the_partition_over_all_streams(tmp_path: Path) -> None:
    # gemm 0-40, all-reduce 30-60, copy 50-80 on three streams; 80-90 nothing; add 90-100
    events = [
        kernel("gemm", 0, 40),
        kernel("ncclDevKernel_AllReduce", 30, 30, stream=20),
        memcpy(50, 30, stream=21),
        kernel("add", 90, 10),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert parts(only) == (100, 50, 20, 20, 10)
    assert (only.comm_ns, only.overlapped_comm_ns) == (30_000, 10_000)


def test_host_time_goes_to_the_innermost_region_at_each_instant(tmp_path: Path) -> None:
    # gap 10-100 ends with k2, launched at 90: 10-90 is host time in four regions, 90-100 launch latency
    events = [
        launch(0, 1),
        kernel("k1", 1, 9, 1),
        region("outer", 5, 60),
        region("inner", 20, 30),
        region("Optimizer.step#Adam.step", 70, 15),
        launch(90, 2),
        kernel("k2", 100, 5, 2),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert causes(only) == {
        ("outer", "host"): 25,  # 10-20 and 50-65
        ("inner", "host"): 30,
        ("optimizer", "host"): 15,
        (None, "host"): 10,  # 65-70 and 85-90
        (None, "launch_latency"): 10,
    }


def test_a_thread_without_regions_is_spoken_for_by_the_marker_thread(tmp_path: Path) -> None:
    # k2 is launched by autograd's thread (200), which has a region only in 60-70
    events = [
        step(1, 0, 100),
        launch(0, 1),
        kernel("k1", 0, 10, 1),
        region("my loss", 20, 50),
        op("autograd::engine::evaluate_function: MmBackward0", 60, 10, tid=200),
        launch(80, 2, tid=200),
        kernel("k2", 80, 20, 2),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert causes(only) == {("my loss", "host"): 40, ("backward", "host"): 10, (None, "host"): 20}


def test_synchronising_calls_and_profiler_overhead(tmp_path: Path) -> None:
    events = [
        launch(0, 1),
        kernel("k1", 0, 10, 1),
        region("metrics", 10, 50),
        x("cudaStreamSynchronize", "cuda_runtime", 20, 20),
        x("Activity Buffer Request", "overhead", 50, 20, pid=-1, tid=0),
        launch(80, 2),
        kernel("k2", 90, 5, 2),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert causes(only) == {
        ("metrics", "host"): 20,  # 10-20, 40-50
        ("metrics", "sync"): 20,
        (None, "profiler_overhead"): 20,  # 50-70, whatever the host did
        (None, "host"): 10,
        (None, "launch_latency"): 10,
    }


def test_a_wait_of_the_thread_that_speaks_for_a_silent_one_is_a_wait(tmp_path: Path) -> None:
    # k2 is launched at 80 by autograd's thread (200), which has a region in 50-60 only; the main thread is in cudaFree 20-55
    events = [
        step(1, 0, 100),
        launch(0, 1),
        kernel("k1", 0, 10, 1),
        region("loss", 10, 50),
        x("cudaFree", "cuda_runtime", 20, 35),
        op("autograd::engine::evaluate_function: MmBackward0", 50, 10, tid=200),
        launch(80, 2, tid=200),
        kernel("k2", 80, 20, 2),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert causes(only) == {
        ("loss", "host"): 10,
        ("loss", "sync"): 30,  # 20-50: from 50 on autograd's thread speaks for itself
        ("backward", "host"): 10,
        (None, "host"): 20,
    }


def test_a_stream_that_waits_for_an_event_is_a_dependency(tmp_path: Path) -> None:
    wait = x("Stream Wait Event", "cuda_sync", 15, 10, pid=0, tid=7, device=0, stream=7)
    events = [launch(0, 1), kernel("k1", 0, 10, 1), launch(5, 2), wait, kernel("k2", 30, 5, 2)]

    assert causes(broken_down(tmp_path, events).steps[0]) == {(None, "launch_latency"): 10, (None, "dependency"): 10}


def test_work_without_a_launch_makes_its_gap_unknown(tmp_path: Path) -> None:
    events = [region("data_processing", 0, 100), launch(0, 1), kernel("k1", 0, 10, 1), kernel("k2", 60, 5, 0)]
    found = broken_down(tmp_path, events)

    assert causes(found.steps[0]) == {(None, "unknown"): 50}
    assert found.coverage.idle_explained_ns == 0
    assert found.steps[0].causes[0].process is None


def test_after_a_launch_that_was_not_recorded_nothing_is_known(tmp_path: Path) -> None:
    # the graph launched at 30 left no kernels: the device may have been busy from then on
    events = [
        launch(0, 1),
        kernel("k1", 0, 10, 1),
        launch(30, 7, name="cudaGraphLaunch"),
        launch(80, 2),
        kernel("k2", 90, 5, 2),
    ]
    found = broken_down(tmp_path, events)

    assert causes(found.steps[0]) == {(None, "host"): 20, ("unrecorded_launch", "unknown"): 60}
    assert {p.kind for p in found.problems} >= {"graph_not_recorded"}


def test_one_launch_owns_many_kernels_and_reused_ids_pair_in_time_order(tmp_path: Path) -> None:
    events = [
        launch(0, 1, name="cudaGraphLaunch"),
        kernel("a", 5, 5, 1),
        kernel("b", 12, 5, 1),
        launch(20, 2),
        launch(40, 2),
        kernel("c", 50, 5, 2),
        kernel("d", 60, 5, 2),
    ]
    found = broken_down(tmp_path, events)

    assert found.coverage.unlinked_ns == 0
    # c's launch is the one at 20: 17-20 host, 20-50 latency; d's is at 40, before c ended: 55-60 latency
    assert causes(found.steps[0]) == {(None, "launch_latency"): 2 + 30 + 5, (None, "host"): 3}


def test_the_last_step_without_more_work_ends_on_the_host(tmp_path: Path) -> None:
    events = [step(1, 0, 100), launch(0, 1), kernel("k", 0, 40, 1), region("logging", 50, 30)]
    only = broken_down(tmp_path, events).steps[0]

    assert parts(only) == (100, 40, 0, 0, 60)
    assert causes(only) == {("logging", "host"): 30, (None, "host"): 30}


def test_between_markers_is_inside_the_step(tmp_path: Path) -> None:
    events = [
        step(1, 0, 50),
        step(2, 80, 20),
        launch(0, 1),
        kernel("k1", 0, 40, 1),
        launch(80, 2),
        kernel("k2", 80, 20, 2),
    ]
    first, second = broken_down(tmp_path, events).steps

    assert parts(first) == (80, 40, 0, 0, 40)
    assert causes(first) == {(None, "host"): 10, ("between_steps", "host"): 30}
    assert parts(second) == (20, 20, 0, 0, 0)


def test_host_time_without_a_region_names_what_fills_it(tmp_path: Path) -> None:
    events = [
        launch(0, 1),
        kernel("k1", 0, 10, 1),
        op("aten::cat", 20, 30),
        op("aten::empty", 25, 5),
        launch(60, 2),
        kernel("k2", 60, 5, 2),
    ]
    only = broken_down(tmp_path, events).steps[0]

    assert [(c.region, c.filled_by) for c in only.causes] == [(None, (("aten::cat", 25_000), ("aten::empty", 5_000)))]


# ---------------------------------------------------------------- steps without markers, and CPU-only traces


def test_a_region_that_repeats_makes_steps(tmp_path: Path) -> None:
    events = [region("train_batch", 100 * i, 80) for i in range(3)] + [
        op("aten::mm", 100 * i + 10, 50) for i in range(3)
    ]
    found = broken_down(tmp_path, events)

    assert found.steps_from == "repeated region 'train_batch'"
    assert [s.wall_ns for s in found.steps] == [100_000, 100_000, 80_000]


def test_a_cpu_only_timeline(tmp_path: Path) -> None:
    # main thread: mm 10-40 (with its child addmm), an all-reduce op 50-60 that copies in 52-55; gloo's thread works 50-75
    events = [
        step(1, 0, 100),
        region("forward", 5, 40),
        op("aten::linear", 10, 30),
        op("aten::addmm", 15, 20),
        op("c10d::allreduce_", 50, 10),
        op("aten::copy_", 52, 3),
        region("gloo:all_reduce", 50, 25, tid=300),
        op("aten::mul", 80, 10),
    ]
    found = broken_down(tmp_path, events)
    only = found.steps[0]

    assert found.device == "cpu"
    assert found.device_span is None
    # compute 10-40, 52-55, 80-90; communication 50-75 without 52-55
    assert parts(only) == (100, 43, 22, 0, 35)
    assert causes(only) == {("forward", "host"): 10, (None, "host"): 25}
    classes = {k.name: (k.count, k.total_ns / 1000) for k in found.kernel_classes}
    # linear is the innermost operator in 10-15 and 35-40: one operator of 10 us, addmm 20 us
    assert classes == {"gemm": (2, 30), "communication": (1, 7), "copy": (1, 3), "elementwise": (1, 10)}


def test_a_trace_of_annotations_only_is_all_idle(tmp_path: Path) -> None:
    only = broken_down(tmp_path, [region("a", 0, 10), region("b", 10, 30)]).steps[0]

    assert parts(only) == (40, 0, 0, 0, 40)
    assert causes(only) == {("a", "host"): 10, ("b", "host"): 30}


def test_odd_steps_are_pointed_out(tmp_path: Path) -> None:
    events: list[Event] = []
    at = 0.0
    for number, length in enumerate([900, 100, 110, 100]):
        events += [step(number, at, length)]
        if number != 2:
            events += [launch(at, number + 1), kernel("k", at + 1, 50, number + 1)]
        at += length
    kinds = {p.kind: p.detail for p in broken_down(tmp_path, events).problems}

    assert (
        "ProfilerStep#0 lasts 9.0 times the median of the other steps (first step, warm-up?)" in kinds["outlier_step"]
    )
    assert kinds["steps_without_device_work"].endswith("ProfilerStep#2")


# ---------------------------------------------------------------- a driver and its workers


def ray_run(tmp_path: Path, driver: list[Event], workers: list[list[Event]]) -> Path:
    """A folder of a driver's and its workers' traces that say their roles."""
    folder = tmp_path / "run"
    folder.mkdir()
    who = {"host": "h", "schema": 1}
    write(
        folder / "driver.json",
        driver,
        rank=None,
        baseTimeNanoseconds=10**18,
        tracetools={**who, "role": "driver", "pid": 1},
    )
    for rank, events in enumerate(workers):
        says = {**who, "role": "policy", "rank": rank, "world_size": len(workers), "pid": 2 + rank}
        write(folder / f"worker{rank}.json", events, rank=None, baseTimeNanoseconds=10**18, tracetools=says)
    return folder


def test_a_worker_between_its_methods_is_charged_to_what_its_driver_did(tmp_path: Path) -> None:
    driver = [
        x("tracetools.step#7", "user_annotation", 0, 100, pid=1, tid=1),
        *(
            x(name, "user_annotation", ts, dur, pid=1, tid=1)
            for name, ts, dur in (("data_processing", 5, 30), ("ray_submit", 35, 5), ("ray_wait", 40, 50))
        ),
    ]

    def worker(start: float, end: float, pid: int) -> list[Event]:
        marker = x("tracetools.step#7", "user_annotation", start, end - start, pid=pid, tid=pid)
        return [marker, x("aten::mm", "cpu_op", start + 2, end - start - 5, pid=pid, tid=pid)]

    # worker 0 is in its method 45-60, worker 1 in 50-80
    run = load_run(ray_run(tmp_path, driver, [worker(45, 60, 2), worker(50, 80, 3)]))
    first, second = (p for p in analyze(run).processes if p.role == "policy")

    def by_process(s: StepBreakdown) -> dict[tuple[str | None, str | None, str], float]:
        return {(c.process, c.region, c.kind): c.ns / 1000 for c in s.causes}

    shared: dict[tuple[str | None, str | None, str], float] = {
        ("driver", "data_processing", "host"): 30,
        ("driver", "ray_submit", "host"): 5,
        ("driver", None, "host"): 15,  # 0-5 and 90-100: the driver is in its step and in no region
    }
    assert first.steps[0].wall_ns == second.steps[0].wall_ns == 100_000
    assert by_process(first.steps[0]) == {
        **shared,
        ("policy", None, "host"): 5,  # in its method, between operators: 45-47, 57-60
        ("driver", "ray_wait", "ray_transport"): 15,  # 40-45 and 80-90: nobody is in a method
        ("driver", "ray_wait", "host"): 20,  # 60-80: the driver waits for worker 1
    }
    assert by_process(second.steps[0]) == {
        **shared,
        ("policy", None, "host"): 5,
        ("driver", "ray_wait", "ray_transport"): 20,  # 40-50: its own call is on its way, whatever worker 0 does; 80-90
    }


@pytest.mark.parametrize("times", [1, 1000])
def test_parts_and_causes_close_at_any_scale(tmp_path: Path, times: int) -> None:
    events = [step(i, 33.333 * i, 30.001) for i in range(5)]
    for i in range(40 * times):
        ts = round(i * 4.111 / times, 3)
        events += [
            launch(ts, i + 1, 0.5),
            kernel("k", round(ts + 1.234, 3), round(2.003 / times, 3), i + 1, stream=7 + i % 3),
        ]
    for s in broken_down(tmp_path, events).steps:
        assert s.compute_ns + s.exposed_comm_ns + s.exposed_memory_ns + s.idle_ns == s.wall_ns
        assert sum(c.ns for c in s.causes) == s.idle_ns


assert (HOST, MAIN) == (1000, 100)  # the ids that the worked examples above assume
