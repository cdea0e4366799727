"""The optional corpus through the Python API: tricky cases with hand-worked answers, and real traces re-read independently.

Skips without a corpus (see conftest). Cases are worked in whole microseconds, the answers of the product are nanoseconds.
A real trace's truth is derived here from its raw text: Decimal times, plain lists, nothing of tracetools.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import corpus_root

from tracetools.analysis import analyze, compare
from tracetools.classify import classify
from tracetools.errors import TracetoolsError
from tracetools.load import load_run
from tracetools.model import ProcessBreakdown, RunBreakdown, StepBreakdown
from tracetools.stackprofile import load_profile

ROOT = corpus_root()
US = 1000  # ns
Pair = tuple[int, int]


def answers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "cases" / name).read_text()) if ROOT else {}
    return found


def traces() -> list[str]:
    """Real traces in Kineto's format (rocprof, execution graphs, a Ray timeline and an accelerator's own format are not)."""
    other = re.compile(r"rocprof|eg\.rank|ray-local|aiu")
    files = sorted(f.name for f in (ROOT / "traces").iterdir()) if ROOT else []
    return [f for f in files if f.endswith((".json", ".json.gz")) and not other.search(f)]


def one(path: Path) -> ProcessBreakdown:
    (process,) = analyze(load_run(path)).processes
    return process


def case(corpus: Path, name: str) -> ProcessBreakdown:
    return one(corpus / "cases" / name)


def causes(step: StepBreakdown) -> dict[tuple[str | None, str], float]:
    """us by (region, kind)."""
    assert len({(c.region, c.kind) for c in step.causes}) == len(step.causes)
    return {(c.region, c.kind): c.ns / US for c in step.causes}


def kinds(process: ProcessBreakdown | RunBreakdown) -> dict[str, int]:
    return {p.kind: p.count for p in process.problems}


def closes(process: ProcessBreakdown) -> None:
    for s in process.steps:
        assert s.compute_ns + s.exposed_comm_ns + s.exposed_memory_ns + s.idle_ns == s.wall_ns
        assert sum(c.ns for c in s.causes) == s.idle_ns
        assert s.comm_ns == s.exposed_comm_ns + s.overlapped_comm_ns
        assert min(s.compute_ns, s.exposed_comm_ns, s.exposed_memory_ns, s.idle_ns, s.overlapped_comm_ns) >= 0


# ---------------------------------------------------------------- every case's numbers
KEYS = {
    "compute": "compute_ns",
    "comm": "comm_ns",
    "comm_exposed": "exposed_comm_ns",
    "busy": "busy_ns",
    "gpu_span": "span_ns",
    "idle": "idle_ns",
}


def differences(process: ProcessBreakdown, want: dict[str, float]) -> dict[str, tuple[Any, int]]:
    """{key: (found, expected)} in ns where they differ."""
    span = process.device_span
    pairs = {k: (getattr(span, KEYS[k], None), round(v * US)) for k, v in want.items() if k in KEYS}
    return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("name", answers("expected.json"))
def test_case(corpus: Path, name: str) -> None:
    want = answers("expected.json")[name]
    process = case(corpus, name)

    assert differences(process, want) == {}
    span = process.device_span
    assert span is not None
    rejected = kinds(process).get("negative_duration", 0)  # case 14 counts its one backward kernel as seen
    assert span.kernels + rejected == want["kernels"]
    closes(process)


@pytest.mark.parametrize("name", answers("special.json"))
def test_broken_case(corpus: Path, name: str) -> None:
    rule = answers("special.json")[name]
    try:
        process = case(corpus, name)
    except TracetoolsError as error:
        assert rule["may_refuse"] and name in str(error)
        return
    assert any(not differences(process, want) for want in rule["answers"])
    assert process.problems or not rule["problem"]  # a repair is told
    closes(process)


# ---------------------------------------------------------------- the answers that cases/README.md gives in words
def test_14_backward_durations_are_counted_and_never_subtracted(corpus: Path) -> None:
    process = case(corpus, "14_negative_dur.json")
    assert (kinds(process)["unfinished"], kinds(process)["negative_duration"]) == (1, 1)


def test_16_begin_and_end_events(corpus: Path) -> None:
    # one E without B; one B that never ends, extended to its thread's last time
    found = kinds(case(corpus, "16_begin_end.json"))
    assert (found["end_without_begin"], found["unfinished"]) == (1, 1)
    ev = load_run(corpus / "cases" / "16_begin_end.json").processes[0].trace
    lasted = {
        ev.names[n]: int(e - s) // US for n, s, e in zip(ev.events.name, ev.events.start, ev.events.end, strict=True)
    }
    assert lasted == {"outer": 100, "inner": 20, "leaf": 10, "other": 20, "open": 15}


def test_17_the_same_rank_twice(corpus: Path, tmp_path: Path) -> None:
    for letter in "ab":
        shutil.copy(corpus / "cases" / f"17_dup_rank.{letter}.json", tmp_path)
    run = analyze(load_run(tmp_path))
    assert [(p.rank, p.world_size) for p in run.processes] == [(0, 2), (0, 2)]
    assert [p.device_span.busy_ns // US for p in run.processes if p.device_span] == [40, 70]
    said = {p.kind: p.detail for p in run.problems}
    assert "17_dup_rank.a.json" in said["duplicate_rank"] and "17_dup_rank.b.json" in said["duplicate_rank"]
    assert "1" in said["missing_rank"]


def test_18_ranks_from_file_names_in_order_of_number(corpus: Path, tmp_path: Path) -> None:
    for rank in (11, 3):
        shutil.copy(corpus / "cases" / f"18_no_distinfo_rank-{rank}.json", tmp_path)
    run = analyze(load_run(tmp_path))
    assert [(p.rank, p.world_size, p.device_span and p.device_span.busy_ns // US) for p in run.processes] == [
        (3, None, 30),
        (11, None, 110),
    ]
    assert all("no_world_size" in kinds(p) for p in run.processes)


def test_22_work_belongs_to_the_step_that_launched_it(corpus: Path) -> None:
    # k1 + k2 = 90 in step 1, which ends with k2 at 130; k3 = 80 in step 2, to 230
    steps = case(corpus, "22_step_async.json").steps
    assert [(s.compute_ns // US, s.wall_ns // US) for s in steps] == [(90, 130), (80, 100)]


def test_24_every_step_under_its_own_number(corpus: Path) -> None:
    steps = case(corpus, "24_last_step.json").steps
    assert [(s.name, s.number) for s in steps] == [(f"ProfilerStep#{n}", n) for n in (5, 6, 7)]
    assert [(s.compute_ns // US, s.idle_ns // US) for s in steps] == [(60, 40), (70, 30), (80, 20)]


def test_25_the_warm_up_step_is_pointed_out(corpus: Path) -> None:
    process = case(corpus, "25_warmup_step.json")
    assert [s.idle_ns // US for s in process.steps] == [940, 20, 20, 20]
    assert next(p.detail for p in process.problems if p.kind == "outlier_step").startswith("ProfilerStep#0 ")


def test_26_a_kernel_before_its_launch(corpus: Path) -> None:
    process = case(corpus, "26_clock_skew.json")
    assert causes(process.steps[0]) == {("fwd", "host"): 5, ("bwd", "host"): 7}
    assert process.coverage.unlinked_ns == 0
    assert "3000 ns" in next(p.detail for p in process.problems if p.kind == "clock_skew")


def test_28_correlation_zero_is_none(corpus: Path) -> None:
    process = case(corpus, "28_corr_zero.json")
    assert (process.coverage.linked_ns // US, process.coverage.unlinked_ns // US) == (20, 30)
    assert kinds(process)["unlinked"] == 3


def test_29_one_graph_launch_owns_five_kernels(corpus: Path) -> None:
    process = case(corpus, "29_cuda_graph.json")
    assert (process.coverage.linked_ns // US, process.coverage.unlinked_ns) == (60, 0)
    # 4 gaps of 2 inside the graph are latency; of 78-210 the host's part ends with launch 9 at 200
    # the graph's own gaps are those of the region that launched it
    assert causes(process.steps[0]) == {
        (None, "host"): 122,
        ("graph_replay", "launch_latency"): 8,
        (None, "launch_latency"): 10,
    }


def test_30_lost_graph_replays_make_idle_an_upper_bound(corpus: Path) -> None:
    process = case(corpus, "30_graph_under_recorded.json")
    assert kinds(process)["graph_not_recorded"] == 3
    # 110-410 follows the lost launches: unknown, not the host's
    assert causes(process.steps[0]) == {("unrecorded_launch", "unknown"): 300, (None, "host"): 10}


def test_32_the_gpu_twin_of_a_step_is_no_step(corpus: Path) -> None:
    assert len(case(corpus, "32_gpu_user_annotation.json").steps) == 1


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the host's wait is unknown where the kernel after it has no launch"
)
def test_33_thirty_of_the_idle_microseconds_are_a_wait(corpus: Path) -> None:
    # cudaStreamSynchronize 12-42, inside the gap 10-45; aten::item around it (0-50) is not all wait
    found = causes(case(corpus, "33_cuda_sync.json").steps[0])
    assert sum(us for (_, kind), us in found.items() if kind == "sync") == 30


def test_39_python_frames_are_no_regions(corpus: Path) -> None:
    # idle 50-150: fetch_batch 52-142; launch call 143-145 and the wait for the device to 150; 50-52 and 142-143 nothing
    found = causes(case(corpus, "39_python_stacks.json").steps[0])
    assert found == {("fetch_batch", "host"): 90, (None, "launch_latency"): 7, (None, "host"): 3}


def test_40_profiler_overhead_is_no_optimizer_time(corpus: Path) -> None:
    # idle 50-160: overhead 55-155, optimizer 52-55 and 155-160 (its launch call at 154), nothing 50-52
    found = causes(case(corpus, "40_profiler_overhead.json").steps[0])
    assert found[None, "profiler_overhead"] == 100
    assert sum(us for (region, _), us in found.items() if region == "optimizer") == 8
    assert found[None, "host"] == 2
    assert sum(found.values()) == 110


def test_41_a_call_that_bleeds_over_its_operator_still_owns_its_kernel(corpus: Path) -> None:
    assert case(corpus, "41_bleeding_child.json").coverage.linked_ns == 30 * US


def test_43_kernels_from_before_the_recording(corpus: Path) -> None:
    process = case(corpus, "43_unlinked_head.json")
    assert kinds(process)["launched_before_recording"] == 2
    assert (process.coverage.linked_ns // US, process.coverage.unlinked_ns // US) == (60, 25)
    (step,) = process.steps
    # the head ends at 25: the step begins there, and keeps its own 60 us
    assert (step.number, step.compute_ns // US, step.kernels) == (3, 60, 1)


def test_49_two_steps_against_one_are_no_difference(corpus: Path) -> None:
    a, b = (analyze(load_run(corpus / "cases" / f"49_diff_steps.{side}.json")) for side in ("base", "test"))
    found = compare(a, b)
    # per step 60 us, 30 of them compute by 3 kernels, on both sides; the totals are 2 to 1
    assert (found.verdict, found.step.a, found.step.b) == ("no difference", 60 * US, 60 * US)
    compute = next(r for r in found.waterfall if r.part == "compute")
    assert (compute.a_ns, compute.b_ns) == (30 * US, 30 * US)
    assert [(k.count_a, k.count_b) for k in found.kernel_classes] == [(3, 3)]
    assert ("steps", "2", "1") in [(c.what, c.a, c.b) for c in found.comparability]


def test_50_three_of_four_steps_have_no_device_work(corpus: Path) -> None:
    process = case(corpus, "50_step_collapse.json")
    assert [s.kernels for s in process.steps] == [6, 0, 0, 0]
    assert [s.compute_ns // US for s in process.steps] == [90, 0, 0, 0]
    assert sum(s.idle_ns for s in process.steps) == 310 * US
    assert sum(s.wall_ns for s in process.steps) == 400 * US
    assert kinds(process)["steps_without_device_work"] == 3


def test_55_a_stream_is_a_stream_whether_spelt_as_text_or_number(corpus: Path) -> None:
    trace = load_run(corpus / "cases" / "55_string_stream.json").processes[0].trace
    work = classify(trace, load_profile("torch")).work
    length = {
        int(stream): int((work.end - work.start)[trace.events.stream[work.row] == stream].sum()) // US
        for stream in np.unique(trace.events.stream[work.row])
    }
    assert length == {7: 50, 20: 30}


def test_56_ties_nest_by_length_then_by_the_file(corpus: Path) -> None:
    trace = load_run(corpus / "cases" / "56_ts_ties.json").processes[0].trace
    names = [trace.names[i] for i in trace.events.name]
    assert [n for n in names if n in ("parent", "child", "grandchild", "next")] == [
        "parent",
        "child",
        "grandchild",
        "next",
    ]


def test_58_missing_kernel_records_are_no_finding_about_idle(corpus: Path) -> None:
    process = case(corpus, "58_no_kernel_records.json")
    assert {"launch_not_recorded": 2, "no_kernels": 1}.items() <= kinds(process).items()
    (step,) = process.steps
    assert (step.compute_ns, step.comm_ns, step.exposed_memory_ns // US) == (0, 0, 6)


def test_59_leftovers_from_long_before_are_in_no_step(corpus: Path) -> None:
    process = case(corpus, "59_early_gpu_events.json")
    (step,) = process.steps
    assert (step.number, step.compute_ns // US, step.idle_ns // US) == (4, 60, 40)
    assert kinds(process)["before_first_step"] == 2
    assert process.coverage.outside_steps_ns == process.coverage.unlinked_ns == 2000 * US


# ---------------------------------------------------------------- real traces against their raw text
WORK = {"kernel": "kernels", "gpu_memcpy": "memcpys", "memcpy": "memcpys", "gpu_memset": "memsets", "memset": "memsets"}
COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_ep|internode::|intranode::|multimem_|two_shot_|one_shot_|cross_device_reduce"
    r"|allreduce_fusion|userbuffers",
    re.IGNORECASE,
)


def raw_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, parse_float=Decimal)
    events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
    return [e for e in events if e.get("ph") == "X" and e.get("dur") is not None and Decimal(str(e["dur"])) >= 0]


def ns(us: Decimal) -> int:
    return int((us * 1000).to_integral_value(ROUND_HALF_EVEN))


def bounds(e: dict[str, Any]) -> Pair:
    ts, dur = Decimal(str(e["ts"])), Decimal(str(e["dur"]))
    return ns(ts), ns(ts + dur)


def length(intervals: list[Pair]) -> int:
    """Length of the union: walk over the intervals in order and count what lies beyond the farthest end so far."""
    total, reach = 0, -(2**62)
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def span_of(events: list[dict[str, Any]]) -> dict[str, int]:
    work = {part: [] for part in ("compute", "comm", "memory")}  # type: dict[str, list[Pair]]
    counts = dict.fromkeys(WORK.values(), 0)
    for e in events:
        category = str(e.get("cat", "")).lower()
        if category in WORK:
            counts[WORK[category]] += 1
            part = "memory" if category != "kernel" else "comm" if COMMUNICATION.search(e["name"]) else "compute"
            work[part].append(bounds(e))
    every = [pair for pairs in work.values() for pair in pairs]
    if not every:
        return {}
    kernels, busy = length(work["compute"] + work["comm"]), length(every)
    span = max(e for _, e in every) - min(s for s, _ in every)
    return {
        "span_ns": span,
        "busy_ns": busy,
        "compute_ns": length(work["compute"]),
        "comm_ns": length(work["comm"]),
        "exposed_comm_ns": kernels - length(work["compute"]),
        "exposed_memory_ns": busy - kernels,
        "idle_ns": span - busy,
        **counts,
    }


@pytest.mark.parametrize("name", traces())
def test_real_trace(corpus: Path, name: str) -> None:
    path = corpus / "traces" / name
    want = span_of(raw_events(path))
    process = one(path)

    span = process.device_span
    assert {k: getattr(span, k) for k in want} == want
    assert (span is None) == (not want)
    closes(process)
    if span is not None:  # no device time is lost between the steps and what lies outside them
        within = sum(s.wall_ns - s.idle_ns for s in process.steps)
        assert within + process.coverage.outside_steps_ns == span.busy_ns


def test_a_folder_of_eight_ranks(corpus: Path, tmp_path: Path) -> None:
    files = sorted((corpus / "traces").glob("astrasim-megatron-tp8__*"))
    for file in files:
        (tmp_path / file.name).symlink_to(file)
    run = analyze(load_run(tmp_path))
    assert [p.rank for p in run.processes] == list(range(8))
    for file, process in zip(files, run.processes, strict=True):
        alone = one(file)
        assert process.file == alone.file
        # a run's clock begins with its first process; nothing but the starts of the steps may depend on it
        assert process.device_span == alone.device_span
        assert [(s.wall_ns, causes(s)) for s in process.steps] == [(s.wall_ns, causes(s)) for s in alone.steps]
