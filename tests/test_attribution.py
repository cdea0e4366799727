"""What each region of the host's code cost, and which calls wait for the device: tiny traces, times in microseconds."""

from __future__ import annotations

from pathlib import Path

from builders import Event, kernel, launch, memcpy, op, region, step, write, x

from tracetools.analysis import analyze
from tracetools.load import load_run
from tracetools.model import ProcessBreakdown, RegionUse, SyncSite

AUTOGRAD, GLOO = 101, 102


def one(tmp_path: Path, events: list[Event]) -> ProcessBreakdown:
    return analyze(load_run(write(tmp_path / "t.json", events))).processes[0]


def use(p: ProcessBreakdown) -> dict[str | None, RegionUse]:
    return {r.region: r for r in p.regions}


def test_device_work_belongs_to_the_region_that_launched_it_wherever_it_runs(tmp_path: Path) -> None:
    # k1 is launched in forward (0-10) and runs 5-25, while the host is in `optimizer` (20-40) already; the copy is optimizer's.
    # The autograd thread is in no region at 12: the marker's thread speaks for it, and it is in `loss` (10-20).
    events = [
        step(0, 0, 60), region("forward_step", 0, 10), region("loss", 10, 10), region("optimizer", 20, 20),
        launch(2, 1), kernel("gemm", 5, 20, 1),
        launch(12, 2, tid=AUTOGRAD), kernel("ncclDevKernel_AllReduce", 15, 15, 2, stream=20),
        launch(22, 3), memcpy(30, 4, 3),
    ]  # fmt: skip
    found = use(one(tmp_path, events))

    # idle: 0-2 before the first launch (host), 2-5 its latency: both forward's; 34-40 is optimizer's, 40-60 nobody's.
    assert found == {
        "forward": RegionUse("forward", 1, 20_000, 0, 0, 5_000, 5_000, 0),
        "loss": RegionUse("loss", 1, 0, 15_000, 0, 0, 0, 0),
        "optimizer": RegionUse("optimizer", 0, 0, 0, 4_000, 6_000, 6_000, 0),
        None: RegionUse(None, 0, 0, 0, 0, 20_000, 20_000, 0),
    }


def test_work_outside_the_steps_is_in_no_region(tmp_path: Path) -> None:
    # k2 is launched after the only step has ended.
    events = [step(0, 0, 20), launch(0, 1), kernel("gemm", 0, 20, 1), region("late", 30, 10), launch(32, 2),
              kernel("gemm", 35, 5, 2)]  # fmt: skip
    assert use(one(tmp_path, events)) == {None: RegionUse(None, 1, 20_000, 0, 0, 0, 0, 0)}


def test_without_a_device_operators_count_for_the_region_of_their_thread(tmp_path: Path) -> None:
    # forward 0-20 on the main thread: aten::mm 2-12. The autograd thread's aten::mm 22-30 lies in no region of its own: the
    # main thread is in `loss`. gloo's copy 31-33 is part of the collective it serves.
    events = [
        step(0, 0, 40), region("forward_step", 0, 20), region("loss", 20, 20),
        op("aten::mm", 2, 10), op("aten::mm", 22, 8, tid=AUTOGRAD), op("c10d::allreduce_", 30, 5),
        region("gloo:all_reduce", 31, 2, tid=GLOO), op("aten::copy_", 31, 2, tid=GLOO),
    ]  # fmt: skip
    found = use(one(tmp_path, events))

    assert found["forward"] == RegionUse("forward", 0, 10_000, 0, 0, 10_000, 10_000, 0)  # idle 0-2 and 12-20
    assert (found["loss"].compute_ns, found["loss"].comm_ns) == (8_000, 0)
    assert found["collective"].comm_ns == 5_000  # c10d::* is a region by the profile


def test_the_outermost_call_that_waits_and_what_is_around_it(tmp_path: Path) -> None:
    # k1 runs 0-10, k2 is launched at 60. Idle 10-60, of it: `.item()` 20-40 (it holds a cudaStreamSynchronize 25-35) inside
    # aten::is_nonzero 18-42 inside `loss`; cudaFree 45-50 in no operator. Frames: train.py's line 3 is the user's own.
    events = [
        step(0, 0, 70), launch(0, 1), kernel("gemm", 0, 10, 1), region("loss", 15, 28),
        x("train.py(3): train", "python_function", 0, 70), x("torch/_tensor.py(9): item", "python_function", 17, 26),
        op("aten::is_nonzero", 18, 24), op("aten::item", 20, 20), op("aten::_local_scalar_dense", 22, 16),
        x("cudaStreamSynchronize", "cuda_runtime", 25, 10),
        x("cudaFree", "cuda_runtime", 45, 5), launch(60, 2), kernel("gemm", 60, 10, 2),
    ]  # fmt: skip
    found = one(tmp_path, events)

    assert found.synchronisations == (
        SyncSite("aten::item", "aten::is_nonzero", "loss", "train.py(3): train", 1, 20_000),
        SyncSite("cudaFree", None, None, "train.py(3): train", 1, 5_000),
    )
    assert sum(r.sync_ns for r in found.regions) == 25_000


def test_calls_of_one_place_are_counted_and_added_up(tmp_path: Path) -> None:
    # Two waits of one place, 10-20 and 30-40; one that causes no idle time (the device works 40-60).
    sync = [x("cudaDeviceSynchronize", "cuda_runtime", at, 10) for at in (10, 30, 45)]
    events = [step(0, 0, 60), launch(0, 1), kernel("gemm", 0, 10, 1), *sync, launch(40, 2), kernel("gemm", 40, 20, 2)]
    assert one(tmp_path, events).synchronisations == (SyncSite("cudaDeviceSynchronize", None, None, None, 2, 20_000),)


def test_real_traces_regions_and_places_sum_to_the_idle_time(corpus: Path) -> None:
    """All idle time that no other process caused is some region's; all of kind sync has a place."""
    for source in sorted((corpus / "traces").glob("*critical_path*")):
        for p in analyze(load_run(source)).processes:
            causes = [c for s in p.steps for c in s.causes if c.process != "driver"]
            assert sum(r.idle_ns for r in p.regions) == sum(c.ns for c in causes)
            assert sum(s.idle_ns for s in p.synchronisations) == sum(c.ns for c in causes if c.kind == "sync") > 0
