"""The product's accounting against the instant-by-instant oracle, on small random traces and on tiny named ones.

Every random trace holds what real ones hold and what makes accounting hard: several streams, overlapping kernels,
annotations that nest and bleed, an autograd thread without regions, synchronising calls, graph launches with many
kernels, repeated and zero correlation ids, kernels that start before their launch, unlinked heads.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import MAIN, Event, kernel, launch, memcpy, op, region, step, write, x
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Account, Cause, account

from tracetools.analysis import analyze
from tracetools.load import load_run
from tracetools.model import ProcessBreakdown, StepBreakdown

EPOCH = 1000  # us: the first marker starts here; time 0 is left alone
AUTOGRAD, GLOO, LOADER = 101, 102, 103
US = 1000  # ns

BOUNDED = settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
lengths = st.integers(0, 14)
threads = st.sampled_from([MAIN, MAIN, AUTOGRAD])


# ---------------------------------------------------------------- random traces
@st.composite
def markers(draw: st.DrawFn) -> list[Event]:
    """One to three ProfilerSteps, in order, with room between them."""
    marks, at = [], EPOCH
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.integers(5, 40))
        marks.append(step(number, at, length))
        at += length + draw(st.integers(0, 12))
    return marks


@st.composite
def named_spans(draw: st.DrawFn, last: int) -> list[Event]:
    """Named spans anywhere on two threads: they nest, touch and bleed over each other's ends."""
    names = [
        "forward_step",
        "load",
        "Optimizer.step#SGD.step",
        "enumerate(DataLoader)#it",
        "my own name",
        "nccl:all_reduce",
    ]
    made = [
        region(draw(st.sampled_from(names)), at, draw(lengths), tid=tid)
        for at, tid in draw(st.lists(st.tuples(st.integers(EPOCH, last), threads), max_size=5))
    ]
    nodes = draw(st.lists(st.integers(EPOCH, last), max_size=2))
    made += [op("autograd::engine::evaluate_function: MulBackward0", at, draw(lengths), tid=AUTOGRAD) for at in nodes]
    return made


@st.composite
def device_events(draw: st.DrawFn, last: int) -> list[Event]:
    """Launches and the work they put on two streams: none (a lost record), one or many (a graph), early, late, double."""
    names = ["gemm", "gemm", "ncclDevKernel_AllReduce", "memcpy"]
    works, made = [], []

    def work(at: int, correlation: int) -> Event:
        what, stream = draw(st.sampled_from(names)), draw(st.sampled_from([7, 7, 20]))
        length = draw(st.integers(1, 14))
        if what == "memcpy":
            return memcpy(at, length, correlation, stream=stream)
        return kernel(what, at, length, correlation, stream=stream)

    for number, at in enumerate(sorted(draw(st.sets(st.integers(EPOCH, last), max_size=8))), 1):
        correlation = draw(st.sampled_from([number, number, number, number, 90]))  # 90: an id that is used again
        kernels = draw(st.sampled_from([1, 1, 1, 1, 2, 4, 0]))
        made.append(
            launch(at, correlation, 1, tid=draw(threads), name="cudaGraphLaunch" if kernels > 1 else "cudaLaunchKernel")
        )
        begin = at + draw(st.integers(-3, 20))
        for _ in range(kernels):
            works.append(work(begin, correlation))
            begin += draw(st.integers(0, 16))
    called = {call["args"]["correlation"] for call in made}
    linked = sorted({w["args"]["stream"] for w in works if w["args"]["correlation"] in called})
    for at in draw(st.lists(st.integers(EPOCH - 8, EPOCH + 30), max_size=2)) if linked else ():
        stream, correlation = (
            draw(st.sampled_from(linked)),
            draw(st.sampled_from([0, 77])),
        )  # 77: its launch is not in the trace
        works.append(kernel("gemm", at, draw(st.integers(1, 14)), correlation, stream=stream))
    if not linked:  # a trace without any device work, or without any link, is another matter
        made.append(launch(EPOCH + 1, 50))
        works.append(kernel("gemm", EPOCH + 3, 4, 50))
    return made + works


