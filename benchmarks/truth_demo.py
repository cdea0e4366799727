"""Known faults planted into real training, and where the analysis puts them.

In: causes and sizes. Out: on standard output, per stack, cause and size: how much of the planted time `diff` charges to the right rows,
and the largest wrong charge beside the noise of that row. The demo's halves run as they are (real megatron-core, Ray, torch.profiler);
B has the fault, A has not, otherwise they are the same. An A/A pair of each stack is the noise.

    python benchmarks/truth.py --demo [--stack ray|megatron] [--cause CAUSE ...] [--ms 40 160]
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tracetools import analyze, compare, load_run
from tracetools.demo.plant import OF_RAY, Plant
from tracetools.demo.run import run_demo
from tracetools.diff_records import Diff, Row
from tracetools.model import RunBreakdown
from tracetools.verdict import label

STEPS, RECORDED = 14, (4, 12)

# The rows that are a cause's own. A fault of one rank is that rank's idle time and the others' wait for it; both are right.
OWN: dict[str, Callable[[Row], bool]] = {
    "data_processing": lambda r: r.region == "data_processing",
    "ray_submit": lambda r: r.region == "ray_submit",
    "ray_transport": lambda r: r.kind == "ray_transport" or (r.part == "exposed_comm" and r.process == "driver"),
    "logging": lambda r: r.region == "logging",
    "setup": lambda r: r.region == "setup",
    "forward": lambda r: r.region == "forward",
    "optimizer": lambda r: r.region == "optimizer",
    "straggler": lambda r: r.region == "forward",
    "late_collective": lambda r: r.region == "metrics",
    "gc": lambda r: r.region in ("garbage_collection", "gc"),
}


def run_half(stack: str, plants: Sequence[Plant]) -> RunBreakdown:
    folder = Path(tempfile.mkdtemp(prefix="truth-"))
    try:
        (run,) = run_demo(folder / "out", halves=(stack,), plants=plants, steps=STEPS, recorded=RECORDED)
        return analyze(load_run(run))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def charged(diff: Diff, own: Callable[[Row], bool]) -> tuple[int, int, str]:
    """(ns of the right rows, ns of the largest other row, its name). Device time is no cause: it is left to the noise."""
    right = sum(r.delta_ns for r in diff.waterfall if own(r))
    others = [r for r in diff.waterfall if not own(r) and r.part != "compute"]
    worst = max(others, key=lambda r: abs(r.delta_ns))
    return right, worst.delta_ns, label(worst)


def noise(a: Diff) -> int:
    """The largest row of an A/A comparison that is no device time, ns."""
    return max(abs(r.delta_ns) for r in a.waterfall if r.part != "compute")


def report(stacks: Sequence[str], causes: Sequence[str], sizes: Sequence[float]) -> bool:
    """True where at least 95 % of every fault of 40 ms and above is charged to its cause, within the noise."""
    good, total, right_total = True, 0.0, 0.0
    for stack in stacks:
        base = run_half(stack, ())
        same = compare(base, run_half(stack, ()))
        floor = noise(same)
        apart = f"A/A: {same.step.delta / 1e6:+.2f} ms, largest row that is no compute {floor / 1e6:.2f} ms"
        print(f"{stack}: step {same.step.a / 1e6:.1f} ms; {apart}")
        print(f"  {'cause':<16}{'ms':>6}{'step':>10}{'charged':>10}{'right':>8}   largest other row")
        for cause in causes:
            if stack != "ray" and cause in OF_RAY:
                continue
            for size in sizes:
                diff = compare(base, run_half(stack, (Plant(cause, size),)))
                right, wrong, name = charged(diff, OWN[cause])
                share = right / (size * 1e6)
                total, right_total = total + size, right_total + min(right / 1e6, size)
                good &= size < 40 or abs(right - size * 1e6) <= max(0.05 * size * 1e6, floor)
                print(
                    f"  {cause:<16}{size:>6g}{diff.step.delta / 1e6:>+10.2f}{right / 1e6:>+10.2f}{100 * share:>7.1f}%"
                    f"   {name} {wrong / 1e6:+.2f} ms",
                    flush=True,
                )
    print(f"of {total:,.0f} ms planted, {100 * right_total / total:.1f} % is charged to its cause")
    return good
