"""Runs both halves under the recorder.

In: an output folder, plants, the number of steps. Out: two run folders (`OUT/megatron`, `OUT/ray`), each half's log of steps
beside them (`OUT/*.metrics.jsonl`) and what its processes printed (`OUT/*.log`). Raises TracetoolsError where a library is missing
or a half fails.
Knows nothing of analysis; imports none of the heavy libraries.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

from tracetools.collect.launch import collect, explain_empty
from tracetools.demo.plant import OF_RAY, Plant
from tracetools.demo.settings import Options
from tracetools.errors import TracetoolsError, UsageError
from tracetools.stackprofile import load_profile

HALVES = {"megatron": "megatron_lm", "ray": "ray"}  # half -> its stack profile
RANKS = 2
STEPS = 16
RECORDED = (
    4,
    14,
)  # half-open: the steps before warm up, those after keep the end of the job out of the last recorded one
LOG_LINES_SHOWN = 15
POLL_S = 0.5

Progress = Callable[[str, int, int], None]  # half, steps it has done, steps it will do

NOT_INSTALLED = (
    "tracetools demo trains a model and needs {missing}. Install with: pip install 'tracetools[demo]' "
    "(without a GPU, first: pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu)."
)


def run_demo(
    out: Path,
    *,
    halves: Sequence[str] = tuple(HALVES),
    plants: Sequence[Plant] = (),
    steps: int = STEPS,
    recorded: tuple[int, int] = RECORDED,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Train these halves, record steps `recorded` (half-open) of each, return their run folders.

    Call it on the main thread. `plants` go into the last half: into the Ray half, unless the plain one is alone.
    """
    _check_installed()
    _check_plants(halves, plants)
    if not 0 < recorded[0] < recorded[1] <= steps:
        wanted = f"{recorded[0]}:{recorded[1]}"
        raise UsageError(
            f"of {steps} steps, {wanted} cannot be recorded: leave one to warm up and record at least one."
        )
    _prepare(out)
    ranks = _ranks()
    folders = []
    for half in halves:
        options = Options(
            steps=steps,
            ranks=ranks,
            metrics=metrics_file(out, half).resolve(),
            plants=tuple(plants) if half == halves[-1] else (),
        )
        with _followed(half, options, progress):
            folders.append(_run_half(half, options, out, recorded))
    return tuple(folders)


def metrics_file(out: Path, half: str) -> Path:
    """Where a half's log of steps is."""
    return out / f"{half}.metrics.jsonl"


def _check_installed() -> None:
    # the top package first: find_spec of a submodule imports its parent
    wanted = {"torch": "torch", "ray": "ray", "megatron": "megatron-core"}
    missing = [name for module, name in wanted.items() if find_spec(module) is None]
    if "megatron-core" not in missing and find_spec("megatron.core") is None:
        missing.append("megatron-core")
    if missing:
        raise TracetoolsError(NOT_INSTALLED.format(missing=", ".join(missing)))


def _check_plants(halves: Sequence[str], plants: Sequence[Plant]) -> None:
    for plant in plants:
        if halves[-1] != "ray" and plant.cause in OF_RAY:
            raise UsageError(f"--plant {plant}: the {halves[-1]} half has no Ray. Nothing was started.")


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: the output folder is not empty. Name a new one; nothing was started.")
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{out}: cannot be used as output folder: {why}. Nothing was started.") from error


def _ranks() -> int:
    """As many as there are GPUs, at most two; two on the CPU. Asked in a process of its own: torch stays out of this one."""
    ask = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise TracetoolsError(f"torch is installed and cannot be imported: {_last_line(answer.stderr)}")
    gpus = int(answer.stdout.split()[-1])
    return min(RANKS, gpus) if gpus else RANKS


def _run_half(half: str, options: Options, out: Path, recorded: tuple[int, int]) -> Path:
    log = (out / f"{half}.log").resolve()
    command = [sys.executable, "-m", "tracetools.demo.launch", half, str(log), *options.arguments()]
    found = collect(command, out / half, load_profile(HALVES[half]), *recorded)
    if found.exit_code:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:] if log.exists() else []
        failed = f"the {half} half of the demo failed with exit status {found.exit_code}"
        raise TracetoolsError("\n".join([f"{failed}. All it printed is in {log}; the end of it:", *end]))
    if not found.traces:
        raise explain_empty(found, recorded[0])
    return found.folder


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "no message")


@contextmanager
def _followed(half: str, options: Options, progress: Progress | None) -> Iterator[None]:
    """Report the half's steps while it runs, as its log of steps grows."""
    if progress is None:
        yield
        return
    over = Event()
    report = progress

    def follow() -> None:
        reported, ended = -1, False
        while not ended:
            ended = over.wait(POLL_S)
            done = options.metrics.read_bytes().count(b"\n") if options.metrics.exists() else 0
            if done != reported:
                report(half, done, options.steps)
                reported = done

    follower = Thread(target=follow, name="demo-progress", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