@st.composite
def noise(draw: st.DrawFn, last: int) -> list[Event]:
    """Calls that wait, the profiler's own work, and events that must change nothing."""
    made: list[Event] = []
    for at in draw(st.lists(st.integers(EPOCH, last), max_size=3)):
        length, thread = draw(lengths), draw(threads)
        made.append(
            draw(
                st.sampled_from(
                    [
                        x("cudaStreamSynchronize", "cuda_runtime", at, length, tid=thread),
                        x("cudaDeviceSynchronize", "cuda_runtime", at, length, tid=thread),
                        x("Activity Buffer Request", "overhead", at, length, pid=-1, tid=0),
                        x("Stream Wait Event", "cuda_sync", at, length, pid=0, tid=7, device=0, stream=7),
                        x("Stream Sync", "cuda_sync", at, length, pid=0, tid=7, device=0, stream=7),
                        x("ProfilerStep#0", "gpu_user_annotation", at, length, pid=0, tid=7),
                        x("train.py(3): loop", "python_function", at, length),
                        op("aten::mul", at, length, tid=thread),
                    ]
                )
            )
        )
    return made


@st.composite
def device_traces(draw: st.DrawFn) -> list[Event]:
    marks = draw(markers())
    last = int(marks[-1]["ts"] + marks[-1]["dur"]) + 4
    parts = marks + draw(named_spans(last)) + draw(device_events(last)) + draw(noise(last))
    if draw(st.booleans()):  # files are not sorted
        return draw(st.permutations(parts))
    return parts


@st.composite
def host_traces(draw: st.DrawFn) -> list[Event]:
    """No device: operators on a training thread and its autograd thread, c10d calls, gloo's own thread, a loader."""
    marks = draw(markers())
    last = int(marks[-1]["ts"] + marks[-1]["dur"]) + 4
    names = ["aten::mm", "aten::add", "c10d::allreduce_", "autograd::engine::evaluate_function: AddBackward0"]
    ops = [
        op(draw(st.sampled_from(names)), at, draw(lengths), tid=tid)
        for at, tid in draw(st.lists(st.tuples(st.integers(EPOCH, last), threads), max_size=8))
    ]
    gloo = [
        region("gloo:all_reduce", at, draw(lengths), tid=GLOO)
        for at in draw(st.lists(st.integers(EPOCH, last), max_size=3))
    ]
    stray: bool = draw(st.booleans())
    if gloo and stray:
        ops.append(op("aten::copy_", draw(st.integers(EPOCH, last)), draw(lengths), tid=GLOO))
    return [*marks, *draw(named_spans(last)), *draw(noise(last)), *ops, *gloo, op("aten::mm", EPOCH, 1)]


# ---------------------------------------------------------------- comparison
def product(tmp_path: Path, events: list[Event]) -> tuple[ProcessBreakdown, int]:
    """The product's answer, and the file's time (ns) at which its clock starts."""
    run = load_run(write(tmp_path / "trace.json", events))
    return analyze(run).processes[0], run.origin_ns


def causes_of(found: StepBreakdown) -> Counter[Cause]:
    out: Counter[Cause] = Counter()
    for cause in found.causes:
        out[cause.region, cause.kind] += cause.ns
    return out


def in_ns(causes: Counter[Cause]) -> dict[Cause, int]:
    return {cause: us * US for cause, us in causes.items()}


def compare(tmp_path: Path, events: list[Event]) -> tuple[ProcessBreakdown, Account]:
    truth = account(events)
    found, origin = product(tmp_path, events)
    assert [s.name for s in found.steps] == [s.name for s in truth.steps]
    for mine, step_ in zip(truth.steps, found.steps, strict=True):
        got: dict[str, Any] = {
            "start": step_.start_ns + origin,
            "wall": step_.wall_ns,
            "compute": step_.compute_ns,
            "comm": step_.exposed_comm_ns,
            "memory": step_.exposed_memory_ns,
            "idle": step_.idle_ns,
            "all comm": step_.comm_ns,
            "kernels": step_.kernels,
            "causes": causes_of(step_),
        }
        want: dict[str, Any] = {
            "start": mine.start * US,
            "wall": mine.wall * US,
            **{part: mine.parts[part] * US for part in ("compute", "comm", "memory", "idle")},
            "all comm": mine.comm * US,
            "kernels": mine.kernels,
            "causes": in_ns(mine.causes),
        }
        assert got == want, mine.name
    return found, truth


@BOUNDED
@given(events=device_traces())
def test_device_accounting(tmp_path: Path, events: list[Event]) -> None:
    found, truth = compare(tmp_path, events)
    assert (found.coverage.linked_ns, found.coverage.unlinked_ns) == (truth.linked * US, truth.unlinked * US)
    closes(found)


