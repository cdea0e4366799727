"""Run a command with the recorder in every Python process of it, and tie the traces together.

In: a command, a run folder, a stack profile, the steps wanted (or none: `collect_idle`). Out: `Collected`, and a run folder with
run.json and one trace per process. The command's own exit status is returned as it is. Knows nothing of how a process records
(inject/) or of what traces mean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tracetools.collect import live, runfile
from tracetools.collect.options import CHEAPEST, EVERYBODY, Choice, ProfilerOptions, Window
from tracetools.collect.runfile import Collected
from tracetools.errors import TracetoolsError, UsageError
from tracetools.output import write_atomically
from tracetools.stackprofile import StackProfile

CONFIG_VARIABLE = "TRACETOOLS_RECORD"
INJECT = Path(__file__).parent / "inject"
WINDOW_FILE = ".window.json"  # in the folder of a recording that nobody has put together yet
STRAGGLERS_S = 30.0  # processes that outlive the command may still be writing their traces
TERMINATION_S = 3.0  # a SIGTERM for the command waits so long for traces that are being recorded
POLL_S = 0.05


def collect(
    command: Sequence[str],
    out: Path,
    profile: StackProfile,
    first: int,
    stop: int,
    options: ProfilerOptions = CHEAPEST,
    choice: Choice = EVERYBODY,
) -> Collected:
    """Record steps first..stop-1 of every process under `command`. Raises UsageError before anything is started."""
    if not 0 <= first < stop:
        raise UsageError(
            f"steps {first}:{stop}: write FIRST:STOP with 0 <= FIRST < STOP; 3:6 records steps 3, 4 and 5."
        )
    return _collect(command, out, profile, Window(first, stop, options, choice))


def collect_idle(command: Sequence[str], out: Path, profile: StackProfile) -> Collected:
    """Run `command` with a recorder that sleeps until `attach` asks for something. Raises UsageError before anything is started."""
    return _collect(command, out, profile, None)


def _collect(command: Sequence[str], out: Path, profile: StackProfile, window: Window | None) -> Collected:
    _prepare(out)
    job = _describe(command, profile)
    write_atomically(out / live.LIVE / live.JOB_FILE, json.dumps(job).encode())
    try:
        exit_code = _run(command, _environment(out, profile, window), out)
    except UsageError:
        shutil.rmtree(out / live.LIVE)
        raise
    _wait_for_stragglers(out)
    why_empty = _why_empty(out, window)
    ended = {"exit_code": exit_code, "ended_unix_ns": time.time_ns()}
    problems = _finish_recordings(out, job | ended)
    about = {**ended, **_about(window), "recordings": _recordings(out)}
    try:
        record = runfile.write_run(out, job, about)
    except TracetoolsError as error:  # a full disk: the job's own exit status is what counts
        traces = tuple(sorted(f.name for f in out.glob("*.trace.json.gz")))
        return Collected(exit_code, out, traces, (), missing=(), problems=(str(error), *problems), why_empty=why_empty)
    shutil.rmtree(out / live.LIVE, ignore_errors=True)
    found = runfile.collected(out, exit_code, record)
    return Collected(
        exit_code=exit_code,
        folder=out,
        traces=found.traces,
        steps=found.steps,
        missing=found.missing,
        problems=(*found.problems, *problems),
        not_recorded=found.not_recorded,
        recordings=found.recordings,
        why_empty=why_empty,
    )


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: the output folder is not empty. Name a new one with --out; nothing was started.")
        (out / live.LIVE).mkdir()
    except OSError as error:
        raise UsageError(
            f"{out}: cannot be used as output folder: {error.strerror or error}. Nothing was started."
        ) from error


def _describe(command: Sequence[str], profile: StackProfile) -> dict[str, Any]:
    return {
        "command": runfile.without_secrets(command),
        "folder": str(Path.cwd()),
        "profile": profile.name,
        "profile_sha256": profile.sha256,
        "launcher_python": sys.version.split()[0],
        "launcher": {"host": socket.gethostname(), "pid": os.getpid()},
        "started_unix_ns": time.time_ns(),
    }


def _about(window: Window | None) -> dict[str, Any]:
    """Of a recording, for its run.json."""
    if window is None:
        return {"steps": None, "profiler": None, "chosen": None}
    asked = window.for_recorder()
    return about(asked)


def about(asked: dict[str, Any]) -> dict[str, Any]:
    """The same, from a request as the recorders see it."""
    return {
        "steps": {"first": asked["first"], "stop": asked["stop"]},
        "profiler": asked["profiler"],
        "chosen": {"ranks": asked["ranks"], "roles": asked["roles"]},
    }


def _environment(out: Path, profile: StackProfile, window: Window | None) -> dict[str, str]:
    config = {
        "out": str(out.resolve()),
        "window": None if window is None else window.for_recorder(),
        **profile.for_recorder(),
    }
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        CONFIG_VARIABLE: json.dumps(config),
        "PYTHONPATH": os.pathsep.join([str(INJECT), *([path] if path else [])]),
    }


# ---------------------------------------------------------------- the command


def _run(command: Sequence[str], environment: dict[str, str], out: Path) -> int:
    """The command's exit status. Ctrl-C reaches it by the terminal; other requests to end are passed on once the traces are written."""
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        for folder in _folders(out):
            live.ask_to_finish(folder)
        deadline = time.monotonic() + TERMINATION_S
        while time.monotonic() < deadline and any(live.still_writing(folder) for folder in _folders(out)):
            time.sleep(POLL_S)
        if process is not None:
            process.send_signal(number)

    with _signals(pass_on):
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be run: {error.strerror}. Nothing was started.") from error
        return process.wait()


