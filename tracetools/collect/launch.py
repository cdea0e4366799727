"""Run a command with the recorder in every Python process of it, and tie the traces together.

In: a command, a run folder, a stack profile, the steps wanted. Out: `Collected`, and a run folder with run.json and one trace per process.
The command's own exit status is returned as it is. Knows nothing of how a process records (inject/) or of what traces mean.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tracetools.errors import TracetoolsError, UsageError
from tracetools.output import write_atomically
from tracetools.stackprofile import StackProfile

CONFIG_VARIABLE = "TRACETOOLS_RECORD"
RUN_SCHEMA = "tracetools.run/1"
RUN_FILE = "run.json"
INJECT = Path(__file__).parent / "inject"
STOP_FILE = ".stop"
STRAGGLERS_S = 30.0  # processes that outlive the command may still be writing their traces


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """Options of torch.profiler. The defaults are the cheapest."""

    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False


@dataclass(frozen=True, slots=True)
class Collected:
    """What a recorded job left behind. `exit_code` is the command's own (-N: ended by signal N)."""

    exit_code: int
    folder: Path
    traces: tuple[str, ...]
    steps: tuple[int, ...]  # numbers of the steps that some process recorded
    missing: tuple[str, ...]
    problems: tuple[str, ...]


def collect(
    command: Sequence[str],
    out: Path,
    profile: StackProfile,
    first: int,
    stop: int,
    options: ProfilerOptions = ProfilerOptions(),
) -> Collected:
    """Record steps first..stop-1 of every process under `command`. Raises UsageError before anything is started."""
    if not 0 <= first < stop:
        raise UsageError(
            f"steps {first}:{stop}: write FIRST:STOP with 0 <= FIRST < STOP; 3:6 records steps 3, 4 and 5."
        )
    _prepare(out)
    started = time.time_ns()
    exit_code = _run(command, _environment(out, profile, first, stop, options), out)
    _wait_for_stragglers(out)
    record = _record(out, command, profile, options)
    record |= {
        "exit_code": exit_code,
        "started_unix_ns": started,
        "ended_unix_ns": time.time_ns(),
        "steps": {"first": first, "stop": stop},
    }
    write_atomically(out / RUN_FILE, (json.dumps(record, indent=1) + "\n").encode())
    for leftover in out.glob(".*"):
        leftover.unlink(missing_ok=True)
    return Collected(
        exit_code=exit_code,
        folder=out,
        traces=tuple(p["file"] for p in record["processes"] if p["file"]),
        steps=tuple(sorted({s["number"] for p in record["processes"] for s in p["steps"]})),
        missing=tuple(f"{m['role']} (pid {m['pid']}): {m['why']}" for m in record["missing"]),
        problems=tuple(problem for p in record["processes"] for problem in p["problems"]),
    )


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: the output folder is not empty. Name a new one with --out; nothing was started.")
    except OSError as error:
        raise UsageError(
            f"{out}: cannot be used as output folder: {error.strerror or error}. Nothing was started."
        ) from error


def _environment(out: Path, profile: StackProfile, first: int, stop: int, options: ProfilerOptions) -> dict[str, str]:
    config = {
        "out": str(out.resolve()),
        "first": first,
        "stop": stop,
        **profile.for_recorder(),
        "profiler": asdict(options),
    }
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        CONFIG_VARIABLE: json.dumps(config),
        "PYTHONPATH": os.pathsep.join([str(INJECT), *([path] if path else [])]),
    }


def _run(command: Sequence[str], environment: dict[str, str], out: Path) -> int:
    """The command's exit status. Ctrl-C reaches it by the terminal; SIGTERM is passed on after the recorders were asked to finish."""
    try:
        process = subprocess.Popen(command, env=environment)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise UsageError(f"{command[0]}: cannot be run: {error.strerror}. Nothing was started.") from error

    def pass_on(number: int, _: FrameType | None) -> None:
        (out / STOP_FILE).touch()
        process.send_signal(number)

    previous = {s: signal.signal(s, h) for s, h in ((signal.SIGTERM, pass_on), (signal.SIGINT, lambda *_: None))}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _announcements(out: Path) -> list[Path]:
    return [*out.glob(".recording-*.json"), *out.glob(".exporting-*.json")]


def _wait_for_stragglers(out: Path) -> None:
    """Ask what still records to finish, and wait for it as long as it lives."""
    deadline = time.monotonic() + STRAGGLERS_S
    while time.monotonic() < deadline and any(_alive(_read(a)) for a in _announcements(out)):
        (out / STOP_FILE).touch()
        time.sleep(0.1)


def _alive(announcement: dict[str, Any]) -> bool:
    """Is its process still there? Only known on this host."""
    if announcement.get("host") != os.uname().nodename:
        return False
    try:
        os.kill(int(announcement["pid"]), 0)
    except (ProcessLookupError, KeyError):
        return False
    except PermissionError:
        return True
    return _state(int(announcement["pid"])) != "Z"


def _state(pid: int) -> str:
    """Linux's one letter for the state of a process; "" where it cannot be known."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _record(out: Path, command: Sequence[str], profile: StackProfile, options: ProfilerOptions) -> dict[str, Any]:
    """run.json, without what only the launcher's clock knows."""
    processes = [p for f in sorted(out.glob(".process-*.json")) if (p := _read(f))]
    processes.sort(key=lambda p: (p["role"] != "driver", p["rank"] is None, p["rank"] or 0, p["pid"]))
    versions: dict[str, str] = {}
    for process in processes:
        versions |= process.pop("versions", {})
    missing = [
        {
            **{k: a.get(k) for k in ("role", "rank", "host", "pid")},
            "why": "ended while it recorded, before its trace was written",
        }
        for a in map(_read, _announcements(out))
    ]
    missing += [
        {**{k: p.get(k) for k in ("role", "rank", "host", "pid")}, "why": "; ".join(p["problems"]) or "wrote no trace"}
        for p in processes
        if not p["file"]
    ]
    return {
        "schema": RUN_SCHEMA,
        "command": list(command),
        "profile": profile.name,
        "profile_sha256": profile.sha256,
        "launcher_python": sys.version.split()[0],
        "versions": versions,
        "profiler": asdict(options),
        "processes": [p for p in processes if p["file"]],
        "missing": missing,
    }


def explain_empty(found: Collected, first: int) -> TracetoolsError:
    """The message for a job that recorded nothing."""
    lost = f" {'; '.join(found.missing)}." if found.missing else ""
    return TracetoolsError(
        f"{found.folder}: nothing was recorded: no process of the job reached step {first}.{lost} "
        "Does the profile know this stack's step function, or does the code mark steps with tracetools.step()? Did the job run long enough?"
    )
