"""One rank: a main thread, autograd's thread, a stream for compute and one for communication.

In: a `Program` and the rank's number. Out: the rank's steps as generators for the engine. Regions have the names that a profile of
tracetools (or torch itself) gives them. Knows nothing of who calls for a step.
"""

from __future__ import annotations

import json

from simulator.device import Meeting, Stream
from simulator.engine import Engine, Signal
from simulator.engine import Work as Running
from simulator.host import RUNTIME, Stop, Thread
from simulator.program import MS, US, Program
from simulator.record import Record

COMPUTE, COMM = 7, 20
_ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_OF_TORCH = {  # what an uninstrumented job is annotated with
    "forward": "DistributedDataParallel.forward",
    "optimizer": "Optimizer.step#AdamW.step",
    "zero_grad": "Optimizer.zero_grad#AdamW.zero_grad",
    "data_loading": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
}


class Group:
    """The process group of all ranks: the collectives of the run, by number."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.ranks = ranks
        self._engine = engine
        self._meetings: dict[int, Meeting] = {}

    def meeting(self, number: int, transfer_ns: int) -> Meeting:
        if number not in self._meetings:
            self._meetings[number] = Meeting(self._engine, self.ranks, transfer_ns)
        return self._meetings[number]


class Rank:
    """`last_end` is when its device finished, once the run is over."""

    def __init__(self, engine: Engine, program: Program, number: int, group: Group) -> None:
        p = self.program = program
        self.number = number
        self.is_last = number == p.ranks - 1
        self._group = group
        self._sequence = 0
        pid = 1000 + number
        distributed = {"backend": "nccl", "rank": number, "world_size": p.ranks}
        about = {"deviceProperties": [{"id": 0, "name": "Simulated GPU"}], "distributedInfo": distributed}
        self.record = Record(pid, 17 * number, about)
        self._engine = engine
        times = {"launch_ns": p.launch_ns, "latency_ns": p.latency_ns}
        self.main = Thread(engine, self.record, pid, stops=self._stops(), **times)
        self.autograd = Thread(engine, self.record, pid + 500, stops=self._stops(), **times)
        self.compute = Stream(engine, self.record, COMPUTE, p.depth, p.gap_ns)
        self.comm = Stream(engine, self.record, COMM, p.depth, p.gap_ns)

    def _stops(self) -> tuple[Stop, ...]:
        p, every = self.program, self.program.gc_every_ns
        gc = p.amount("gc") + (p.amount("rank_gc") if self.is_last and p.ranks > 1 else 0)
        overhead = p.amount("profiler_overhead")
        return (
            Stop("garbage_collection", every, gc, every * 2 // 3),
            Stop("Activity Buffer Request", 2 * every, overhead, every // 2, by_profiler=True),
        )

    def name(self, region: str) -> str:
        return _OF_TORCH.get(region, region) if self.program.stack == "torch" else region

    def spend(self, thread: Thread, cause: str) -> Running:
        """What a cause takes, which counts as its natural amount."""
        yield from thread.spend(self.program.amount(cause), self.program.natural.get(cause, 0))

    def train(self, step: int) -> Running:
        """One optimizer step, without what surrounds it."""
        p, main = self.program, self.main
        with main.span("setup"):
            yield from self.spend(main, "setup")
        with main.span("forward_backward"):
            for microbatch in range(p.microbatches):
                yield from self._forward(step)
                yield from self._backward(step, microbatch == p.microbatches - 1)
            if p.ranks > 1:
                with main.span("grad_sync"):
                    yield from main.order(self.comm, self.compute)
        yield from self._optimize(step)
        with main.span("metrics"):
            late = p.amount("late_collective") if self.is_last and p.ranks > 1 else 0
            yield from main.spend(20 * US + late, 20 * US)
            if p.ranks > 1:
                yield from self._all_reduce(main, 16, 10 * US)
                yield from main.order(self.comm, self.compute)
            yield from main.item(self.compute)

    def _factors(self, step: int) -> tuple[int, int]:
        host, device = self.program.uneven.get((self.number, step), (0, 0))
        return 1000 + host, 1000 + device

    def _forward(self, step: int) -> Running:
        p, main = self.program, self.main
        host, device = self._factors(step)
        launches = len(p.forward) * p.microbatches
        slower = p.amount("straggler") if self.is_last and p.ranks > 1 else 0
        delay = (p.amount("forward") + slower) // launches
        longer = (p.amount("compute") + (p.amount("slow_rank") if self.is_last and p.ranks > 1 else 0)) // launches
        with main.span(self.name("forward")):
            for i, op in enumerate(p.forward):
                kernel_ns = op.kernel_ns * device // 1000 + longer
                yield from main.operator("aten::mm", op.host_ns * host // 1000, self.compute, "gemm_bf16_nn", kernel_ns)
                yield from main.spend(delay, 0)  # Python between two operators
                if p.tensor_parallel and i % 2:
                    yield from main.order(self.compute, self.comm)
                    yield from self._all_reduce(main, 1 << 20, 15 * US)
                    yield from main.order(self.comm, self.compute)
            if p.item_per_microbatch:
                yield from main.item(self.compute)

    def _backward(self, step: int, last: bool) -> Running:
        """The main thread waits in it; autograd's own launches."""
        done = Signal()
        with self.main.span("backward"):
            yield from self.main.spend(10 * US)
            self._engine.spawn(self._autograd(step, last, done))
            yield done

    def _autograd(self, step: int, last: bool, done: Signal) -> Running:
        p, thread = self.program, self.autograd
        host, device = self._factors(step)
        delay = p.amount("backward") // (len(p.backward) * p.microbatches)
        ready = (
            {(b + 1) * len(p.backward) // p.buckets - 1 for b in range(p.buckets)} if last and p.ranks > 1 else set()
        )
        for i, op in enumerate(p.backward):
            kernel_ns = op.kernel_ns * device // 1000
            with thread.span("autograd::engine::evaluate_function: MmBackward0", "cpu_op"):
                host_ns = op.host_ns * host // 1000
                yield from thread.operator("aten::mm", host_ns, self.compute, "gemm_bf16_tn", kernel_ns, delay)
            if i in ready:
                yield from thread.order(self.compute, self.comm)
                yield from self._all_reduce(thread, 1 << 24, p.transfer_ns + p.amount("transfer") // p.buckets)
        self._engine.fire(done)

    def _all_reduce(self, thread: Thread, elements: int, transfer_ns: int) -> Running:
        self._sequence += 1
        ranks = self._group.ranks
        told = {
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": elements, "Out msg nelems": elements,
            "Group size": ranks, "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(ranks))), "Seq": self._sequence,
        }  # fmt: skip
        meeting = self._group.meeting(self._sequence, transfer_ns)
        with thread.span("nccl:all_reduce"):
            yield from thread.spend(5 * US)
            yield from thread.launch(self.comm, _ALL_REDUCE, 0, meeting=meeting, told=json.dumps(told)[1:-1])

    def _optimize(self, step: int) -> Running:
        p, main = self.program, self.main
        host, device = self._factors(step)
        with main.span(self.name("optimizer")):
            yield from self.spend(main, "optimizer")
            if p.amount("cuda_free"):
                yield from main.blocking("cudaFree", p.amount("cuda_free"))
            for op in p.optimizer:
                kernel_ns = op.kernel_ns * device // 1000
                yield from main.operator(
                    "aten::_foreach_add_", op.host_ns * host // 1000, self.compute, "multi_tensor_apply", kernel_ns
                )
        with main.span(self.name("zero_grad")):
            yield from main.operator("aten::zero_", 8 * US, self.compute, "FillFunctor", 5 * US)


__all__ = ["MS", "RUNTIME", "Group", "Rank"]
