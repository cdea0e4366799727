"""What a cause is worth, and what the analysis says it is, on simulated jobs whose truth is known.

In: how many programs, from which seed. Out: on standard output, per cause: the error of its rows, the largest wrong charge, what leaks.
Two questions per program. `diff`: B is A with more of one cause; do the cause's rows in `diff` have the difference of the steps?
`breakdown`: what would the step be without this cause at all; is that what the rows of `breakdown` charge to it? (Only where the cause
is the only thing that is changed by taking it away: not for slower kernels and transfers, which keep their natural part.)
Errors are relative to the true worth, but to at least 1 % of the step: below that `diff` itself speaks of no difference.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from simulator.job import run
from simulator.program import Program, random_program
from truth_rows import Rule, region, waterfall_by_cause

from tracetools import analyze, compare, load_run
from tracetools.model import RunBreakdown

LEAST = 0.01  # of the step: errors are relative to the worth, or to this
TARGET_MEDIAN, TARGET_95 = 0.02, 0.10


# The rows that are a cause's own. What one rank does is its own idle (or compute) time, and the others' wait for it.
OWN: dict[str, Rule] = {
    "data_processing": region("data_processing"),
    "ray_submit": region("ray_submit"),
    "ray_transport": lambda r: r.kind == "ray_transport" or (r.process == "driver" and r.region == "ray_wait"),
    "driver_gc": lambda r: r.region == "garbage_collection" and r.process == "driver",
    "data_loading": region("data_loading"),
    "logging": region("logging"),
    "setup": region("setup"),
    "forward": region("forward"),
    "backward": region("backward"),
    "optimizer": region("optimizer"),
    "gc": region("garbage_collection"),
    "cuda_free": lambda r: r.kind == "sync" or (r.kind == "wait" and r.region == "optimizer"),
    "profiler_overhead": lambda r: (
        r.kind == "profiler_overhead" or (r.kind == "wait" and r.process == "peer" and r.region is None)
    ),
    "compute": lambda r: r.part == "compute" or r.kind == "wait_compute",
    "straggler": region("forward"),
    "slow_rank": lambda r: r.part == "compute" or r.kind == "wait_compute",
    "late_collective": region("metrics"),
    "rank_gc": region("garbage_collection"),
    "transfer": lambda r: r.kind in ("transfer", "wait_comm"),
}
REMOVABLE = (
    "data_processing",
    "ray_submit",
    "driver_gc",
    "data_loading",
    "logging",
    "setup",
    "gc",
    "rank_gc",
    "profiler_overhead",
)

DEVICE = ("compute", "slow_rank", "transfer")


@dataclass(frozen=True, slots=True)
class Finding:
    """One program with one cause made larger. ns per step."""

    seed: int
    cause: str
    planted_ns: int
    step_ns: float  # without it
    worth_ns: float
    charged_ns: int
    leak_ns: int  # the largest other cause
    leak: str
    removed_ns: float | None  # worth of all of the cause, and what breakdown charges to it
    removed_charge_ns: int | None

    @property
    def error(self) -> float:
        return abs(self.charged_ns - self.worth_ns) / max(abs(self.worth_ns), LEAST * self.step_ns)

    @property
    def removed_error(self) -> float | None:
        if self.removed_ns is None or self.removed_charge_ns is None:
            return None
        return abs(self.removed_charge_ns - self.removed_ns) / max(self.removed_ns, LEAST * self.step_ns)


def examine(seed: int, cause: str | None = None) -> Finding:
    """The seed decides the program, the cause (in turn) and its size: 5 to 100 % of the step."""
    program = random_program(seed)
    pick = random.Random(-seed)
    causes = program.causes()
    cause = cause or causes[seed % len(causes)]
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        a, step = _run(program, Path(folder) / "a")
        amount = int(step * pick.uniform(0.05, 1.0))
        larger = program.having(cause, program.amount(cause) + amount)
        b, slower = _run(larger, Path(folder) / "b")
    diff = compare(a, b)
    own = OWN[cause]
    charged = sum(r.delta_ns for r in diff.waterfall if own(r))
    leak, leak_ns = max(waterfall_by_cause(diff, own).items(), key=lambda other: abs(other[1]))
    removed = charge = None
    if cause in REMOVABLE:
        removed = slower - float(run(larger.having(cause, 0)).step_ns)
        charge = sum(r.b_ns for r in diff.waterfall if own(r))
    return Finding(seed, cause, amount, step, slower - step, charged, leak_ns, leak, removed, charge)


def _run(program: Program, folder: Path) -> tuple[RunBreakdown, float]:
    folder.mkdir()
    job = run(program, folder)
    return analyze(load_run(folder)), float(job.step_ns)


def report(programs: int, first: int = 0, show: int = 0, only: Sequence[str] = ()) -> bool:
    """True where the median and the 95th percentile of all errors are within the targets."""
    found = [examine(seed) for seed in range(first, first + programs)]
    return summary([f for f in found if not only or f.cause in only], show)


def summary(found: Sequence[Finding], show: int) -> bool:
    print(
        f"{'cause':<19}{'programs':>9}{'median':>9}{'95th':>8}{'removed':>9}{'95th':>8}   largest wrong charge, of the worth"
    )
    for cause in dict.fromkeys(sorted(f.cause for f in found)):
        mine = [f for f in found if f.cause == cause]
        worst = max(mine, key=lambda f: abs(f.leak_ns) / max(f.worth_ns, LEAST * f.step_ns))
        share = worst.leak_ns / max(worst.worth_ns, LEAST * worst.step_ns)
        removed = [f.removed_error for f in mine if f.removed_error is not None]
        print(
            f"{cause:<19}{len(mine):>9}{_percentiles([f.error for f in mine])}"
            f"{_percentiles(removed) if removed else '       -       -'}   {share:>+7.1%} {worst.leak} (seed {worst.seed})"
        )
    host = [f for f in found if f.cause not in DEVICE]
    print(f"{'but device work':<19}{len(host):>9}{_percentiles([f.error for f in host])}")
    errors = [f.error for f in found]
    removed = [f.removed_error for f in found if f.removed_error is not None]
    right = sum(min(f.charged_ns, f.worth_ns) for f in found if f.worth_ns > 0)
    planted = sum(f.worth_ns for f in found if f.worth_ns > 0)
    print(f"{'all':<19}{len(found):>9}{_percentiles(errors)}{_percentiles(removed)}")
    print(f"{100 * right / planted:.2f} % of what the causes are worth is charged to them")
    for f in sorted(found, key=lambda f: -f.error)[:show]:
        print(
            f"  seed {f.seed} {f.cause}: planted {f.planted_ns}, worth {f.worth_ns:.0f}, charged {f.charged_ns}; {f.leak} {f.leak_ns:+}"
        )
    return statistics.median(errors) <= TARGET_MEDIAN and _percentile(errors) <= TARGET_95


def _percentiles(errors: Sequence[float]) -> str:
    return f"{100 * statistics.median(errors):>8.2f}%{100 * _percentile(errors):>7.1f}%"


def _percentile(errors: Sequence[float], share: float = 0.95) -> float:
    """The smallest error that this share of them does not exceed."""
    ordered = sorted(errors)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]
