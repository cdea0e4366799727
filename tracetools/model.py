"""The values that flow between the stages.

In: nothing. Out: frozen records; events live in numpy columns, once. All times are integer nanoseconds.
Knows nothing of files, JSON, profiles, torch or how anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


class Category(IntEnum):
    """What an event is, from its `cat` in any spelling of any Kineto release. Only KERNEL, MEMCPY, MEMSET are device work."""

    OTHER = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    GPU_USER_ANNOTATION = 3
    PYTHON_FUNCTION = 4
    RUNTIME = 5
    KERNEL = 6
    MEMCPY = 7
    MEMSET = 8
    SYNC = 9
    OVERHEAD = 10


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something rejected, repaired or odd in the input: never lost without being counted here."""

    kind: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class Thread:
    """One row of the trace: pid and tid as the file spells them (numbers, IP addresses, worker ids), and its name."""

    pid: str
    tid: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """What an event says of the collective it belongs to. None where the file does not say."""

    name: str | None = None
    group: str | None = None
    group_description: str | None = None
    group_ranks: str | None = None
    group_size: int | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    sequence: int | None = None
    input_type: str | None = None  # of its first tensor, as torch spells it ("c10::Half"): all that older traces say


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Complete slices of one process in columns, sorted by (start, longer first, file order). All arrays have one length.

    Ids that are absent: 0 in `correlation` and `external_id` (Kineto's own "none"), -1 elsewhere.
    """

    start: Int64  # ns since Trace.origin_ns
    end: Int64  # ns since Trace.origin_ns, >= start
    name: Int32  # index into Trace.names
    category: UInt8  # Category
    thread: Int32  # index into Trace.threads
    correlation: Int64
    external_id: Int64
    device: Int32
    stream: Int64
    size: Int64  # bytes moved
    dims: Int32  # index into Trace.dims ("Input Dims", verbatim JSON)
    python_id: Int64
    python_parent: Int64
    collective: Int32  # index into Trace.collectives

    def __len__(self) -> int:
        return len(self.start)

    def where(self, *categories: Category) -> Int64:
        """Row numbers of these categories, in time order."""
        mask = np.zeros(len(self), np.bool_)
        for c in categories:
            mask |= self.category == c
        return np.flatnonzero(mask)

    def shifted(self, by_ns: int) -> Events:
        """The same events `by_ns` later."""
        return replace(self, start=self.start + by_ns, end=self.end + by_ns) if by_ns else self


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group that a trace file lists: its ranks in order, and what its maker called it ("" where he did not)."""

    ranks: tuple[int, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What a trace file says about itself. None where it does not say."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    pid: int | None = None
    devices: tuple[str, ...] = ()
    base_ns: int | None = None  # baseTimeNanoseconds: wall clock of ts 0
    profiler: tuple[str, ...] = ()  # record_shapes, with_stack, profile_memory ... that were on
    rank_source: str | None = None  # where the rank was found: "distributedInfo", "file name"
    extra: Mapping[str, str] = field(default_factory=dict)  # NCCL, CUDA, HIP versions
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)  # of torch.distributed, by name


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One trace file, read. `origin_ns` is the clock value (wall clock if `info.base_ns` is known) of event time 0."""

    file: str
    events: Events
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    dims: tuple[str, ...]
    collectives: tuple[Collective, ...]
    info: TraceInfo
    origin_ns: int
    problems: tuple[Problem, ...] = ()

    def hta(self) -> Any:
        """These very events as a `hta.trace_analysis.TraceAnalysis` (imports HTA and pandas; see tracetools.hta)."""
        from tracetools.hta import analysis

        return analysis({self.info.rank or 0: self})

    def frame(self) -> pd.DataFrame:
        """These events as HTA's DataFrame (see tracetools.hta.frame)."""
        from tracetools.hta import frame

        table: pd.DataFrame = frame(self)[0]
        return table


@dataclass(frozen=True, slots=True)
class Card:
    """What one process worked on in one step. None where nobody said."""

    tokens: int | None = None
    padded_tokens: int | None = None
    sequences: int | None = None
    microbatches: int | None = None
    sum_squared_lengths: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """One OS process of a run and its trace. `clock_placed` is False where its clock cannot be set against the others'."""

    trace: Trace
    role: str  # driver, policy, generation, rank, other
    rank: int | None
    host: str | None
    pid: int | None
    world_size: int | None
    cards: Mapping[int, Card] = field(default_factory=dict)  # by step number
    problems: tuple[Problem, ...] = ()
    clock_placed: bool = True

    @property
    def label(self) -> str:
        """`rank 3`, `driver`, or the file's name: how reports call this process."""
        if self.role == "driver":
            return "driver"
        return f"{self.role} {self.rank}" if self.rank is not None else self.trace.file


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One training job: its processes, in order of rank, all event times on one clock that starts at `origin_ns`."""

    path: str
    processes: tuple[Process, ...]
    origin_ns: int
    stack: str | None = None  # stack profile named by run.json
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json as it stands
    problems: tuple[Problem, ...] = ()

    @property
    def driver(self) -> Process | None:
        return next((p for p in self.processes if p.role == "driver"), None)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of one process on its device's timeline: [start_ns, end_ns)."""

    name: str
    number: int | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Cause:
    """Part of a step's idle time. `process` is the role of the process that caused it; region None: no region was active."""

    process: str | None
    region: str | None
    kind: str  # host, sync, launch_latency, ray_transport, dependency, profiler_overhead, unknown
    ns: int
    filled_by: tuple[tuple[str, int], ...] = ()  # (operator or runtime call, ns), largest first, where region is None


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """compute + exposed_comm + exposed_memory + idle == wall; causes sum to idle."""

    name: str
    number: int | None
    start_ns: int
    wall_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    comm_ns: int
    overlapped_comm_ns: int
    comm_wait_ns: int | None
    kernels: int
    card: Card
    causes: tuple[Cause, ...]
    comm_causes: tuple[Cause, ...] = ()  # sum to exposed_comm_ns; none where there is one rank only


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """From the first device work to the end of the last, whatever the steps."""

    span_ns: int
    busy_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    kernels: int
    memcpys: int
    memsets: int


@dataclass(frozen=True, slots=True)
class KernelClass:
    name: str
    count: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class RegionUse:
    """What a region of the host's code cost within the steps, ns. Work durations are added up, over streams too."""

    region: str | None  # None: no region was active
    kernels: int  # launched in it (0 without a device)
    compute_ns: int
    comm_ns: int
    memory_ns: int
    idle_ns: int  # charged to it, whatever the kind; what other processes caused is not in it
    launch_bound_ns: int  # of idle_ns: kinds host and launch_latency
    sync_ns: int  # of idle_ns: kind sync


@dataclass(frozen=True, slots=True)
class SyncSite:
    """A place in the host's code that waits for the device, and the idle time that its waits caused within the steps."""

    call: str  # outermost waiting call: cudaStreamSynchronize, aten::item, ...
    operator: str | None  # innermost operator around it
    region: str | None
    source: str | None  # innermost Python frame of the user's own, where stacks were recorded
    calls: int  # that caused idle time
    idle_ns: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far the attribution reaches, in device nanoseconds and idle nanoseconds."""

    linked_ns: int
    unlinked_ns: int
    outside_steps_ns: int
    idle_explained_ns: int


@dataclass(frozen=True, slots=True)
class ProcessBreakdown:
    file: str
    role: str
    rank: int | None
    host: str | None
    pid: int | None
    device: str | None  # "cpu" where the host's operators stand in for the device
    world_size: int | None
    steps_from: str  # how the steps were found
    device_span: DeviceSpan | None
    steps: tuple[StepBreakdown, ...]
    kernel_classes: tuple[KernelClass, ...]  # within the steps
    coverage: Coverage
    problems: tuple[Problem, ...]
    regions: tuple[RegionUse, ...] = ()
    synchronisations: tuple[SyncSite, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveRank:
    """One rank's part in the collectives of a row: duration = wait + transfer. `last`: how often the others waited for it."""

    file: str
    rank: int | None
    count: int
    duration_ns: int
    wait_ns: int
    transfer_ns: int
    last: int


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All collectives of one group, operation, type and size. Durations are sums over ranks, bandwidths GB/s (10^9 bytes)."""

    type: str
    group: str
    ranks: int  # of the group
    recorded_ranks: int
    dtype: str | None
    bytes: int | None
    count: int
    duration_ns: int
    wait_ns: int
    transfer_ns: int
    longest_ns: int  # of a call
    median_ns: int
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    per_rank: tuple[CollectiveRank, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others waited for: compute + exposed_comm + exposed_memory + idle + not_recorded == meanwhile.

    `waited_ns` is what all others waited for it together; `meanwhile_ns` the time in which at least one did; causes sum to idle.
    """

    file: str
    role: str
    rank: int | None
    last: int  # in so many collectives it came last
    collectives: int  # of so many that it took part in
    waited_ns: int
    meanwhile_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    not_recorded_ns: int  # outside its steps
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """A file whose clock was held against the others'. `ahead_ns` was taken off its times; None: it could not be placed.

    low, high: between these causality allows the offset. `spread_ns`: how far the end of a collective is from the offset at most.
    """

    file: str
    role: str
    rank: int | None
    host: str | None
    ahead_ns: int | None
    low_ns: int
    high_ns: int
    spread_ns: int | None
    collectives: int


@dataclass(frozen=True, slots=True)
class RunBreakdown:
    path: str
    stack: str | None
    processes: tuple[ProcessBreakdown, ...]
    problems: tuple[Problem, ...]
    profiler: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    stragglers: tuple[Straggler, ...] = ()  # the one that cost most first
    clocks: tuple[Clock, ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()  # what run.json says it ran under: (what, value)

    @property
    def all_problems(self) -> tuple[Problem, ...]:
        """Of the run and of its processes; what several processes share is said once."""
        shared: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for process in self.processes:
            for p in process.problems:
                shared.setdefault((p.kind, p.detail), []).append((process.file, p.count))
        own = []
        for (kind, detail), where in shared.items():
            total = sum(count for _, count in where)
            if len(self.processes) > 1:
                detail = (
                    f"{where[0][0]}: {detail}"
                    if len(where) == 1
                    else f"{detail} (in {len(where)} of {len(self.processes)} files)"
                )
            own.append(Problem(kind, total, detail))
        return (*self.problems, *own)
