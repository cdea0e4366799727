"""A host thread: it computes, launches, waits, and is stopped at arbitrary points (garbage collections, the profiler's own work).

In: what training code asks of it. Out: slices of the host, work on streams. A stop comes after so much work of the thread, so that it
comes at the same place of the program whatever else is changed. Knows nothing of what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from simulator.device import Meeting, Stream, Work
from simulator.engine import Engine, Signal
from simulator.engine import Work as Running
from simulator.record import Record

RETURN_NS = 3_000  # from the end of what a call waits for until it returns
ANNOTATION, OPERATOR, RUNTIME = "user_annotation", "cpu_op", "cuda_runtime"


@dataclass(slots=True)
class Stop:
    """After every `every_ns` of a thread's own work it stands still for `last_ns`."""

    name: str
    every_ns: int
    last_ns: int
    left_ns: int
    by_profiler: bool = False


class Thread:
    """`launch_ns`: how long a launch call takes; `latency_ns`: from its start until the work may begin."""

    def __init__(
        self,
        engine: Engine,
        record: Record,
        tid: int,
        *,
        launch_ns: int = 0,
        latency_ns: int = 0,
        stops: tuple[Stop, ...] = (),
    ) -> None:
        self.engine = engine
        self._record = record
        self._tid = tid
        self._launch = launch_ns
        self._latency = latency_ns
        self._stops = [s for s in stops if s.last_ns > 0]
        self._ids = count(tid * 1_000_000 + 1)

    @contextmanager
    def span(self, name: str, category: str = ANNOTATION, correlation: int = 0) -> Iterator[None]:
        start = self.engine.now
        yield
        self._record.host(name, category, self._tid, start, self.engine.now, correlation)

    def spend(self, ns: int, counts_ns: int | None = None) -> Running:
        """Pass so much time, and be stopped where a stop is due. `counts_ns`: as so much work it counts, if not as `ns`."""
        counted = ns if counts_ns is None else counts_ns
        passed = done = 0
        while self._stops and done < counted:
            stop = min(self._stops, key=lambda s: s.left_ns)
            part = min(counted - done, stop.left_ns)
            done += part
            until = ns * done // counted
            yield until - passed
            passed = until
            for each in self._stops:
                each.left_ns -= part
            if not stop.left_ns:
                yield from self._stand_still(stop)
        yield ns - passed

    def _stand_still(self, stop: Stop) -> Running:
        stop.left_ns = stop.every_ns
        if stop.by_profiler:
            start = self.engine.now
            yield stop.last_ns
            self._record.overhead(stop.name, start, self.engine.now)
        else:
            with self.span(stop.name):
                yield stop.last_ns

    def operator(
        self, name: str, host_ns: int, stream: Stream, kernel: str, kernel_ns: int, more_ns: int = 0
    ) -> Running:
        """An operator that launches one kernel after so much work of the host, and `more_ns` that counts as no work."""
        with self.span(name, OPERATOR):
            yield from self.spend(host_ns + more_ns, host_ns)
            yield from self.launch(stream, kernel, kernel_ns)

    def launch(
        self,
        stream: Stream,
        name: str,
        ns: int,
        *,
        category: str = "kernel",
        call: str = "cudaLaunchKernel",
        meeting: Meeting | None = None,
        told: str = "",
    ) -> Running:
        """The call blocks while the stream's queue is full."""
        number = next(self._ids)
        with self.span(call, RUNTIME, number):
            while (room := stream.room()) is not None:
                yield room
            arrives = self.engine.now + self._latency
            stream.put(Work(name, category, ns, number, arrives, meeting, told))
            yield self._launch

    def order(self, first: Stream, then: Stream) -> Running:
        """What `then` is given from now on waits for what `first` has been given so far."""
        with self.span("cudaEventRecord", RUNTIME, next(self._ids)):
            event = first.last
            yield 1_000
        with self.span("cudaStreamWaitEvent", RUNTIME, next(self._ids)):
            then.wait_for(event)
            yield 1_000

    def item(self, stream: Stream) -> Running:
        """Read one number of the device: a copy, and a wait for it."""
        with self.span("aten::item", OPERATOR):
            yield from self.spend(2_000)
            with self.span("aten::_local_scalar_dense", OPERATOR):
                call = "cudaMemcpyAsync"
                yield from self.launch(
                    stream, "Memcpy DtoH (Device -> Pinned)", 1_500, category="gpu_memcpy", call=call
                )
                yield from self.synchronise(stream)

    def synchronise(self, stream: Stream) -> Running:
        number, start = next(self._ids), self.engine.now
        with self.span("cudaStreamSynchronize", RUNTIME, number):
            yield stream.last
            yield RETURN_NS
        self._record.device("Stream Sync", "cuda_sync", stream.number, start, self.engine.now, number)

    def blocking(self, name: str, ns: int) -> Running:
        """A runtime call that takes its time whatever the device does."""
        with self.span(name, RUNTIME, next(self._ids)):
            yield ns

    def join(self, signal: Signal) -> Running:
        """Do nothing until it fires."""
        yield signal
