"""Ask a running job to record its next steps: `collect --attach`.

In: the folder of a run whose job runs under `collect`, the number of steps, what to record. Out: a folder RUN/recording-N with
traces and a run.json of its own. There is no daemon: a request file in the run folder is all that passes between here and the
processes of the job.

All processes are to begin at the same step, so that step lies ahead of the furthest of them, by more than the time in which
each looks for requests.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracetools.collect import live, runfile
from tracetools.collect.launch import WINDOW_FILE, about, claim
from tracetools.collect.options import CHEAPEST, EVERYBODY, Choice, ProfilerOptions, Window
from tracetools.collect.runfile import Collected
from tracetools.errors import TracetoolsError, UsageError
from tracetools.output import write_atomically

LEAD_NS = 500_000_000  # the first step to record is so far ahead; a process looks for requests every 50 ms
LEAD_STEPS = 3  # ... and at least so many steps: the one under way, one to see the request in, one to warm up in
POLL_S = 0.1
LAUNCHER_S = 40.0  # a job that has just ended: its launcher finishes what was begun

Report = Callable[[str, int, int], None]  # what is waited for, steps done, steps in all


def attach(
    run: Path,
    steps: int,
    options: ProfilerOptions = CHEAPEST,
    choice: Choice = EVERYBODY,
    *,
    patience_s: float = 600.0,
    report: Report | None = None,
) -> Collected:
    """Record the next `steps` steps of a running job; returns when the traces are there. `exit_code` of the result is 0.

    `patience_s`: how long to wait while no process begins a step. Raises UsageError where there is no such run, and TracetoolsError
    where its job is not running, where another recording is under way, or where nothing was recorded.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least one step can be recorded.")
    job = _job(run)
    tell = report or (lambda *_: None)
    _wait_for_first_step(run, patience_s, tell)
    folder, asked = _post(run, steps, options, choice)
    why = ""
    try:
        why = _wait(run, folder, asked, patience_s, tell)
    except KeyboardInterrupt:
        why = "the request was withdrawn"
        raise
    finally:
        with suppress(OSError):
            (run / live.LIVE / live.REQUEST_FILE).unlink()
        if why:
            live.ask_to_finish(folder)
            _settle(folder)
        record = _put_together(folder, job, asked)
    found = runfile.collected(folder, 0, record)
    if not found.traces:
        said = "".join(f" {s}." for s in (why, *found.missing, *found.not_recorded) if s)
        raise TracetoolsError(
            f"{folder}: nothing was recorded.{said or ' The job ended before its processes came so far.'}"
        )
    return found


def _job(run: Path) -> dict[str, Any]:
    if not run.is_dir():
        raise UsageError(
            f"{run}: no such run folder. --attach takes the folder that `tracetools collect --out` was given."
        )
    job = live.read(run / live.LIVE / live.JOB_FILE)
    if not job:
        raise TracetoolsError(
            f"{run}: no job runs here. Start one with: tracetools collect --idle --out RUN -- CMD..., and attach while it runs."
        )
    here = job["launcher"]["host"] == socket.gethostname()
    if here and not live.alive(job["launcher"]) and not any(p.alive for p in live.counters(run)):
        raise TracetoolsError(f"{run}: the job that was started here is gone; its launcher was killed.")
    return job


def _wait_for_first_step(run: Path, patience_s: float, tell: Report) -> None:
    deadline = time.monotonic() + patience_s
    while not _running(run):
        tell("the first step of the job", 0, 1)
        if not (run / live.LIVE).is_dir():
            raise TracetoolsError(f"{run}: the job ended before any process of it began a step.")
        if time.monotonic() > deadline:
            raise TracetoolsError(
                f"{run}: no process of the job has begun a step within {patience_s:g} s. Does the profile know this stack's step function?"
            )
        time.sleep(POLL_S)


def _running(run: Path) -> list[live.Progress]:
    """Processes that may step again. Of another host it is not known which are gone."""
    host = socket.gethostname()
    return [p for p in live.counters(run) if p.alive or not p.key.startswith(f"{host}-")]