@BOUNDED
@given(events=host_traces())
def test_cpu_only_accounting(tmp_path: Path, events: list[Event]) -> None:
    found, _ = compare(tmp_path, events)
    assert found.device == "cpu"
    closes(found)


def closes(found: ProcessBreakdown) -> None:
    """What must hold for every trace, whatever is in it."""
    ends = [s.start_ns + s.wall_ns for s in found.steps]
    assert [s.start_ns for s in found.steps[1:]] == ends[
        :-1
    ]  # steps follow each other, nothing between them is dropped
    for s in found.steps:
        assert s.compute_ns + s.exposed_comm_ns + s.exposed_memory_ns + s.idle_ns == s.wall_ns
        assert sum(c.ns for c in s.causes) == s.idle_ns
        assert s.comm_ns == s.exposed_comm_ns + s.overlapped_comm_ns
        assert min(s.compute_ns, s.exposed_comm_ns, s.exposed_memory_ns, s.idle_ns, s.overlapped_comm_ns) >= 0
        assert all(c.ns > 0 for c in s.causes)
    span = found.device_span
    if span is not None:
        within = sum(s.compute_ns + s.exposed_comm_ns + s.exposed_memory_ns for s in found.steps)
        assert within + found.coverage.outside_steps_ns == span.busy_ns  # no device time is lost
        assert span.compute_ns + span.exposed_comm_ns + span.exposed_memory_ns + span.idle_ns == span.span_ns


# ---------------------------------------------------------------- named traces, times from 0 (moved to EPOCH)
def later(*events: Event) -> list[Event]:
    return [{**e, "ts": e["ts"] + EPOCH} for e in events]


