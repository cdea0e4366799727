"""What is simulated: a training job as plain numbers, and random ones that look like real jobs.

In: a seed. Out: a `Program`. Every number of a program is fixed before it runs, so that the same program with one cause changed
differs in nothing else. Times in ns. Knows nothing of how a program is run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

US, MS = 1_000, 1_000_000

# Where a cause may be planted, and what that does; an amount is ns per step.
OF_RAY = {
    "data_processing": "the driver prepares the data for longer",
    "ray_submit": "the driver takes longer to submit",
    "ray_transport": "calls (or results) are longer on their way",
    "driver_gc": "garbage collections of the driver",
}
OF_PLAIN = {"data_loading": "every rank waits longer for its data loader"}
OF_BOTH = {
    "logging": "the driver (or the ranks) log for longer",
    "setup": "every rank prepares for longer before the model runs",
    "forward": "more host time between the kernels of forward",
    "backward": "more host time between the kernels of backward, on autograd's thread",
    "optimizer": "more host time before the optimizer's kernels",
    "gc": "garbage collections of the ranks",
    "cuda_free": "calls that free device memory, on every rank",
    "profiler_overhead": "the profiler stops the ranks' threads for longer",
    "compute": "slower kernels in forward",
}
OF_RANKS = {  # need at least two
    "straggler": "more host time in forward, on the last rank only",
    "slow_rank": "slower kernels in forward, on the last rank only",
    "late_collective": "the last rank is later to enter the last all-reduce",
    "rank_gc": "garbage collections of the last rank only",
    "transfer": "slower transfers in all-reduces",
}
CAUSES = {**OF_RAY, **OF_PLAIN, **OF_BOTH, **OF_RANKS}


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: so much host time, then the launch of a kernel that lasts so long."""

    host_ns: int
    kernel_ns: int


@dataclass(frozen=True, slots=True)
class Program:
    """`uneven`: per mille by which a rank's host (first) and device (second) are slower, per step."""

    stack: str = "plain"  # plain: torchrun, marked by tracetools; torch: as it comes; ray: a driver and actors
    ranks: int = 1
    steps: int = 3
    microbatches: int = 1
    forward: tuple[Op, ...] = (Op(10 * US, 50 * US),) * 4
    backward: tuple[Op, ...] = (Op(10 * US, 90 * US),) * 4
    optimizer: tuple[Op, ...] = (Op(20 * US, 30 * US),) * 2
    launch_ns: int = 3 * US
    latency_ns: int = 6 * US
    gap_ns: int = 0  # between two kernels that are both there
    depth: int = 1024  # of a launch queue
    transfer_ns: int = 200 * US  # of a bucket's all-reduce
    buckets: int = 2
    tensor_parallel: bool = False  # an all-reduce after every other operator of forward, which the next one waits for
    item_per_microbatch: bool = False
    result_ns: int = 300 * US  # from an actor's end to the driver
    call_ns: int = 300 * US  # from the driver to an actor
    transport: str = "all"  # which calls a ray_transport delays: all, one, back (the results)
    logs: str = "all"  # which plain ranks log: all, first
    gc_every_ns: int = 5 * MS  # of a thread's own work
    skew_ns: tuple[int, ...] = ()  # per rank: when it starts
    uneven: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (rank, step) -> per mille
    natural: Mapping[str, int] = field(default_factory=dict)  # cause -> ns per step
    changed: Mapping[str, int] = field(default_factory=dict)  # the same, of causes that have been changed

    def amount(self, cause: str) -> int:
        return self.changed.get(cause, self.natural.get(cause, 0))

    def having(self, cause: str, ns: int) -> Program:
        """The same, with this much of a cause. Stops come where they came before."""
        return replace(self, changed={**self.changed, cause: ns})

    def causes(self) -> tuple[str, ...]:
        """What can be planted into it."""
        own = OF_RAY if self.stack == "ray" else OF_PLAIN
        return (*own, *OF_BOTH, *(OF_RANKS if self.ranks > 1 else ()))


def random_program(seed: int) -> Program:
    """Launch-bound, compute-bound, communication-bound and driver-bound jobs, and what lies between."""
    pick = random.Random(seed)
    bound = pick.choice(("launch", "compute", "communication", "driver", "mixed"))
    stack = pick.choice(("ray", "ray", "plain", "torch"))
    ranks = pick.choice((1, 2, 2, 3, 4))
    steps = 3
    layers, ops = pick.randint(1, 4), pick.randint(3, 7)
    length = {
        "launch": (3, 9),
        "compute": (60, 300),
        "communication": (30, 120),
        "driver": (20, 120),
        "mixed": (5, 200),
    }[bound]
    host = {"launch": (12, 40)}.get(bound, (6, 20))

    def kernels(n: int, longer: int) -> tuple[Op, ...]:
        kinds = [Op(pick.randint(*host) * US + pick.randrange(1000), longer * pick.randint(*length) * US // 2 + pick.randrange(1000))
                 for _ in range(ops)]  # fmt: skip
        return tuple(kinds[i % ops] for i in range(n))

    share = (20, 80) if bound == "communication" else (2, 30)
    forward = kernels(layers * ops, 2)
    backward = kernels(layers * ops * 2, 2)
    buckets = pick.randint(1, 3)
    device_ns = sum(o.kernel_ns for o in backward)
    return Program(
        stack=stack,
        ranks=ranks,
        steps=steps,
        microbatches=pick.choice((1, 1, 2, 4)),
        forward=forward,
        backward=backward,
        optimizer=kernels(pick.randint(2, 8), 1),
        launch_ns=pick.randint(2_000, 5_000),
        latency_ns=pick.randint(5_000, 12_000),
        gap_ns=pick.choice((0, 0, 700, 1_300)),
        depth=pick.choice((16, 64, 1024, 1024)),
        transfer_ns=device_ns * pick.randint(*share) // 100 // buckets + 5 * US,
        buckets=buckets,
        tensor_parallel=ranks > 1 and pick.random() < 0.25,
        item_per_microbatch=pick.random() < 0.2,
        result_ns=pick.randint(100, 900) * US,
        call_ns=pick.randint(100, 900) * US,
        transport=pick.choice(("all", "one", "back")),
        logs=pick.choice(("all", "first")),
        gc_every_ns=pick.randint(1_000, 4_000) * US,
        skew_ns=tuple(pick.randrange(100 * US) for _ in range(ranks)),
        uneven={(r, s): (pick.randrange(40), pick.randrange(15)) for r in range(ranks) for s in range(steps)},
        natural=_natural(pick, bound == "driver"),
    )


def _natural(pick: random.Random, slow_driver: bool) -> dict[str, int]:
    """What a job has of each cause by itself."""
    scale = 10 if slow_driver else 1

    def some(low: int, high: int, chance: float = 1.0) -> int:
        return pick.randint(low, high) * US + pick.randrange(1000) if pick.random() < chance else 0

    return {
        "data_processing": scale * some(50, 800),
        "ray_submit": scale * some(100, 400),
        "logging": some(30, 400),
        "setup": some(20, 300, 0.5),
        "optimizer": some(20, 200),
        "data_loading": some(50, 500),
        "gc": some(100, 600, 0.2),
        "profiler_overhead": some(50, 300, 0.2),
        "cuda_free": some(20, 200, 0.2),
    }