# ---------------------------------------------------------------- the request


def _post(run: Path, steps: int, options: ProfilerOptions, choice: Choice) -> tuple[Path, dict[str, Any]]:
    """Make the folder, choose the first step, tell everybody."""
    request = run / live.LIVE / live.REQUEST_FILE
    before = live.read(request)
    if before and live.alive(before["by"]):
        raise TracetoolsError(f"{run}: {before['folder']} is being recorded. Attach again when it is finished.")
    number = 1
    while True:
        folder = run / f"recording-{number}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise TracetoolsError(f"{folder}: cannot be made: {error.strerror or error}.") from error
    first = first_step(_running(run))
    window = Window(first, first + steps, options, choice, number, folder.name)
    asked = {**window.for_recorder(), "by": {"host": socket.gethostname(), "pid": os.getpid()}}
    write_atomically(folder / WINDOW_FILE, json.dumps(asked).encode())
    write_atomically(request, json.dumps(asked).encode())
    return folder, asked


def first_step(running: list[live.Progress]) -> int:
    """The step that every process can still begin to record at."""
    furthest = max((p.count for p in running), default=0) - 1  # the step that the furthest one is in
    paces = [p.took_ns for p in running if p.took_ns > 0]
    ahead = -(-LEAD_NS // min(paces)) if paces else 0
    return furthest + LEAD_STEPS + ahead


# ---------------------------------------------------------------- waiting


def _wait(run: Path, folder: Path, asked: dict[str, Any], patience_s: float, tell: Report) -> str:
    """Until everybody who takes part has said how it went -> "" or why that will not happen."""
    before = {p.key: p.count for p in _running(run)}
    expected = set(before)
    first, stop = asked["first"], asked["stop"]
    furthest, moved = -1, time.monotonic()
    while True:
        time.sleep(POLL_S)
        running = {p.key: p for p in _running(run)}
        count = max((p.count for p in running.values()), default=0)
        if count != furthest:
            furthest, moved = count, time.monotonic()
        done = max(0, min(count - first, stop - first))
        tell(f"steps {first} to {stop - 1}" if done < stop - first else "traces", done, stop - first)
        if not (run / live.LIVE).is_dir() or not (run / live.LIVE / live.JOB_FILE).exists():
            return "the job ended"
        announced = {f.name.removeprefix(".recording-").removeprefix(".exporting-") for f in live.announcements(folder)}
        expected |= {name.removesuffix(".json") for name in announced}
        open_ones = {k for k in expected if k in running and not (folder / f".process-{k}.json").exists()}
        if count > stop:  # the others are through: who has not even begun a step since does not take part
            asleep = {k for k in open_ones if running[k].seen != asked["number"] and running[k].count == before.get(k)}
            for key in asleep:
                _excuse(folder, running[key])
            open_ones -= asleep
        if not open_ones and not live.still_writing(folder):
            return ""
        if time.monotonic() - moved > patience_s:
            return f"no process of the job began a step for {patience_s:g} s"


def _excuse(folder: Path, process: live.Progress) -> None:
    """Say for a process that it did not take part."""
    said = {
        "file": None,
        **process.who,
        "steps": [],
        "problems": [],
        "not_recorded": "began no step while the others recorded",
    }
    write_atomically(folder / f".process-{process.key}.json", json.dumps(said).encode())


def _settle(folder: Path) -> None:
    """Whoever was asked to finish needs a moment."""
    deadline = time.monotonic() + LAUNCHER_S
    while live.still_writing(folder) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _put_together(folder: Path, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The recording's run.json, by us or by the launcher of a job that has ended meanwhile."""
    if claim(folder):
        return runfile.write_run(folder, job, {"exit_code": None, "ended_unix_ns": time.time_ns(), **about(asked)})
    deadline = time.monotonic() + LAUNCHER_S
    while time.monotonic() < deadline:
        record = live.read(folder / runfile.RUN_FILE)
        if record:
            return record
        time.sleep(POLL_S)
    raise TracetoolsError(f"{folder}: the job ended, and its launcher did not put the recording together.")