def causes(found: StepBreakdown) -> dict[Cause, int]:
    return {cause: ns // US for cause, ns in causes_of(found).items()}


def test_backlog_stays_with_the_step_that_launched_it(tmp_path: Path) -> None:
    # k1 is launched at 15 in step 0 and ends at 50: step 1 (marker at 20) begins on the device at 50.
    # Step 0: wall 50, k0 10-16 (launched at 8), idle 0-10 and 16-20; step 1: its end is that of k2, 70.
    events = later(
        step(0, 0, 20), step(1, 20, 30),
        launch(8, 1), launch(15, 2), launch(45, 3),
        kernel("gemm", 10, 6, 1), kernel("gemm", 20, 30, 2), kernel("gemm", 55, 15, 3),
    )  # fmt: skip
    found, _ = compare(tmp_path, events)
    assert [(s.wall_ns // US, s.compute_ns // US) for s in found.steps] == [(50, 36), (20, 15)]
    # Until k0's launch at 8 the host was busy elsewhere; 8-10 is k0's latency; k1's launch at 15 came before 16: latency.
    assert causes(found.steps[0]) == {(None, "host"): 8, (None, "launch_latency"): 6}
    # The step on the device begins at 50, k2 was launched at 45.
    assert causes(found.steps[1]) == {(None, "launch_latency"): 5}


def test_every_kind_of_cause(tmp_path: Path) -> None:
    # One gap 10-90 before a kernel launched at 80 on the autograd thread:
    # 10-20 forward (main thread, the autograd thread is silent), 20-30 a wait of the autograd thread inside `hook`,
    # 30-50 hook, 50-60 the profiler, 60-80 nothing, 80-90 launch latency.
    events = later(
        step(0, 0, 100),
        launch(1, 1), kernel("gemm", 2, 8, 1),
        region("forward_step", 0, 20),
        region("hook", 20, 30, tid=AUTOGRAD), x("cudaStreamSynchronize", "cuda_runtime", 20, 10, tid=AUTOGRAD),
        x("Activity Buffer Request", "overhead", 50, 10, pid=-1, tid=0),
        launch(80, 2, tid=AUTOGRAD), kernel("gemm", 90, 10, 2),
    )  # fmt: skip
    found, _ = compare(tmp_path, events)
    assert causes(found.steps[0]) == {
        ("forward", "host"): 11,  # 0-1 before the first launch, 10-20
        ("forward", "launch_latency"): 1,  # 1-2
        ("hook", "sync"): 10,
        ("hook", "host"): 20,
        (None, "profiler_overhead"): 10,
        (None, "host"): 20,
        (None, "launch_latency"): 10,
    }


def test_a_gap_that_the_last_step_cuts_still_belongs_to_the_kernel_after_it(tmp_path: Path) -> None:
    # k2 runs after the last step, launched at 60 by the autograd thread, which was in `hook` from 20 on: so 20-50 is hook's.
    events = later(
        step(0, 0, 50),
        launch(0, 1), kernel("gemm", 0, 10, 1),
        region("hook", 20, 45, tid=AUTOGRAD), launch(60, 2, tid=AUTOGRAD), kernel("gemm", 70, 5, 2),
    )  # fmt: skip
    found, _ = compare(tmp_path, events)
    assert causes(found.steps[0]) == {(None, "host"): 10, ("hook", "host"): 30}


def test_a_thread_of_nothing_but_collectives_communicates(tmp_path: Path) -> None:
    # 0-5 aten::mm on the main thread; 10-30 c10d::allreduce_ on a thread that runs nothing else.
    events = later(step(0, 0, 40), op("aten::mm", 0, 5), op("c10d::allreduce_", 10, 20, tid=AUTOGRAD))
    found, _ = compare(tmp_path, events)
    s = found.steps[0]
    assert (s.compute_ns // US, s.exposed_comm_ns // US, s.idle_ns // US) == (5, 20, 15)


def test_profiler_overhead_is_known_whatever_ends_the_gap(tmp_path: Path) -> None:
    # 10-40 idle before a kernel without a launch, 15-35 of it the profiler's own buffer request: unknown is what is left, 10.
    events = later(
        step(0, 0, 50), launch(0, 1), kernel("gemm", 0, 10, 1),
        x("Activity Buffer Request", "overhead", 15, 20, pid=-1, tid=0), kernel("gemm", 40, 10),
    )  # fmt: skip
    want = {(None, "profiler_overhead"): 20, (None, "unknown"): 10}
    assert {c: us for c, us in account(events).steps[0].causes.items() if c != (None, "host")} == want
    found = causes(product(tmp_path, events)[0].steps[0])
    assert {c: us for c, us in found.items() if c != (None, "host")} == want


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_steps_that_a_backlog_swallows_have_no_ratio(tmp_path: Path) -> None:
    # One kernel launched in step 0 runs to 300: steps 1 and 2 (markers at 100, 200) have no wall left.
    events = later(step(0, 0, 100), step(1, 100, 100), step(2, 200, 100), launch(5, 1), kernel("gemm", 10, 290, 1))
    found, _ = compare(tmp_path, events)
    assert [s.wall_ns // US for s in found.steps] == [300, 0, 0]


def test_an_id_used_twice_pairs_in_time_order(tmp_path: Path) -> None:
    # id 9 is called at 5 and at 15, its kernels run at 20 and 40: the first call owns the first, though both came before it.
    # 0-5 host; 5-20 latency; 25-40 latency of the second, called at 15.
    events = later(
        step(0, 0, 50), launch(5, 9), launch(15, 9), kernel("gemm", 20, 5, 9), kernel("gemm", 40, 10, 9),
    )  # fmt: skip
    found, _ = compare(tmp_path, events)
    assert causes(found.steps[0]) == {(None, "host"): 5, (None, "launch_latency"): 30}


def test_of_work_that_begins_together_a_linked_one_speaks_for_the_gap(tmp_path: Path) -> None:
    # At 20 two kernels begin; the longer one has no launch, the other was launched at 15.
    events = later(
        step(0, 0, 40), launch(0, 1), kernel("gemm", 0, 10, 1), launch(15, 2),
        kernel("gemm", 20, 20, 0), kernel("gemm", 20, 10, 2, stream=20),
    )  # fmt: skip
    found, _ = compare(tmp_path, events)
    assert causes(found.steps[0]) == {(None, "host"): 5, (None, "launch_latency"): 5}


# ---------------------------------------------------------------- once the product and the rules differed here


def test_kernels_are_counted_in_the_step_that_launched_them(tmp_path: Path) -> None:
    # Stream 7 works off step 0's long kernel until 60; step 1's kernel on stream 20 runs meanwhile, at 45.
    # On the device step 1 begins at 60, but both of its kernels were launched in it: 1 and 2 kernels, not 2 and 1.
    events = later(
        step(0, 0, 40), step(1, 40, 50),
        launch(5, 1), launch(42, 2), launch(80, 3),
        kernel("gemm", 10, 50, 1), kernel("gemm", 45, 5, 2, stream=20), kernel("gemm", 85, 5, 3),
    )  # fmt: skip
    truth = account(events)
    assert [s.kernels for s in truth.steps] == [1, 2]
    assert [s.kernels for s in product(tmp_path, events)[0].steps] == [1, 2]


@pytest.mark.parametrize("kind", ["sync", "launch_latency"])
def test_all_that_lies_between_markers_is_between_steps(tmp_path: Path, kind: str) -> None:
    # Markers 0-20 and 40-60. 20-40 idle: inside cudaStreamSynchronize (loss.item() for the log), or after the launch at 20.
    call = x("cudaStreamSynchronize", "cuda_runtime", 20, 20) if kind == "sync" else launch(20, 2)
    end = [launch(40, 2)] if kind == "sync" else []
    events = later(
        step(0, 0, 20), step(1, 40, 20), launch(0, 1), kernel("gemm", 0, 20, 1), call, *end, kernel("gemm", 40, 20, 2)
    )
    assert dict(account(events).steps[0].causes) == {("between_steps", kind): 20}
    assert causes(product(tmp_path, events)[0].steps[0]) == {("between_steps", kind): 20}


def test_after_the_last_marker_nothing_lies_between_steps(tmp_path: Path) -> None:
    # k1, launched at 5 in step 0, ends at 60. On stream 20 k2, launched at 30 after the marker's end, runs 40-45.
    # 20-30 is host time, 30-40 k2's latency, 45-55 k1's.
    events = later(
        step(0, 0, 20), launch(0, 1), kernel("gemm", 0, 20, 1), launch(5, 2), kernel("gemm", 55, 5, 2),
        launch(30, 3), kernel("gemm", 40, 5, 3, stream=20),
    )  # fmt: skip
    assert dict(account(events).steps[0].causes) == {(None, "host"): 10, (None, "launch_latency"): 20}
    assert causes(product(tmp_path, events)[0].steps[0]) == {(None, "host"): 10, (None, "launch_latency"): 20}


def test_a_stream_without_any_launch_moves_no_boundary(tmp_path: Path) -> None:
    # RCCL's kernels carry correlation 0 and run on a stream of their own in each of three steps of 100 us.
    events = later(*(
        e for i, at in enumerate((0, 100, 200), 1)
        for e in (step(i, at, 100), launch(at + 5, i), kernel("gemm", at + 10, 40, i), kernel("ncclDevKernel", at + 60, 20, stream=20))
    ))  # fmt: skip
    assert [s.wall for s in account(events).steps] == [100, 100, 100]
    assert [s.wall_ns // US for s in product(tmp_path, events)[0].steps] == [100, 100, 100]


def test_a_lost_launch_just_before_a_gap_makes_it_doubtful(tmp_path: Path) -> None:
    # The graph of launch 2 was not recorded. It was called at 8, while k1 still ran (0-10): its kernels ran in the gap
    # 10-100, in front of k3 on the same stream. Charging 92 us to the host as a fact is wrong.
    events = later(
        step(0, 0, 110), launch(0, 1), kernel("gemm", 0, 10, 1), launch(8, 2, name="cudaGraphLaunch"),
        launch(95, 3), kernel("gemm", 100, 10, 3),
    )  # fmt: skip
    assert causes(product(tmp_path, events)[0].steps[0]).get(("unrecorded_launch", "unknown")) == 90


def test_an_autograd_thread_that_calls_nccl_still_computes(tmp_path: Path) -> None:
    # A GPU job recorded without its device: DDP's hook calls the collective (20-22) on the autograd thread, which computes 5-20.
    events = later(
        step(0, 0, 40),
        op("aten::mm", 0, 5),
        op("aten::mm", 5, 15, tid=AUTOGRAD),
        region("nccl:all_reduce", 20, 2, tid=AUTOGRAD),
    )
    assert account(events).steps[0].parts["compute"] == 20
    assert product(tmp_path, events)[0].steps[0].compute_ns == 20 * US


def test_calls_nested_in_one_launch_are_one_launch(tmp_path: Path) -> None:
    # cudaGraphLaunch 0-50 makes two driver calls that carry its id, at 10 and 30; its kernel runs at 60, launched at 0 in `replay`.
    events = later(
        step(0, 0, 80), region("replay", 0, 25),
        launch(0, 1, 50, name="cudaGraphLaunch"), launch(10, 1, 5, name="cuLaunchKernel"), launch(30, 1, 5, name="cuLaunchKernel"),
        kernel("gemm", 60, 10, 1),
    )  # fmt: skip
    assert causes(product(tmp_path, events)[0].steps[0]) == {
        ("replay", "launch_latency"): 60, (None, "host"): 10,
    }  # fmt: skip
