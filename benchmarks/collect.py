"""What `tracetools collect` costs a training job. Run: python benchmarks/collect.py [ROUNDS]

Two questions, each answered by pairs of processes that take turns (ABBA), with the median step of each process and the 95 % interval
of the median ratio by bootstrap over the pairs:
  idle        the same job under `collect --idle` against without collect
  recording   steps that `collect` records against the same steps under plain torch.profiler with the same options
The job makes about 1,500 small operators a step, on one thread: what a hook or the profiler costs shows more than in a real step.
The two calls of a step that a profile hooks, a region and the step's mark are in all of them. An A/A row says what the machine's
noise alone makes of it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROUNDS = 8
STEPS = 60
FIRST, STOP = 20, 40  # recorded, and compared in the second question
JOB = """
import json, sys, time
import torch
import tracetools
import benchmark_stack as stack

torch.set_num_threads(1)
mode, first, stop, steps, out = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
times, profiler = [], None
for number in range(steps):
    if mode == "profiler" and number == first:
        from torch.profiler import ProfilerActivity, profile
        for _ in range(2):  # the first one of a process takes seconds
            profiler = profile(activities=[ProfilerActivity.CPU])
            profiler.start()
            if _ == 0:
                profiler.stop()
    if profiler is not None and number == stop:
        profiler.stop()
    started = time.perf_counter_ns()
    with tracetools.step(tokens=1):
        with tracetools.region("data"):
            batch = stack.fetch()
        stack.train(batch)
    times.append(time.perf_counter_ns() - started)
json.dump(times, open(out, "w"))
"""
STACK = """
import torch
weight = torch.full((32, 32), 0.01)

def fetch():
    return torch.ones(32, 32)

def train(batch):
    for _ in range(500):
        batch = torch.relu(batch @ weight) + 1
    return batch
"""
PROFILE = """
name = "benchmark"
extends = "torch"
[[hook]]
target = "benchmark_stack:fetch"
region = "fetch"
[[hook]]
target = "benchmark_stack:train"
region = "train"
"""


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        (folder / "benchmark_stack.py").write_text(STACK)
        (folder / "profile.toml").write_text(PROFILE)
        all_steps, recorded = slice(5, STEPS), slice(FIRST + 1, STOP - 1)
        for title, a, b, steps in (
            ("A/A: without collect, twice", plain, plain, all_steps),
            ("idle: without collect, under collect --idle", plain, idle, all_steps),
            ("recording: torch.profiler, collect", profiler, recording, recorded),
        ):
            print(title)
            compare(folder, a, b, steps, rounds)


def plain(folder: Path, out: Path) -> list[str]:
    return [sys.executable, str(folder / "job.py"), "plain", str(FIRST), str(STOP), str(STEPS), str(out)]


def profiler(folder: Path, out: Path) -> list[str]:
    return [sys.executable, str(folder / "job.py"), "profiler", str(FIRST), str(STOP), str(STEPS), str(out)]


def idle(folder: Path, out: Path) -> list[str]:
    return [*_collect(folder, out), "--idle", "--", *plain(folder, out)]


def recording(folder: Path, out: Path) -> list[str]:
    return [*_collect(folder, out), "--steps", f"{FIRST}:{STOP}", "--", *plain(folder, out)]


def _collect(folder: Path, out: Path) -> list[str]:
    options = ["--profile", str(folder / "profile.toml"), "--out", str(out.with_suffix(".run"))]
    return [sys.executable, "-m", "tracetools", "collect", *options]


Command = Callable[[Path, Path], list[str]]


def compare(folder: Path, a: Command, b: Command, steps: slice, rounds: int) -> None:
    """Print the medians of both, and what B takes more than A, with its interval."""
    pairs = []
    for number in range(rounds):
        order = (a, b) if number % 2 == 0 else (b, a)
        first, second = (run(folder, command, steps) for command in order)
        pairs.append((first, second) if number % 2 == 0 else (second, first))
    ratios = [100 * (of_b / of_a - 1) for of_a, of_b in pairs]
    low, high = interval(ratios)
    medians = [statistics.median(side) / 1e6 for side in zip(*pairs, strict=True)]
    more = f"{statistics.median(ratios):+.2f} % [{low:+.2f} %, {high:+.2f} %]"
    print(f"  A {medians[0]:.3f} ms a step, B {medians[1]:.3f} ms: B takes {more}")


def run(folder: Path, command: Command, steps: slice) -> float:
    """The median step of one process, in ns."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        out = Path(own) / "times.json"
        environment = {**os.environ, "KINETO_LOG_LEVEL": "6"}
        done = subprocess.run(command(folder, out), env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the job failed:\n{done.stderr}")
        times: list[int] = json.loads(out.read_text())
    return statistics.median(times[steps])


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """95 % of the medians of values drawn again."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    main()
