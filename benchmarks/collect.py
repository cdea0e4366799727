"""What `tracetools collect` costs a training job. Run: python benchmarks/collect.py [ROUNDS]

Two questions, each answered within one process, in blocks of steps that take turns (ABBA), because processes differ more among each
other than by what is asked; with the median of the ratios of neighbouring blocks and its 95 % interval by bootstrap:
  idle        a job under `collect --idle` as it is, against the same steps with the hooks undone and the recorder out of sight
  recording   steps that `collect` records, against the same steps under plain torch.profiler with the same options
The job makes about 1,500 small operators a step, on one thread: what a hook or the profiler costs shows more than in a real step.
Each step has two hooked calls, a region and the step's mark. An A/A row says what the machine's noise alone makes of it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROUNDS = 40  # pairs of blocks
JOB = """
import json, os, sys, time
import torch
import tracetools
import benchmark_stack as stack
import tracetools_recorder, tracetools_recording
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)
question, rounds, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
BLOCK = 8
OPTIONS = {"activities": ["cpu"], "record_shapes": False, "with_stack": False, "profile_memory": False}

def step():
    started = time.perf_counter_ns()
    with tracetools.step(tokens=1):
        with tracetools.region("data"):
            batch = stack.fetch()
        stack.train(batch)
    return time.perf_counter_ns() - started

def as_it_is(number):
    return [step() for _ in range(BLOCK)]

def out_of_sight(number):
    wrapped = stack.fetch, stack.train
    stack.fetch, stack.train = (f.__wrapped__ for f in wrapped)
    recorder = sys.modules.pop("tracetools_recorder")
    try:
        return as_it_is(number)
    finally:
        sys.modules["tracetools_recorder"] = recorder
        stack.fetch, stack.train = wrapped

def plain_profiler(number):
    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    times = [step() for _ in range(BLOCK)]
    profiler.stop()
    return times[1:]

def collect(number):
    state = tracetools_recorder._state
    folder = f"window-{number}"
    os.mkdir(os.path.join(state.out, folder))
    asked = {"number": number, "first": state.next + 1, "stop": state.next + 1 + BLOCK, "folder": folder}
    state.window = tracetools_recording.Window({**asked, "ranks": None, "roles": None, "profiler": OPTIONS}, state.out)
    step()
    times = [step() for _ in range(BLOCK)]
    made = state.recording
    step()
    made.finished.wait()
    return times[1:]

a, b = {
    "nothing": (out_of_sight, out_of_sight),
    "idle": (out_of_sight, as_it_is),
    "recording": (plain_profiler, collect),
}[question]
for number in range(2):  # warm up, both profilers too
    a(1000 + number), b(2000 + number)
pairs = []
for number in range(rounds):
    if number % 2:
        of_b, of_a = b(number), a(number)
    else:
        of_a, of_b = a(number), b(number)
    pairs.append([of_a, of_b])
json.dump(pairs, open(out, "w"))
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
QUESTIONS = {
    "nothing": "A/A: the recorder out of sight, twice",
    "idle": "idle: the recorder out of sight, collect --idle",
    "recording": "recording: torch.profiler, collect",
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        (folder / "benchmark_stack.py").write_text(STACK)
        (folder / "profile.toml").write_text(PROFILE)
        for question, title in QUESTIONS.items():
            print(title, flush=True)
            tell(ask(folder, question, rounds))


def ask(folder: Path, question: str, rounds: int) -> list[list[list[int]]]:
    """Per pair of blocks, the step times of A and of B in ns."""
    times, run = folder / f"{question}.json", folder / f"{question}.run"
    collect = [sys.executable, "-m", "tracetools", "collect", "--idle", "--profile", str(folder / "profile.toml")]
    command = [
        *collect,
        "--out",
        str(run),
        "--",
        sys.executable,
        str(folder / "job.py"),
        question,
        str(rounds),
        str(times),
    ]
    done = subprocess.run(
        command, env={**os.environ, "KINETO_LOG_LEVEL": "6"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"the job failed:\n{done.stderr}")
    pairs: list[list[list[int]]] = json.loads(times.read_text())
    return pairs


def tell(pairs: list[list[list[int]]]) -> None:
    """Print the medians of both, and what B takes more than A, with its interval."""
    blocks = [(statistics.median(a), statistics.median(b)) for a, b in pairs]
    ratios = [100 * (b / a - 1) for a, b in blocks]
    low, high = interval(ratios)
    a_ms, b_ms = (statistics.median(side) / 1e6 for side in zip(*blocks, strict=True))
    more = f"{statistics.median(ratios):+.2f} % [{low:+.2f} %, {high:+.2f} %]"
    print(f"  A {a_ms:.3f} ms a step, B {b_ms:.3f} ms: B takes {more}", flush=True)


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """95 % of the medians of values drawn again."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    main()