@contextmanager
def _signals(pass_on: Any) -> Iterator[None]:
    handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: lambda *_: None}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _folders(out: Path) -> list[Path]:
    """Of all recordings of a run, those of `attach` too."""
    return [out, *sorted(out.glob("recording-*"), key=_number)]


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2]) if folder.name.rpartition("-")[2].isdecimal() else 0


def _wait_for_stragglers(out: Path) -> None:
    """Ask what still records to finish, and wait for it as long as it lives."""
    deadline = time.monotonic() + STRAGGLERS_S
    for folder in _folders(out):
        while time.monotonic() < deadline and live.still_writing(folder):
            live.ask_to_finish(folder)
            time.sleep(POLL_S)


# ---------------------------------------------------------------- the run folder, once the command has ended


def claim(folder: Path) -> dict[str, Any]:
    """The window of a recording that nobody has put together yet; {} where somebody has, or is about to."""
    claimed = folder / ".claimed.json"
    try:
        (folder / WINDOW_FILE).rename(claimed)
    except OSError:
        return {}
    return live.read(claimed)


def _finish_recordings(out: Path, job: dict[str, Any]) -> list[str]:
    """What `attach` had begun and not finished when the command ended -> problems."""
    problems = []
    for folder in _folders(out)[1:]:
        asked = claim(folder)
        if asked:
            try:
                runfile.write_run(folder, job, about(asked))
            except TracetoolsError as error:
                problems.append(str(error))
    return problems


def _recordings(out: Path) -> list[dict[str, Any]]:
    found = []
    for folder in _folders(out)[1:]:
        record = live.read(folder / runfile.RUN_FILE)
        found.append({"folder": folder.name, "steps": record.get("steps"), "traces": len(record.get("processes", []))})
    return found


def _why_empty(out: Path, window: Window | None) -> str:
    """How far the job came, for the case that it recorded nothing."""
    if not (out / live.LIVE / live.PYTHON_FILE).exists():
        return (
            "No Python process of the job had the recorder in it. Is the command a Python program, or does it start one? "
            "Python with -S, -I or -E, and processes that get a PYTHONPATH of their own, are not reached."
        )
    counts = live.counters(out)
    if not counts:
        return (
            "No process of the job began a step. Does the profile know this stack's step function, "
            "or does the code mark steps with tracetools.step()?"
        )
    begun = max(p.count for p in counts)
    if window is not None and begun <= window.first:
        return f"The job ended after {begun} step(s), numbered from 0, and step {window.first} was the first one to record."
    return ""


def explain_empty(found: Collected, first: int) -> TracetoolsError:
    """The message for a job that recorded nothing."""
    lost = "".join(f" {who}." for who in (*found.missing, *found.not_recorded))
    why = f" {found.why_empty}" if found.why_empty else ""
    return TracetoolsError(f"{found.folder}: nothing was recorded, steps from {first} on were asked for.{lost}{why}")
