"""What a hooked call costs: python benchmarks/hooks.py [repeats]

Prints the time of one call in nanoseconds, the median of interleaved rounds with the spread of the middle half, and what it adds
to the plain call; everything in one run, so that the ratios hold on a busy machine, too. Needs torch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

CALLS = 20_000
ROUNDS = 15
LIMIT_NS = 500  # a dormant hook may add no more


class Timer:
    """What a training stack's timer does at least."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def start(self, label: str) -> None:
        self.begun[label] = time.perf_counter()

    def stop(self, label: str) -> float:
        return time.perf_counter() - self.begun.pop(label)


class HookedTimer(Timer):
    pass


def plain(value: int) -> int:
    return value


def main() -> None:
    import torch

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tracetools" / "collect" / "inject"))
    import tracetools_ranges  # noqa: F401  wrappers find it in sys.modules
    import tracetools_wrappers as wrappers

    recorder: Any = ModuleType("tracetools_recorder")
    recorder.recording = False
    recorder.region = torch.autograd.profiler.record_function
    sys.modules["tracetools_recorder"] = recorder
    hooked = wrappers.ranged(plain, "plain")
    HookedTimer.start = wrappers.timer_start(Timer.start, None)  # type: ignore[method-assign]
    HookedTimer.stop = wrappers.timer_stop(Timer.stop, None)  # type: ignore[method-assign]
    timer, hooked_timer = Timer(), HookedTimer()

    def span(value: int) -> int:
        with torch.autograd.profiler.record_function("plain"):
            return plain(value)

    def timed(of: Timer) -> Callable[[int], object]:
        def call(_: int) -> float:
            of.start("label")
            return of.stop("label")

        return call

    dormant: dict[str, Callable[[int], object]] = {
        "plain call": plain,
        "hooked, dormant": hooked,
        "record_function alone, no profiler": span,
        "timer start and stop": timed(timer),
        "the same, hooked, dormant": timed(hooked_timer),
    }
    times = _measure(dormant, rounds, CALLS)
    recorder.recording = True
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        recording = {
            "record_function alone, profiler on": span,
            "hooked, recording": hooked,
            "timer, hooked, recording": timed(hooked_timer),
        }
        times |= _measure(recording, rounds, CALLS // 20)
    _report(times)
    added = statistics.median(times["hooked, dormant"]) - statistics.median(times["plain call"])
    print(
        f"\na dormant hook adds {added:.0f} ns to a call (limit {LIMIT_NS}): {'ok' if added < LIMIT_NS else 'TOO MUCH'}"
    )
    raise SystemExit(added >= LIMIT_NS)


def _measure(functions: dict[str, Callable[[int], object]], rounds: int, calls: int) -> dict[str, list[float]]:
    """ns per call of each function, one figure a round; the rounds of all functions are interleaved."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter_ns()
            for i in range(calls):
                function(i)
            times[name].append((time.perf_counter_ns() - start) / calls)
    return times


def _report(times: dict[str, list[float]]) -> None:
    base = statistics.median(times["plain call"])
    print(f"{'ns per call':38} {'median':>9} {'middle half':>19} {'x plain':>8}")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:38} {middle:9,.0f} {low:8,.0f} to {high:7,.0f} {middle / base:8.1f}")


if __name__ == "__main__":
    main()
