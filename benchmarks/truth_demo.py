"""Known faults planted into real training, and where the analysis puts them.

In: causes and sizes. Out: on standard output, per stack, cause and size: how much of the planted time `diff` charges to the right rows,
and the largest wrong charge beside the noise. The demo's halves run as they are (real megatron-core, Ray, torch.profiler); B has the
fault, A has not, otherwise they are the same. A is run anew for every cause; what these runs differ in is the noise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from truth_rows import region, waterfall_by_cause

from tracetools import analyze, compare, load_run
from tracetools.demo.plant import OF_RAY, Plant
from tracetools.demo.run import run_demo
from tracetools.diff_records import Row
from tracetools.model import RunBreakdown

STEPS, RECORDED = 14, (4, 12)
JUDGED_MS = 40.0  # from here on a fault must be found
SHARE, LEAK = 0.95, 0.03

# The rows that are a cause's own. A fault of one rank is that rank's idle time and the others' wait for it; both are right.
OWN: dict[str, Callable[[Row], bool]] = {
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


def run_half(stack: str, plants: Sequence[Plant]) -> RunBreakdown:
    folder = Path(tempfile.mkdtemp(prefix="truth-"))
    try:
        (run,) = run_demo(folder / "out", halves=(stack,), plants=plants, steps=STEPS, recorded=RECORDED)
        return analyze(load_run(run))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(stacks: Sequence[str], causes: Sequence[str], sizes: Sequence[float]) -> bool:
    """True where of every fault of 40 ms and above 95 % is charged to its cause and at most 3 % to another, or within the noise."""
    good = [_of_stack(stack, [c for c in causes if stack == "ray" or c not in OF_RAY], sizes) for stack in stacks]
    return all(good)


def _of_stack(stack: str, causes: Sequence[str], sizes: Sequence[float]) -> bool:
    base = run_half(stack, ())
    print(
        f"{stack}: {len(base.processes)} processes, {RECORDED[1] - RECORDED[0]} steps recorded, load {os.getloadavg()[0]:.1f}"
    )
    print(f"  {'cause':<16}{'ms':>6}{'step':>10}{'charged':>10}{'share':>8}{'noise':>8}   largest other")
    good, planted, right = True, 0.0, 0.0
    for cause in causes:
        before, base = base, run_half(stack, ())
        noise = _noise(before, base, OWN[cause])
        for size in sizes:
            diff = compare(base, run_half(stack, (Plant(cause, size),)))
            charged = sum(r.delta_ns for r in diff.waterfall if OWN[cause](r)) / 1e6
            other, wrong = max(waterfall_by_cause(diff, OWN[cause]).items(), key=lambda x: abs(x[1]))
            if size >= JUDGED_MS:
                planted, right = planted + size, right + max(0.0, min(charged, size))
                good &= abs(charged - size) <= max((1 - SHARE) * size, noise) and abs(wrong) / 1e6 <= max(
                    LEAK * size, noise
                )
            print(
                f"  {cause:<16}{size:>6g}{diff.step.delta / 1e6:>+10.2f}{charged:>+10.2f}{charged / size:>8.1%}{noise:>8.2f}"
                f"   {other} {wrong / 1e6:+.2f} ms",
                flush=True,
            )
    if planted:
        print(
            f"  of {planted:,.0f} ms planted at {JUDGED_MS:g} ms and above, {right / planted:.1%} is charged to its cause"
        )
    return good


def _noise(a: RunBreakdown, b: RunBreakdown, own: Callable[[Row], bool]) -> float:
    """What two runs without a fault differ in at most in one cause, ms."""
    diff = compare(a, b)
    rows: list[int] = [*waterfall_by_cause(diff, own).values(), sum(r.delta_ns for r in diff.waterfall if own(r))]
    return max(abs(ns) for ns in rows) / 1e6
