"""The bridge to HTA: its analyses on our events give our numbers, to the nanosecond, or differ by a fault that is named."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import Event, kernel, launch, memcpy, op, region, step, trace, write, x

from tracetools import hta
from tracetools.activity import activity_of, device_span
from tracetools.classify import COMM, COMPUTE, classify
from tracetools.errors import TracetoolsError
from tracetools.load import read_trace
from tracetools.model import Category, DeviceSpan, Trace
from tracetools.stackprofile import load_profile

RULES = load_profile("torch")
NAN_WARNING = "ignore::RuntimeWarning"


def ns(us: float) -> int:
    """HTA's sums of float microseconds, as the integer they stand for."""
    return round(us * 1000)


def ours(t: Trace) -> DeviceSpan:
    found = device_span(classified := classify(t, RULES), activity_of(classified, RULES))
    assert found is not None
    return found


def length(spans: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals, by walking over them."""
    total, reach = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def sync(name: str, ts: float, dur: float, corr: int, stream: int, **args: Any) -> Event:
    return x(name, "cuda_sync", ts, dur, pid=0, tid=stream, stream=stream, correlation=corr, **args)


def rows(t: Trace, *columns: str, **options: Any) -> dict[str, tuple[Any, ...]]:
    """Some columns of the frame by event name (names must be unique)."""
    df, table = hta.frame(t, **options)
    names = [table.get_sym_table()[i] for i in df["name"]]
    assert len(set(names)) == len(names)
    return dict(zip(names, df[list(columns)].itertuples(index=False, name=None), strict=True))


def test_a_row_per_event_with_exact_times_and_host_and_device_apart(tmp_path: Path) -> None:
    events = [op("o", 100, 10.001), launch(101, 7, 2.5), kernel("k", 120.25, 3.125, 7), op("triton", 130, 1, stream=7)]
    t = trace(tmp_path, [*events, sync("Stream Sync", 131, 2, 9, 7), memcpy(140, 2)])
    found = rows(t, "index", "ts", "dur", "end", "stream", "correlation")

    assert found == {
        "o": (1, 0.0, 10.001, 10.001, -1, -1),
        "cudaLaunchKernel": (2, 1.0, 2.5, 3.5, -1, 7),
        "k": (3, 20.25, 3.125, 23.375, 7, 7),
        "triton": (4, 30.0, 1.0, 31.0, -1, -1),  # has a stream among its arguments and is no device work
        "Stream Sync": (5, 31.0, 2.0, 33.0, 7, 9),
        "Memcpy HtoD (Pinned -> Device)": (6, 40.0, 2.0, 42.0, 7, -1),
    }
    assert rows(t, "stream", sync_on_stream=False)["Stream Sync"] == (-1,)


def test_partners_by_launch(tmp_path: Path) -> None:
    """One launch of a graph owns two kernels; a driver call inside a launch is part of it; 0 is "partner missing"."""
    events = [launch(0, 1, 9, name="graph"), kernel("g1", 10, 5, 1), kernel("g2", 20, 5, 1)]
    events += [launch(30, 2, 9, name="outer"), launch(31, 2, 2, name="inner"), kernel("k", 40, 5, 2)]
    events += [launch(50, 3, name="lost"), kernel("alone", 60, 5, 4), kernel("none", 70, 5, 0)]
    events += [launch(80, 5, name="cudaStreamSynchronize"), sync("Stream Sync", 81, 1, 5, 7)]
    found = rows(trace(tmp_path, events), "index", "index_correlation")
    index = {name: i for name, (i, _) in found.items()}

    assert {name: partner for name, (_, partner) in found.items()} == {
        "graph": index["g1"],
        "g1": index["graph"],
        "g2": index["graph"],
        "outer": index["k"],
        "inner": -1,
        "k": index["outer"],
        "lost": 0,
        "alone": 0,
        "none": -1,
        "cudaStreamSynchronize": index["Stream Sync"],
        "Stream Sync": index["cudaStreamSynchronize"],
    }


def test_an_id_that_is_used_again_becomes_two(tmp_path: Path) -> None:
    """HTA joins launches and kernels on the id: 2 x 2 rows for these two pairs, and its queue length refuses them."""
    names = ("cudaLaunchKernel", "cuLaunchKernel")
    t = trace(
        tmp_path,
        [launch(0, 5, name=names[0]), kernel("a", 10, 5, 5), launch(20, 5, name=names[1]), kernel("b", 30, 5, 5)],
    )
    found = rows(t, "correlation", "index_correlation", "index")

    assert found[names[0]][0] == found["a"][0] != found["b"][0] == found[names[1]][0]
    assert found["b"][1] == found[names[1]][2]
    assert hta.queue_length(t)["queue_length"].tolist() == [1, 0, 1, 0]


def test_iterations_of_host_by_time_and_of_device_by_launch(tmp_path: Path) -> None:
    """Kernel `late` runs in step 4 and belongs to 3. The device's twin of the marker is no step; stream 0 has steps too."""
    events = [
        step(3, 0, 50),
        step(4, 50, 50),
        launch(40, 1),
        kernel("late", 60, 5, 1, stream=0),
        op("o", 50, 1),
        op("after", 100, 1),
    ]
    twin = x("ProfilerStep#9", "gpu_user_annotation", 60, 30, pid=0, tid=0)
    found = rows(trace(tmp_path, [*events, twin, kernel("unlinked", 70, 1)]), "iteration")

    expected = {
        "ProfilerStep#3": 3,
        "ProfilerStep#4": 4,
        "cudaLaunchKernel": 3,
        "late": 3,
        "o": 4,
        "after": -1,
        "unlinked": -1,
    }
    assert {name: found[name][0] for name in expected} == expected


def test_text_for_pids_and_tids_becomes_numbers(tmp_path: Path) -> None:
    events = [x("a", "cpu_op", 0, 1, pid="10.0.0.1", tid="worker"), x("b", "cpu_op", 1, 1, pid=3, tid=2**70)]
    found = rows(trace(tmp_path, events), "pid", "tid")

    assert found == {"a": (4, 1), "b": (3, 2)}


def test_temporal_breakdown_is_exact_without_rounding(tmp_path: Path) -> None:
    """Two streams: compute 0.4-10.6 and 5-12.3; communication 11-15.7; copy 20-21. HTA's own rounding loses 1 us an event.

    Busy 0.4-15.7 and 20-21 = 16.3; span 20.6; idle 4.3; compute 11.9; the rest 4.4.
    """
    events = [kernel("gemm", 0.4, 10.2), kernel("norm", 5, 7.3, stream=8), memcpy(20, 1)]
    t = trace(tmp_path, [*events, kernel("ncclDevKernel_AllReduce_Sum", 11, 4.7, stream=9)])
    found = hta.temporal_breakdown(t).iloc[0]

    got = [ns(found[f"{part}_time(us)"]) for part in ("kernel", "idle", "compute", "non_compute")]
    assert got == [20_600, 4_300, 11_900, 4_400]
    assert hta.overlap(t) == 27.66  # 1.3 of 4.7


def test_hta_counts_waiting_as_work_unless_it_is_taken_off_the_stream(tmp_path: Path) -> None:
    t = trace(tmp_path, [kernel("a", 0, 10), sync("Stream Sync", 10, 30, 1, 7), kernel("b", 40, 10)])

    assert ns(hta.temporal_breakdown(t)["idle_time(us)"].iloc[0]) == 30_000
    with_sync = hta.analysis({0: t}).get_temporal_breakdown(visualize=False)
    assert ns(with_sync["idle_time(us)"].iloc[0]) == 0  # HTA's rule: everything with a stream is work


def test_idle_breakdown_queue_and_launches_run_on_our_events(tmp_path: Path) -> None:
    """The second kernel is launched at 30, after the first ended at 15.5: the host kept the device waiting for 24.5 us."""
    t = trace(tmp_path, [launch(0, 1, 4), kernel("a", 10, 5.5, 1), launch(30, 2, 5), kernel("b", 40, 5.25, 2)])
    idle, _ = hta.analysis({0: t}).get_idle_time_breakdown(ranks=[0], visualize=False)

    assert idle[["idle_category", "idle_time"]].to_numpy().tolist()[0] == ["host_wait", 24.5]
    assert hta.launch_stats(t)[["cpu_duration", "gpu_duration", "launch_delay"]].to_numpy().tolist() == [
        [4, 5.5, 6],
        [5, 5.25, 5],
    ]
    queue = hta.queue_length(t)
    assert queue[["ts", "queue_length"]].to_numpy().tolist() == [[0, 1], [10, 0], [30, 1], [40, 0]]


def test_critical_path_of_a_step(tmp_path: Path) -> None:
    """Host 0-30 us, launch delay to 32, kernel to 82, and the host waits for it until 84."""
    events = [step(1, 0, 90), op("prepare", 0, 28), launch(28, 1, 2), kernel("k", 32, 50, 1)]
    waiting = launch(31, 2, 53, name="cudaStreamSynchronize")
    t = trace(tmp_path, [*events, waiting, sync("Stream Sync", 32, 52, 2, 7)])
    found = hta.critical_path(t, "ProfilerStep#1").get_critical_path_breakdown()

    by_cause = {cause: ns(us) for cause, us in found.groupby("bound_by")["duration"].sum().items()}
    assert by_cause.get("gpu_compute_bound") == 50_000
    with pytest.raises(TracetoolsError, match="no critical path in 'nothing'"):
        hta.critical_path(t, "nothing")


def test_several_ranks_share_clock_and_symbols(tmp_path: Path) -> None:
    a = read_trace(write(tmp_path / "a.json", [kernel("only a", 10, 5)], rank=0))
    b = read_trace(write(tmp_path / "b.json", [kernel("only b", 12.345, 5)], rank=3))
    both = hta.analysis({0: a, 3: b})

    assert both.t.get_ranks() == [0, 3]
    assert both.t.get_trace(3)[["ts", "end"]].to_numpy().tolist() == [[2.345, 7.345]]
    symbols = both.t.symbol_table.get_sym_table()
    assert [symbols[df["name"].iloc[0]] for df in both.t.get_all_traces().values()] == ["only a", "only b"]
    assert len(both.get_temporal_breakdown(visualize=False)) == 2
    far = replace(b, origin_ns=b.origin_ns + 10**18)  # another clock
    assert hta.analysis({0: a, 3: far}).t.get_trace(3)["ts"].tolist() == [0]


def test_traces_of_ours_go_into_htas_diff(tmp_path: Path) -> None:
    from hta.trace_diff import LabeledTrace, TraceDiff

    before = trace(tmp_path, [step(1, 0, 50), op("aten::mm", 1, 5)]).hta()
    after = trace(tmp_path, [step(1, 0, 50), op("aten::mm", 1, 5), op("aten::mm", 10, 7)]).hta()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = TraceDiff.compare_traces(LabeledTrace("a", t=before.t), LabeledTrace("b", t=after.t))

    assert found.loc["aten::mm", ["diff_counts", "diff_duration"]].tolist() == [1, 7]


def test_bandwidth_and_collectives_reach_the_frame(tmp_path: Path) -> None:
    copy = memcpy(0, 2.5)
    copy["args"]["bytes"] = 5000
    comm = kernel("ncclDevKernel_AllGather", 5, 1)
    comm["args"] |= {"Collective name": "allgather", "In msg nelems": 8, "dtype": "Float"}
    df, _ = hta.frame(trace(tmp_path, [copy, comm]))

    assert df["memory_bw_gbps"].tolist() == [2.0, 0.0]  # 5000 bytes in 2500 ns
    assert df[["collective_name", "in_msg_nelems", "msg_dtype"]].iloc[1].tolist() == ["allgather", 8, "Float"]


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    t = trace(tmp_path, [op("o", 0, 1), region("r", 0, 1)])

    for call in (hta.temporal_breakdown, hta.overlap, hta.queue_length, hta.launch_stats, hta.critical_path):
        with pytest.raises(TracetoolsError, match=r"trace\.json: no device work in the trace"):
            call(t)
    assert len(t.frame()) == 2


def test_without_communication_the_overlap_is_unknown(tmp_path: Path) -> None:
    assert hta.overlap(trace(tmp_path, [kernel("k", 0, 1)])) is None


def test_importing_the_bridge_loads_neither_hta_nor_pandas() -> None:
    code = "import tracetools.hta, sys; print({'hta', 'pandas', 'plotly'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"


def test_hta_stays_silent(tmp_path: Path) -> None:
    source = write(tmp_path / "t.json", [launch(0, 1), kernel("k", 5, 1, 1)])
    code = f"from pathlib import Path; from tracetools import hta, load; t = load.read_trace(Path({str(source)!r})); "
    code += "hta.temporal_breakdown(t), hta.overlap(t), hta.queue_length(t), hta.launch_stats(t), hta.critical_path(t)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (found.stdout, found.stderr) == ("", "")


def by_htas_names(t: Trace) -> tuple[int, set[str]]:
    """(compute time with kernels sorted by HTA's name rule, kernel names for which it differs from ours)."""
    from hta.utils.utils import get_kernel_type

    classified = classify(t, RULES)
    work, ev = classified.work, t.events
    spans, disputed = [], set()
    our_words = {COMPUTE: "COMPUTATION", COMM: "COMMUNICATION"}
    for row, start, end, kind in zip(*(c.tolist() for c in (work.row, work.start, work.end, work.kind)), strict=True):
        name = t.names[ev.name[row]]
        theirs = get_kernel_type(name)
        if theirs == "COMPUTATION":
            spans.append((start, end))
        if theirs != our_words.get(kind, "MEMORY"):
            disputed.add(name)
    return length(spans), disputed


@pytest.mark.filterwarnings(NAN_WARNING)
def test_hta_and_we_agree_to_the_nanosecond_on_every_real_trace(corpus: Path) -> None:
    """Span and idle always; compute and overlap wherever HTA's name rule and ours sort the kernels alike.

    They do not where HTA does not know that multimem_all_reduce communicates; with its rule our arithmetic gives its
    number there too.
    """
    disputed: dict[str, set[str]] = {}
    checked = 0
    for source in sorted((corpus / "traces").iterdir()):
        try:
            t = read_trace(source)
        except TracetoolsError:
            continue
        if not len(t.events.where(Category.KERNEL, Category.MEMCPY, Category.MEMSET)):
            continue
        found, span = hta.temporal_breakdown(t).iloc[0], ours(t)
        compute, names = by_htas_names(t)
        busy = span.span_ns - span.idle_ns

        assert ns(found["kernel_time(us)"]) == span.span_ns, source.name
        assert ns(found["idle_time(us)"]) == span.idle_ns, source.name
        assert ns(found["compute_time(us)"]) == compute, source.name
        assert ns(found["non_compute_time(us)"]) == busy - compute, source.name
        if names:
            disputed[source.name] = names
        else:
            assert compute == span.compute_ns
            hidden = round(100 * (span.comm_ns - span.exposed_comm_ns) / span.comm_ns, 2) if span.comm_ns else None
            assert hta.overlap(t) == hidden, source.name
        checked += 1

    assert checked >= 2
    assert all("multimem_all_reduce" in name for names in disputed.values() for name in names), disputed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "pattern", ["*critical_path*", "*nccl_parser_config*", "*h100_Qwen*", "*mi250*", "*trace_compare*"]
)
def test_critical_path_is_that_of_htas_own_loader(corpus: Path, pattern: str) -> None:
    """With its rounding off and its last step kept; cuda_sync's waits come from the file."""
    hta.frame(read_trace(next((corpus / "traces").glob("*mi250*"))))  # switches HTA's rounding off
    from hta.trace_analysis import TraceAnalysis

    def breakdown(analysis: Any) -> dict[str, int]:
        graph, found = analysis.critical_path_analysis(0, "", 0)
        assert found
        return {k: ns(v) for k, v in graph.get_critical_path_breakdown().groupby("bound_by")["duration"].sum().items()}

    for source in sorted((corpus / "traces").glob(pattern)):
        theirs = TraceAnalysis(trace_files={0: str(source)}, trace_dir="/", include_last_profiler_step=True)
        mine = hta.analysis({0: read_trace(source)}, sources={0: source})
        assert breakdown(mine) == breakdown(theirs), source.name
