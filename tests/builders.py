"""Tiny traces for tests: events as a reader would write them down, in microseconds.

In: what a test wants to say. Out: Kineto-shaped dictionaries, files, and `Trace` values read from them by the real reader.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracetools.load import read_trace
from tracetools.model import Trace

Event = dict[str, Any]
MAIN = 100  # tid of the main thread
HOST = 1000  # pid of the process


def x(
    name: str, cat: str, ts: float | str, dur: float | str, *, tid: Any = MAIN, pid: Any = HOST, **args: Any
) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, corr: int = 0, *, stream: int = 7, **args: Any) -> Event:
    return x(name, "kernel", ts, dur, pid=0, tid=stream, device=0, stream=stream, correlation=corr, **args)


def memcpy(ts: float, dur: float, corr: int = 0, *, stream: int = 7) -> Event:
    return x(
        "Memcpy HtoD (Pinned -> Device)",
        "gpu_memcpy",
        ts,
        dur,
        pid=0,
        tid=stream,
        device=0,
        stream=stream,
        correlation=corr,
    )


def launch(ts: float, corr: int, dur: float = 2, *, name: str = "cudaLaunchKernel", tid: int = MAIN) -> Event:
    return x(name, "cuda_runtime", ts, dur, tid=tid, correlation=corr)


def op(name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> Event:
    return x(name, "cpu_op", ts, dur, tid=tid, **args)


def region(name: str, ts: float, dur: float, *, tid: int = MAIN) -> Event:
    return x(name, "user_annotation", ts, dur, tid=tid)


def step(number: int, ts: float, dur: float) -> Event:
    return region(f"ProfilerStep#{number}", ts, dur)


def document(events: Sequence[Event], *, rank: int | None = 0, world: int = 1, **top: Any) -> dict[str, Any]:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Test GPU"}],
        **info,
        **top,
        "traceEvents": list(events),
    }


def write(path: Path, events: Sequence[Event], **options: Any) -> Path:
    """A trace file; gzip where the name ends in .gz."""
    text = json.dumps(document(events, **options)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def trace(tmp_path: Path, events: Sequence[Event], **options: Any) -> Trace:
    return read_trace(write(tmp_path / "trace.json", events, **options))
