"""Known faults planted into real training, and where the analysis puts them.

In: causes and sizes. Out: on standard output, per stack, cause and size: how much of the planted time `diff` charges to the right rows,
and the largest wrong charge beside the noise. The demo's halves run as they are (real megatron-core, Ray, torch.profiler). Steps take
turns within one run: one with each fault, then two without any, and again: what else the machine does meets all alike. In each such
round `diff` compares the step of a fault with those without; the table has medians over the rounds. What the two without a fault
differ in is the noise.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from truth_rows import COMPUTE, Rule, region, waterfall_by_cause

from tracetools import analyze, compare, load_run
from tracetools.demo.plant import OF_RAY, Plant
from tracetools.demo.run import run_demo
from tracetools.match import working
from tracetools.model import RunBreakdown

WARM_UP, LAST = 4, 2  # steps before and after the recorded ones
ROUNDS = 8
PLAIN = 2  # steps without a fault per round
JUDGED_MS = 40.0  # from here on a fault must be found
SHARE, LEAK = 0.95, 0.03

# The rows that are a cause's own. A fault of one rank is that rank's idle time and the others' wait for it; both are right.
OWN: dict[str, Rule] = {
    "data_processing": region("data_processing"),
    "ray_submit": region("ray_submit"),
    "ray_transport": lambda r: r.kind == "ray_transport" or (r.process == "driver" and r.region == "ray_wait"),
    "logging": region("logging"),
    "setup": region("setup"),
    "forward": region("forward"),
    "optimizer": region("optimizer"),
    "straggler": region("forward"),
    "late_collective": region("metrics"),
    "gc": region("garbage_collection"),
}


def run_half(stack: str, plants: Sequence[Plant], steps: int) -> RunBreakdown:
    folder = Path(tempfile.mkdtemp(prefix="truth-"))
    try:
        recorded = (WARM_UP, WARM_UP + steps)
        (run,) = run_demo(
            folder / "out", halves=(stack,), plants=plants, steps=WARM_UP + steps + LAST, recorded=recorded
        )
        return analyze(load_run(run))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def steps_of(run: RunBreakdown, every: int, *slots: int, only: range | None = None) -> RunBreakdown:
    """The run with these steps only: number modulo `every`, and in `only`."""

    def wanted(number: int | None) -> bool:
        return number is not None and number % every in slots and (only is None or number in only)

    processes = [replace(p, steps=tuple(s for s in p.steps if wanted(s.number))) for p in run.processes]
    return replace(run, processes=tuple(processes))


def report(stacks: Sequence[str], causes: Sequence[str], sizes: Sequence[float], rounds: int = ROUNDS) -> bool:
    """True where of every fault of 40 ms and above 95 % is charged to its cause and at most 3 % to another, or within the noise."""
    good = [
        _of_stack(stack, [c for c in causes if stack == "ray" or c not in OF_RAY], size, rounds)
        for stack in stacks
        for size in sizes
    ]
    return all(good)


def _of_stack(stack: str, causes: Sequence[str], size: float, rounds: int) -> bool:
    every = len(causes) + PLAIN
    plants = [Plant(cause, size, slot, every) for slot, cause in enumerate(causes)]
    run = run_half(stack, plants, rounds * every)
    plain = [s.wall_ns for p in working(steps_of(run, every, every - 1)) for s in p.steps]
    print(
        f"{stack}, {size:g} ms: a step without takes {statistics.median(plain) / 1e6:.1f} ms; {rounds} steps of each kind; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"  {'cause':<16}{'step':>10}{'charged':>10}{'share':>8}{'noise':>8}   largest other cause")
    all_good, right = True, 0.0
    for slot, cause in enumerate(causes):
        step, charged, others = _charged(run, every, slot, (every - 2, every - 1), OWN[cause])
        _, same, same_others = _charged(run, every, every - 2, (every - 1,), OWN[cause])
        noise = max(abs(same), *map(abs, same_others.values()))
        other, wrong = max(others.items(), key=lambda x: abs(x[1]))
        good = abs(charged - size) <= max((1 - SHARE) * size, noise) and abs(wrong) <= max(LEAK * size, noise)
        all_good &= good or size < JUDGED_MS
        right += max(0.0, min(charged, size))
        print(
            f"  {cause:<16}{step:>+10.2f}{charged:>+10.2f}{charged / size:>8.1%}{noise:>8.2f}   {other} {wrong:+.2f} ms"
            f"{'' if good else '   beyond the noise'}"
        )
    print(
        f"  of {size * len(causes):g} ms planted {right / size / len(causes):.1%} is charged to its cause", flush=True
    )
    return all_good


def _charged(
    run: RunBreakdown, every: int, slot: int, plain: tuple[int, ...], own: Rule
) -> tuple[float, float, dict[str, float]]:
    """(difference of the step, charged to its own rows, to each other cause), ms: medians over the rounds.

    Device time, here that of operators, is no cause: no sleep makes any, and on a busy machine it varies by more than is planted.
    """
    steps: list[float] = []
    mine: list[float] = []
    others: dict[str, list[float]] = {}
    for first in range(0, max(s.number or 0 for p in run.processes for s in p.steps) + 1, every):
        numbers = range(first, first + every)
        a, b = (steps_of(run, every, *slots, only=numbers) for slots in (plain, (slot,)))
        if not all(p.steps for side in (a, b) for p in working(side)):
            continue
        diff = compare(a, b)
        steps.append(diff.step.delta / 1e6)
        mine.append(sum(r.delta_ns for r in diff.waterfall if own(r)) / 1e6)
        for cause, ns in waterfall_by_cause(diff, own).items():
            others.setdefault(cause, []).append(ns / 1e6)
    rounds = len(steps)
    middle = {c: statistics.median([*ms, *[0.0] * (rounds - len(ms))]) for c, ms in others.items() if c != COMPUTE}
    return statistics.median(steps), statistics.median(mine), middle
