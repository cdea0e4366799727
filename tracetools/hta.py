"""The bridge to Holistic Trace Analysis: our events, to the nanosecond, in HTA's own objects.

In: `Trace` values. Out: HTA's DataFrame and symbol table, or a whole `hta.trace_analysis.TraceAnalysis` over any number
of ranks, so that every analysis of HTA runs on exactly the events that ours run on, without HTA's slow and rounding
parser. Times are float microseconds (exact to the nanosecond), counted from the earliest trace's first event. HTA,
pandas and plotly are imported on first use. Knows nothing of what HTA computes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tracetools.classify import Classified, classify
from tracetools.errors import TracetoolsError
from tracetools.intervals import NONE
from tracetools.load.document import read_document
from tracetools.model import DEVICE_WORK, Category, Int64, Trace
from tracetools.stackprofile import DEFAULT_PROFILE, StackProfile, load_profile
from tracetools.steps import find_markers, find_steps

if TYPE_CHECKING:
    import pandas as pd

NO_ROUNDING = "HTA_DISABLE_NS_ROUNDING"
SAME_CLOCK_NS = 3600 * 10**9  # traces of one job begin within an hour of each other
US = 1000.0  # ns
UNSIGNED_MINUS_ONE = 2**32 - 1

# The `cat` that HTA looks for. All runtime and driver calls, of ROCm too, are to it what it knows as cuda_runtime.
CATEGORY_NAMES = {
    Category.OTHER: "other",
    Category.CPU_OP: "cpu_op",
    Category.USER_ANNOTATION: "user_annotation",
    Category.GPU_USER_ANNOTATION: "gpu_user_annotation",
    Category.PYTHON_FUNCTION: "python_function",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
    Category.SYNC: "cuda_sync",
    Category.OVERHEAD: "overhead",
}


class _WaitArgs(msgspec.Struct, gc=False):
    correlation: Any = None
    wait_on_stream: Any = None
    wait_on_cuda_event_record_corr_id: Any = None


class _WaitEvent(msgspec.Struct, gc=False):
    cat: str = ""
    args: _WaitArgs | None = None


def frame(
    trace: Trace, *, sync_on_stream: bool = True, source: Path | None = None, profile: StackProfile | None = None
) -> tuple[pd.DataFrame, Any]:
    """(HTA's DataFrame, its TraceSymbolTable) of one trace, one row per event, in order of time.

    `stream` is -1 for all that is no device work and no cuda_sync: that is how HTA tells device from host. It also takes
    cuda_sync for work wherever it adds up time; its critical path needs them on their stream. `sync_on_stream=False`
    takes them off. `index` begins at 1, because 0 in `index_correlation` means "partner missing" to HTA.
    `source`: the file itself, for what HTA's critical path alone wants to know: which event each cuda_sync waited for.
    """
    _quieten()
    import pandas as pd
    from hta.common.trace_symbol_table import TraceSymbolTable

    ev = trace.events
    table = TraceSymbolTable()
    table.add_symbols([*CATEGORY_NAMES.values(), *trace.names])
    index = table.get_sym_id_map()
    cat_of = np.array([index[CATEGORY_NAMES[c]] for c in sorted(CATEGORY_NAMES)])
    name_of = np.array([index[name] for name in trace.names])
    correlation, partner, iteration = _links(trace, profile or load_profile(DEFAULT_PROFILE))
    pid, tid = _numbers([t.pid for t in trace.threads]), _numbers([t.tid for t in trace.threads])
    duration = ev.end - ev.start
    moved = np.isin(ev.category, (Category.MEMCPY, Category.MEMSET)) & (ev.size > 0) & (duration > 0)
    columns: dict[str, Any] = {
        "index": np.arange(1, len(ev) + 1),
        "cat": cat_of[ev.category],
        "name": name_of[ev.name],
        "pid": pid[ev.thread],
        "tid": tid[ev.thread],
        "ts": ev.start / US,
        "dur": duration / US,
        "end": ev.end / US,
        "stream": _streams(trace, sync_on_stream),
        "correlation": correlation,
        "index_correlation": partner,
        "iteration": iteration,
        "bytes": ev.size,
        "memory_bw_gbps": np.where(moved, ev.size / np.maximum(duration, 1), 0.0),
        **_waits(trace, source),
        "input_dims": _texts([*trace.dims, "-1"], ev.dims),
        "external_id": np.where(ev.external_id == 0, -1, ev.external_id),
        "python_id": ev.python_id,
        "python_parent_id": ev.python_parent,
        **_collectives(trace),
    }
    found = pd.DataFrame(columns)
    return found.set_index(found["index"].rename(None)), table


def analysis(
    traces: Mapping[int, Trace],
    *,
    sync_on_stream: bool = True,
    sources: Mapping[int, Path] | None = None,
    profile: StackProfile | None = None,
) -> Any:
    """A `TraceAnalysis` of these traces by rank: as after HTA's own loading, but with every event and no rounding.

    Unlike HTA's loader it keeps the last step, and kernels that no call in the trace launched. Options as for `frame`.
    """
    _quieten()
    from hta.common.trace import Trace as HtaTrace
    from hta.trace_analysis import TraceAnalysis

    loaded = HtaTrace(trace_files={}, trace_dir=os.sep)
    for (rank, trace), shift in zip(traces.items(), _shifts(list(traces.values())), strict=True):
        source = (sources or {}).get(rank)
        df, table = frame(trace, sync_on_stream=sync_on_stream, source=source, profile=profile)
        if shift:  # from integers: adding it to the microseconds would round twice
            df["ts"] = (trace.events.start + shift) / US
            df["end"] = (trace.events.end + shift) / US
        loaded.symbol_table.add_symbols(table.get_sym_table())
        index = loaded.symbol_table.get_sym_id_map()
        shared = np.array([index[symbol] for symbol in table.get_sym_table()])
        df["cat"], df["name"] = shared[df["cat"]], shared[df["name"]]
        loaded.traces[rank] = df
        loaded.meta_data[rank] = _metadata(trace)
    loaded.is_parsed = True
    loaded.parse_traces = lambda *_, **__: None  # HTA's TraceDiff would parse files again, and there are none
    result = TraceAnalysis.__new__(TraceAnalysis)  # its __init__ does nothing but load
    result.t = loaded
    return result


def temporal_breakdown(trace: Trace) -> pd.DataFrame:
    """HTA's idle, compute and non-compute time of the device, us, over device work alone (no cuda_sync)."""
    _require_device(trace)
    with _without_warnings():
        found: pd.DataFrame = analysis({0: trace}, sync_on_stream=False).get_temporal_breakdown(visualize=False)
    return found


def overlap(trace: Trace) -> float | None:
    """HTA's share of communication time, in percent, in which computation runs too; None without communication."""
    _require_device(trace)
    with _without_warnings():
        found = analysis({0: trace}, sync_on_stream=False).get_comm_comp_overlap(visualize=False)
    percent = float(found["comp_comm_overlap_pctg"].iloc[0])
    return None if np.isnan(percent) else percent


def queue_length(trace: Trace) -> pd.DataFrame:
    """HTA's number of launched and not yet started pieces of work per stream, at each change (ts in us)."""
    _require_device(trace)
    with _without_warnings():
        series = analysis({0: trace}).get_queue_length_time_series(ranks=[0])
    if 0 not in series:
        raise TracetoolsError(
            f"{trace.file}: no launch call that HTA knows is linked to device work: no queue to measure."
        )
    found: pd.DataFrame = series[0]
    return found


def launch_stats(trace: Trace) -> pd.DataFrame:
    """HTA's duration of each launch call and of its work, and the delay between them, us."""
    _require_device(trace)
    with _without_warnings():
        found: pd.DataFrame = analysis({0: trace}).get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
    return found


def critical_path(trace: Trace, annotation: str = "", instance: int = 0, *, source: Path | None = None) -> Any:
    """HTA's `CPGraph` (a networkx.DiGraph) within the n-th event whose name holds `annotation`; "" for the whole trace.

    Give the file as `source` where cuda_sync was recorded: without it the path does not cross from stream to stream.
    """
    _require_device(trace)
    with _without_warnings():
        found = analysis({0: trace}, sources={0: source} if source else None).critical_path_analysis(
            0, annotation, instance
        )
    if found is None or not found[1]:
        raise TracetoolsError(f"{trace.file}: HTA finds no critical path in {annotation or 'the whole trace'!r}.")
    return found[0]


def _quieten() -> None:
    """Before HTA is imported, and after: it reads its switch once, and logs every step it takes as a warning."""
    import logging

    os.environ[NO_ROUNDING] = "1"
    from hta.configs.env_options import HTAEnvOptions

    HTAEnvOptions.instance().set_disable_ns_rounding(True)
    logging.getLogger("hta").setLevel(logging.ERROR)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """HTA divides by zero where there is no communication, and uses what pandas is about to drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _require_device(trace: Trace) -> None:
    if not len(trace.events.where(*DEVICE_WORK)):
        raise TracetoolsError(f"{trace.file}: no device work in the trace. This analysis of HTA is of devices only.")


def _links(trace: Trace, profile: StackProfile) -> tuple[Int64, Int64, Int64]:
    """(correlation, index_correlation, iteration) of every row.

    The ids are those of the file where each belongs to one launch. An id that was used again gets a new one per launch,
    because HTA joins on it; ids that link nothing of ours stay, 0 (Kineto's "none") becomes -1 (HTA's).
    """
    ev, n = trace.events, len(trace.events)
    classified = classify(trace, profile)
    work, launch = classified.work.row, classified.work.launch
    linked = launch != NONE
    correlation = np.where(ev.correlation == 0, -1, ev.correlation)
    partner = np.where(correlation > 0, 0, -1).astype(np.int64)
    sync, call = _synchronising_calls(trace)
    owners, first = np.unique(launch[linked], return_index=True)
    ids, count = np.unique(ev.correlation[owners], return_counts=True)
    again = owners[np.isin(ev.correlation[owners], ids[count > 1])]
    fresh = np.zeros(n, np.int64)
    fresh[again] = int(ev.correlation.max(initial=0)) + 1 + np.arange(len(again))
    rows = work[linked]
    correlation[rows] = np.where(fresh[launch[linked]] > 0, fresh[launch[linked]], correlation[rows])
    correlation[again] = fresh[again]
    # a call inside a launch that repeats its id is part of it: HTA must not see the launch twice
    calls = ev.where(Category.RUNTIME)
    inner = calls[np.isin(ev.correlation[calls], ev.correlation[owners]) & ~np.isin(calls, owners)]
    correlation[inner], partner[inner] = -1, -1
    partner[sync], partner[call] = call + 1, sync + 1
    partner[rows], partner[owners] = launch[linked] + 1, rows[first] + 1
    return correlation, partner, _iterations(trace, classified, profile, partner)


def _synchronising_calls(trace: Trace) -> tuple[Int64, Int64]:
    """(cuda_sync rows, the call that each belongs to): of the calls with its id the last that began before it ended."""
    ev = trace.events
    calls: dict[int, list[int]] = {}
    for row in ev.where(Category.RUNTIME).tolist():
        calls.setdefault(int(ev.correlation[row]), []).append(row)
    pairs = []
    for row in ev.where(Category.SYNC).tolist():
        mine = calls.get(int(ev.correlation[row]), []) if ev.correlation[row] > 0 else []
        before = [call for call in mine if ev.start[call] <= ev.end[row]]
        if mine:
            pairs.append((row, before[-1] if before else mine[0]))
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _iterations(trace: Trace, classified: Classified, profile: StackProfile, partner: Int64) -> Int64:
    """The number of the step whose marker holds the event, or holds the call that launched it; -1 outside all."""
    ev = trace.events
    markers = find_markers(classified, profile)
    if not len(markers):
        return np.full(len(ev), -1, np.int64)
    steps = find_steps(classified, markers).steps
    number = np.array([i if s.number is None else s.number for i, s in enumerate(steps)], np.int64)
    which = np.searchsorted(markers.start, ev.start, side="right") - 1
    inside = (which >= 0) & (ev.start < markers.end[np.maximum(which, 0)])
    on_host = np.where(inside, number[np.maximum(which, 0)], -1)
    on_device = np.isin(ev.category, (*DEVICE_WORK, Category.SYNC))
    of_call = np.where(partner > 0, on_host[np.maximum(partner - 1, 0)], -1)
    return np.where(on_device, of_call, on_host)


def _waits(trace: Trace, source: Path | None) -> dict[str, Int64]:
    """The stream and the cudaEventRecord call (by correlation) that each cuda_sync waited for; -1 where not known."""
    ev = trace.events
    columns = {name: np.full(len(ev), -1, np.int64) for name in ("wait_on_stream", "wait_on_cuda_event_record_corr_id")}
    rows = ev.where(Category.SYNC)
    if source is None or not len(rows):
        return columns
    args = [
        e.args for e in read_document(source, _WaitEvent).events if e.args is not None and e.cat.lower() == "cuda_sync"
    ]
    by_id = {a.correlation: a for a in args}
    for row, number in zip(rows.tolist(), ev.correlation[rows].tolist(), strict=True):
        for name, column in columns.items():
            value = getattr(by_id.get(number), name, None)
            if isinstance(value, int) and 0 <= value < UNSIGNED_MINUS_ONE:
                column[row] = value
    return columns


def _streams(trace: Trace, sync_on_stream: bool) -> Int64:
    """Stream of device work (a number of its own where the file gives none) and of cuda_sync; -1 for all else."""
    ev = trace.events
    work = np.isin(ev.category, DEVICE_WORK)
    nameless = int(ev.stream[work].max(initial=0)) + 1 + ev.thread.astype(np.int64)
    # CUPTI writes -1 as an unsigned number where all streams of a context are meant
    sync = (ev.category == Category.SYNC) & (ev.stream < UNSIGNED_MINUS_ONE) & sync_on_stream
    return np.where(work, np.where(ev.stream < 0, nameless, ev.stream), np.where(sync, ev.stream, -1))


def _numbers(texts: Sequence[str]) -> Int64:
    """Pids and tids as numbers, because HTA compares them as such; text gets numbers that none of the others has."""
    plain = {t: int(t) for t in texts if t.removeprefix("-").isdecimal() and abs(int(t)) < 2**62}
    free = max([0, *plain.values()]) + 1
    other = {t: free + i for i, t in enumerate(dict.fromkeys(t for t in texts if t not in plain))}
    return np.array([plain[t] if t in plain else other[t] for t in texts], np.int64)


def _texts(values: Sequence[str], index: Any) -> Any:
    """One text per event; index -1 takes the last."""
    return np.array(values, object)[index]


def _collectives(trace: Trace) -> dict[str, Any]:
    known, index = trace.collectives, trace.events.collective
    numbers = {
        "in_msg_nelems": [c.in_elements for c in known],
        "out_msg_nelems": [c.out_elements for c in known],
        "group_size": [c.group_size for c in known],
    }
    return {
        "collective_name": _texts([*(c.name or "" for c in known), ""], index),
        "msg_dtype": _texts([*(c.dtype or "" for c in known), ""], index),
        **{key: np.array([*(v or 0 for v in values), 0], np.int64)[index] for key, values in numbers.items()},
    }


def _shifts(traces: Sequence[Trace]) -> list[int]:
    """How much later each trace begins, ns; nothing where their clocks have nothing to do with each other."""
    first = min((t.origin_ns for t in traces), default=0)
    apart = [t.origin_ns - first for t in traces]
    return apart if max(apart, default=0) <= SAME_CLOCK_NS else [0] * len(traces)


def _metadata(trace: Trace) -> dict[str, Any]:
    info = trace.info
    return {
        "distributedInfo": {"rank": info.rank, "world_size": info.world_size, "backend": info.backend or ""},
        "deviceProperties": [{"id": i, "name": name} for i, name in enumerate(info.devices)],
        "device_type": "UNKNOWN",
        **({} if info.base_ns is None else {"baseTimeNanoseconds": info.base_ns}),
    }
