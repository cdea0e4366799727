"""Small training jobs that tests run under collect, and what to ask of what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracetools.collect.launch import collect
from tracetools.collect.options import CHEAPEST, EVERYBODY, Choice, ProfilerOptions
from tracetools.collect.runfile import Collected
from tracetools.model import Run
from tracetools.stackprofile import load_profile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto announces every start and stop

TRAIN = """
    import os, sys, time, torch, tracetools
    torch.set_num_threads(1)

    def forward_backward():
        a = torch.ones(16, 16)
        for _ in range(5):
            a = a @ a / 16
        return float(a.sum())

    def train(steps, rank=0, sleep=0.005):
        for i in range(steps):
            with tracetools.step(tokens=100 + i) as step:
                with tracetools.region("data_processing"):
                    time.sleep(sleep)
                with tracetools.region("forward_backward"):
                    result = forward_backward()
                step.card(sequences=7)
        return result
"""

# a Ray of the test's own, whatever runs beside it
RAY_INIT = """
    import ray
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
"""


def script(folder: Path, body: str, name: str = "job.py") -> list[str]:
    """A command that runs TRAIN and then `body`."""
    file = folder / name
    file.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(body))
    return [sys.executable, str(file)]


def record(
    folder: Path,
    body: str,
    first: int = 2,
    stop: int = 4,
    *,
    profile: str = "torch",
    choice: Choice = EVERYBODY,
    options: ProfilerOptions = CHEAPEST,
) -> Collected:
    command = script(folder, body)
    return collect(command, folder / "run", load_profile(profile), first, stop, options, choice)


def start(folder: Path, body: str, *arguments: str) -> subprocess.Popen[bytes]:
    """The command line's collect with this job, in a process group of its own, as a shell starts it; what it says is in `stderr`."""
    command = [sys.executable, "-m", "tracetools", "collect", "--out", str(folder / "run"), *arguments, "--"]
    with (folder / "stderr").open("wb") as errors:
        return subprocess.Popen([*command, *script(folder, body)], start_new_session=True, stderr=errors)


def wait_until(true: Callable[[], object], process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Or until the process has ended. Fails where neither happens."""
    deadline = time.monotonic() + seconds
    while not true() and process.poll() is None:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def markers(run: Run) -> dict[str, list[str]]:
    """Names of the step markers of each process, in time order."""
    return {
        p.label: [n for i in p.trace.events.name if (n := p.trace.names[i]).startswith("tracetools.step#")]
        for p in run.processes
    }


def marks(*numbers: int) -> list[str]:
    return [f"tracetools.step#{n}" for n in numbers]


def run_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found
