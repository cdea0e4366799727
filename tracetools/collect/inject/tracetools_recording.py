"""One recording of one process: torch.profiler from the end of the step before the first wanted one until the last wanted one is over.

In: a window (which steps, of whom, with which options, into which folder), steps as they end. Out: one trace file and one record of the
process in that folder, each whole or not there. Standard library plus the torch that is already in the process.
Knows nothing of when a step begins (tracetools_recorder does).

When it does what (measured on torch 2.13: preparing takes 1 to 2 s the first time and 1 ms after that; stopping takes 6 us an event,
exporting 5 us):
  warm up             before step FIRST-1, by a recording that is thrown away: ranks that take unequally long for it do not wait
                      for each other in a recorded step
  start               when step FIRST-1 ends
  stop and export     on a thread of our own: when the next step begins, or a short grace time after the last recorded step ended. A Ray
                      worker's last step ends inside its driver's last step; stopping at once would be seen there as work of the
                      stack. `profile_all_threads` lets another thread stop the profiler, and records every thread's ranges;
                      where torch does not have it, the thread that started the profiler stops it when the next step begins.
                      Training waits for the stop, not for the export.
  at the latest       at exit of the process, or when the launcher, the driver or `collect --attach` asks by a file in the folder
Whatever goes wrong in here is written to the record and stops the recording, never the training.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tracetools_files as files
import tracetools_giveway as giveway
import tracetools_identity as identity

SCHEMA = 1
GRACE_S = 0.3  # after the last recorded step: long enough for a driver to finish its step, short enough to lose nothing
POLL_S = 0.2  # how often a recording process looks for a request to stop
PATIENCE_S = 60.0  # the longest that training waits for the profiler to stop
NO_KINETO = "this torch was built without Kineto, the part of it that records: install a build that has it"
NO_TORCH = "there is no torch in this process's Python: only what runs with torch can be recorded"

Fields = dict[str, Any]


class Window:
    """What is to be recorded: steps first..stop-1 of the chosen processes."""

    def __init__(self, asked: Fields, out: str) -> None:
        self.number: int = asked["number"]
        self.first: int = asked["first"]
        self.stop: int = asked["stop"]
        self.ranks: list[int] | None = asked["ranks"]
        self.roles: list[str] | None = asked["roles"]
        self.profiler: Fields = asked["profiler"]
        self.folder = os.path.join(out, asked["folder"])
        self.skipped: list[Fields] = []  # wanted steps that this process did not record

    def excludes(self, who: Fields) -> str | None:
        """Why this process is not to record; None where it is."""
        if self.roles is not None and who["role"] not in self.roles:
            return f"role {who['role']} is not among the chosen ones ({', '.join(self.roles)})"
        if self.ranks is not None and who["rank"] is not None and who["rank"] not in self.ranks:
            return f"rank {who['rank']} is not among the chosen ones"
        return None

    def skip(self, number: int, why: str) -> None:
        self.skipped.append({"number": number, "why": why})
        self.skipped.sort(key=lambda s: int(s["number"]))


def warm_up(window: Window) -> None:
    """A recording of nothing, thrown away: the first one of a process takes seconds. What goes wrong is the real one's to report."""
    try:
        made, _ = _profiler(window, [])
        with giveway.ours():
            made.prepare_trace()
            made.start_trace()
            made.stop_trace()
    except Exception:  # noqa: BLE001  training goes on, and the start of the recording will meet the same fault and say so
        return


def _profiler(window: Window, problems: list[str]) -> tuple[Any, bool]:
    """-> (a profiler that has not started, can any thread stop it?)"""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ModuleNotFoundError as error:
        raise RuntimeError(NO_TORCH if error.name == "torch" else repr(error)) from error
    if not torch.autograd.kineto_available():
        raise RuntimeError(NO_KINETO)
    if giveway.theirs:
        raise RuntimeError(giveway.WHY + ", which still runs")
    wanted = window.profiler
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] if "cpu" in wanted["activities"] else []
    if cuda and "cuda" in wanted["activities"]:
        activities.append(ProfilerActivity.CUDA)
    if not activities:
        raise RuntimeError("only cuda was to be recorded, and this process has no GPU")
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        config = None
        problems.append("this torch cannot profile all threads: ranges of other threads are missing")
    made = profile(
        activities=activities,
        record_shapes=wanted["record_shapes"],
        with_stack=wanted["with_stack"],
        profile_memory=wanted["profile_memory"],
        experimental_config=config,
    )
    return made, config is not None


class Recording:
    """`report()`: what the recorder adds to the process's record. `stopped()`: called once the profiler takes nothing more.

    `after(self)`: called once the trace is written, or lost. `passed(number)`: is the run known to be beyond this step?
    """

    def __init__(
        self,
        window: Window,
        report: Callable[[list[Fields]], Fields],
        stopped: Callable[[], None],
        after: Callable[[Recording], None],
        passed: Callable[[int], bool],
    ) -> None:
        self.window = window
        self.report = report
        self.on_stop = stopped
        self.after = after
        self.passed = passed
        self.who = identity.who()
        self.pid = os.getpid()
        self.begins = window.first  # the first step that is recorded whole
        self.steps: list[Fields] = []
        self.problems: list[str] = []
        self.profiler: Any = None
        self.any_thread = False
        self.done = False
        self.asked = False  # to finish at once
        self.over_at: float | None = None  # monotonic time at which the last wanted step ended
        self.lock = threading.Lock()
        self.wake = threading.Event()
        self.stopped = threading.Event()
        self.finished = threading.Event()

    def start(self) -> bool:
        """On the thread that steps."""
        try:
            self.profiler, self.any_thread = _profiler(self.window, self.problems)
            self.profiler.preset_metadata_json("tracetools", json.dumps({"schema": SCHEMA, **self.who}))
            files.write_json(files.own(self.window.folder, files.RECORDING), self._announcement(), files.RESERVED)
            with giveway.ours():
                self.profiler.prepare_trace()  # not start(): that would add a ProfilerStep of its own
                self.profiler.start_trace()
        except Exception as error:  # noqa: BLE001  any fault of ours ends the recording, not the training
            self.profiler, self.done = None, True
            why = str(error) if type(error) is RuntimeError else repr(error)
            self.problems.append(f"the profiler did not start: {why}")
            self._write_record(None, 0, 0)
            self.stopped.set()
            self.finished.set()
            return False
        threading.Thread(target=self._watch, name="tracetools-recorder", daemon=True).start()
        return True

    def _announcement(self) -> Fields:
        return {**self.who, "first": self.window.first, "stop": self.window.stop}

    # ------------------------------------------------------------ the end

    def over(self) -> None:
        """The last wanted step has ended."""
        self.over_at = time.monotonic()
        files.rename(files.own(self.window.folder, files.RECORDING), files.own(self.window.folder, files.EXPORTING))
        self.wake.set()

    def more(self) -> None:
        """Another piece of work for the last wanted step has begun."""
        self.over_at = None
        self.wake.set()

    def _watch(self) -> None:
        """Our thread: waits for the end of the last step or for a request, then stops and exports."""
        while not self.done:
            over = self.over_at
            left = POLL_S if over is None else max(0.0, over + GRACE_S - time.monotonic())
            if self.wake.wait(left):
                self.wake.clear()
                if self.asked:
                    break
                continue
            if os.path.exists(os.path.join(self.window.folder, files.STOP_FILE)):
                self.asked = True
                break
            if self.over_at is None and self.passed(self.window.stop):
                break
            over = self.over_at
            if over is not None and time.monotonic() >= over + GRACE_S:
                break
        if self.any_thread:
            self.finish()

    def finish_now(self) -> None:
        """On the thread that begins the step after the last one: wait until the profiler is off."""
        if self.any_thread:
            self.asked = True
            self.wake.set()
            self.stopped.wait(PATIENCE_S)
        else:
            self.finish()

    def finish(self) -> None:
        """Stop and export, once, whoever comes first; the others wait."""
        with self.lock:
            if self.done:
                return
            self.done = True
            files.rename(files.own(self.window.folder, files.RECORDING), files.own(self.window.folder, files.EXPORTING))
            started, name = time.time_ns(), None
            try:
                with giveway.ours():
                    self.profiler.stop_trace()
                self.on_stop()
                self.stopped.set()
                name = self._export()
            except Exception as error:  # noqa: BLE001  a full disk must not end the training
                self.problems.append(f"the trace could not be written: {error!r}")
            self.on_stop()
            self.stopped.set()
            self.profiler = None
            try:
                self.after(self)
            except Exception as error:  # noqa: BLE001  an extra, which must not cost the trace its record
                self.problems.append(f"Ray's timeline was not asked for: {error!r}")
            if self._write_record(name, started, time.time_ns()):
                files.remove(files.own(self.window.folder, files.EXPORTING))
            self.finished.set()

    def _export(self) -> str:
        rank = "" if self.who["rank"] is None else f"-{self.who['rank']}"
        name = files.safe(f"{self.who['role']}{rank}.{self.who['host']}.{self.who['pid']}") + ".trace.json.gz"
        raw = os.path.join(self.window.folder, f".{os.getpid()}.raw.json")
        try:
            self.profiler.export_chrome_trace(raw)
            files.compress_trace(raw, os.path.join(self.window.folder, name))
        finally:
            files.remove(raw)
        return name

    def _write_record(self, file: str | None, export_started: int, export_ended: int) -> bool:
        record = {
            "file": file,
            **self.who,
            "steps": self.steps,
            "skipped": self.window.skipped,
            "export_started_unix_ns": export_started,
            "export_ended_unix_ns": export_ended,
            "problems": self.problems,
        }
        try:
            record |= self.report(self.steps)
        except Exception as error:  # noqa: BLE001  the trace is there: say what can be said
            self.problems.append(f"parts of the process's record are missing: {error!r}")
        return write_record(self.window.folder, record)


def decline(window: Window, why: str, report: Callable[[list[Fields]], Fields]) -> None:
    """Say that this process does not take part, for run.json and for those who wait."""
    record = {
        "file": None,
        **identity.who(),
        "steps": [],
        "skipped": window.skipped,
        "problems": [],
        "not_recorded": why,
    }
    write_record(window.folder, {**record, **report([])})


def write_record(folder: str, record: Fields) -> bool:
    """False where there was no room for it: then the announcement says what was lost."""
    try:
        files.write_json(files.own(folder, files.PROCESS), record)
    except OSError as error:
        why = "; ".join([*record["problems"], f"the record of the process could not be written: {error}"])
        sys.stderr.write(f"tracetools: process {os.getpid()}: {why}\n")
        told = {k: record[k] for k in ("file", "role", "rank", "host", "pid")}
        for kind in (files.RECORDING, files.EXPORTING):
            try:
                files.overwrite_json(files.own(folder, kind), {**told, "why": why})
            except OSError:
                continue
        return False
    return True
