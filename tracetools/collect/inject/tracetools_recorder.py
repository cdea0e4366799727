"""The recorder: counts the steps of the process it runs in, and decides which of them are recorded.

In: a configuration (JSON, from the launcher), step markers, regions, requests of `collect --attach`. Out: recordings
(tracetools_recording). Standard library; Python 3.10. `recording`, `region`, `enter_step` and `exit_step` are what hooks and marks use.

A step's number is this process's own count, from 0. In a Ray worker whose driver marks steps it is the driver's current number:
then a worker that comes late, or is called twice in a step, or not at all, still records the same steps as everybody else.
Nothing in here raises into the training code.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from typing import Any

import tracetools_cards as cards
import tracetools_counter as counter
import tracetools_gc as collections
import tracetools_giveway as giveway
import tracetools_hooks as hooks
import tracetools_identity as identity
import tracetools_ranges as ranges
import tracetools_ray as ray
import tracetools_recording as recordings

READ = "read"  # in a step, until its record is written: what the profile's card rules found
PYTHON = "python"  # in the folder of live files: some Python process has come so far

recording = False  # read by every hook and region: keep it a plain global
_state: Recorder | None = None


def install(config: str) -> None:
    """Once per process; called by sitecustomize, or in a worker of a Ray cluster that was there before."""
    global _state
    if _state is None:
        settings = json.loads(config)
        cards.install(settings["cards"], settings["step_unless"])
        ranges.step_names = frozenset(settings["step_ranges"])
        identity.install(settings["roles"])
        _state = Recorder(settings)
        hooks.install(_state.targets)
        os.register_at_fork(after_in_child=_forked)
        _state.mark(PYTHON)


def _at_exit() -> None:
    """The thread that would have finished may be gone by now, or in the middle of it. A fork has a state, and no recording, of its own."""
    if _state is not None:
        ray.leaving(_current)
        _state.finish()


def _finish_at_exit() -> None:
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # the last one runs first: before Ray's own
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # its children leave without running what atexit knows
        util.Finalize(None, _at_exit, exitpriority=100)


def _forked() -> None:
    """A child of a recording process has neither its threads nor its profiler: it starts afresh."""
    global recording, _state
    recording = False
    collections.unwatch()
    if _state is not None:
        _state = Recorder(_state.config, targets=_state.targets)


def _current() -> Recorder | None:
    return _state


def _targets(config: dict[str, Any]) -> list[hooks.Target]:
    return [*hooks.targets(config), *ray.targets(_current), *giveway.targets(_current)]


def region(name: str) -> Any:
    """A context manager that puts a range named `name` into the trace."""
    return sys.modules["torch"].autograd.profiler.record_function(name)


def enter_step() -> _Marker | None:
    """-> a marker for exit_step, or None where this step does not count (it lies inside another, or something of ours failed)."""
    if _state is None:
        return None
    try:
        return _state.enter_step()
    except Exception as error:  # noqa: BLE001  the training code has not asked for us
        _state.broken(error)
        return None


def exit_step(marker: _Marker, numbers: dict[str, Any]) -> None:
    if _state is not None:
        try:
            _state.exit_step(marker, numbers)
        except Exception as error:  # noqa: BLE001  the training code has not asked for us
            _state.broken(error)


class _Marker:
    __slots__ = ("number", "range", "started")

    def __init__(self, number: int, span: Any, started: int) -> None:
        self.number = number
        self.range = span
        self.started = started


class Recorder:
    """State of one process: its step, and the window that it waits for, or the recording that it makes."""

    def __init__(self, config: dict[str, Any], targets: list[hooks.Target] | None = None) -> None:
        self.config = config
        self.out: str = config["out"]
        self.live = os.path.join(self.out, counter.LIVE)
        self.targets = targets if targets is not None else _targets(config)
        self.next = 0  # this process's own count
        self.inside = threading.Lock()  # held during a step
        self.counter: counter.Counter | None = None  # made at the first step
        self.driver: counter.DriverCounter | None = None  # in a Ray worker
        self.requests = counter.Requests(self.live)
        asked = config["window"]
        self.window = None if asked is None else recordings.Window(asked, self.out)
        self.recording: recordings.Recording | None = None
        self.folder: str | None = None  # of the latest recording that this process had to do with
        self.complained = False

    def mark(self, name: str) -> None:
        """An empty file that says that some process has come so far."""
        try:
            os.close(os.open(os.path.join(self.live, name), os.O_CREAT | os.O_WRONLY, 0o644))
        except OSError as error:
            sys.stderr.write(f"tracetools: process {os.getpid()} cannot reach its run folder: {error}\n")

    def broken(self, error: BaseException) -> None:
        """Something of ours failed in a way that nobody foresaw: say it once."""
        if not self.complained:
            self.complained = True
            sys.stderr.write(f"tracetools: process {os.getpid()}: a step could not be counted or recorded: {error!r}\n")

    # ------------------------------------------------------------ steps

    def enter_step(self) -> _Marker | None:
        if not self.inside.acquire(blocking=False):
            return None
        try:
            return self._begin()
        except BaseException:
            self.inside.release()
            raise

    def _begin(self) -> _Marker:
        number = self._number()
        self.next = number + 1
        if self.counter is not None:
            self.counter.begin(number)
        if self.recording is not None:
            self._step_begins(self.recording, number)
        elif self.window is not None:
            self._window_nears(self.window, number)
        current = self.recording
        if not recording or current is None or number < current.begins:  # not yet, no more, or just being written
            return _Marker(number, None, 0)
        cards.take()  # what was read since the last step belongs to none
        span = region(f"tracetools.step#{number}")
        span.__enter__()
        return _Marker(number, span, time.time_ns())

    def exit_step(self, marker: _Marker, numbers: dict[str, Any]) -> None:
        try:
            number = marker.number
            current = self.recording
            if marker.range is not None:
                marker.range.__exit__(None, None, None)
                if current is not None:
                    entry = {"number": number, "start_unix_ns": marker.started, "end_unix_ns": time.time_ns()}
                    current.steps.append({**entry, **_whole(numbers), READ: cards.take()})
            if current is not None:
                if number + 1 >= current.window.stop and not current.done:
                    current.over()
                elif current.finished.is_set():
                    self.recording = None
            elif self.window is None:
                self._look_for_request()
            if self.window is not None and self.recording is None:
                self._step_ended_before(self.window, number)
        finally:
            self.inside.release()

    def _number(self) -> int:
        if self.counter is None:
            self._introduce()
        count = 0 if self.driver is None else self.driver.count()
        if count == 0 or self.driver is None:
            return self.next
        # what another host writes arrives late
        return count - 1 if self.driver.same_host else max(self.next, count - 1)

    def _introduce(self) -> None:
        """At the first step: by now it is known what kind of process this is."""
        who = identity.who()
        job = None
        try:
            job = identity.ray_job()
        except Exception:  # noqa: BLE001  private parts of Ray: without them this process counts for itself
            who["ray_job"] = "unknown"
        if job is not None:
            driver, name = job
            if driver:
                who["driver_of"] = name
            else:
                self.driver = counter.DriverCounter(self.live, name)
        self.counter = counter.Counter(self.live, who)

    # ------------------------------------------------------------ windows

    def _look_for_request(self) -> None:
        asked = self.requests.latest()
        if asked is None:
            return
        window = recordings.Window(asked, self.out)
        if os.path.exists(os.path.join(window.folder, "run.json")):
            return  # over already
        self.window = window
        if self.counter is not None:
            self.counter.seen = window.number
            self.counter.write()

    def _window_nears(self, window: recordings.Window, number: int) -> None:
        """A step begins, and a window lies ahead."""
        if number >= window.stop:
            self.window = None
            recordings.decline(window, f"came to the recorded steps too late, at step {number}", self._report)
        elif number == window.first == 0:
            self.next = 0  # the only step that is recorded from within: it has not begun
            self._start(window)
            self.next = 1
        elif number == window.first - 1 and window.excludes(identity.who()) is None:
            recordings.warm_up(window)
        elif number >= window.first:
            window.skip(number, "this process began to step within the recorded steps, and warms up in its first one")

    def _step_ended_before(self, window: recordings.Window, number: int) -> None:
        """A step ended, and a window lies ahead: is it the last one before it?"""
        if window.first - 1 <= number < window.stop - 1:
            missed = range(window.first, number + 1)
            known = {s["number"] for s in window.skipped}
            for step in missed:
                if step not in known:
                    window.skip(step, f"this process came to step {number} before it could begin to record")
            self._start(window)

    def _start(self, window: recordings.Window) -> None:
        global recording
        self.window, self.folder = None, window.folder
        why = window.excludes(identity.who())
        if why is not None:
            recordings.decline(window, why, self._report)
            return
        _finish_at_exit()
        made = recordings.Recording(window, self._report, _stopped, self._after, self._passed)
        if made.start():
            made.begins = max(window.first, self.next)
            self.recording = made
            recording = True
            collections.watch()

    def _step_begins(self, current: recordings.Recording, number: int) -> None:
        """A step begins while a recording is under way, or being written."""
        if current.finished.is_set():
            self.recording = None
        elif number >= current.window.stop or current.asked:
            current.finish_now()
        elif current.over_at is not None:
            current.more()

    def _passed(self, number: int) -> bool:
        """Is the driver beyond this step? Then a worker that is not called any more has nothing to wait for."""
        return self.driver is not None and self.driver.count() > number + 1

    def _after(self, made: recordings.Recording) -> None:
        """A trace is written, on whatever thread wrote it."""
        if made.who["role"] == "driver":
            ray.save_timeline(made.window.folder, made.steps)

    def give_way(self, why: str) -> None:
        """End what is being recorded before somebody else's profiler begins, on the thread that begins it."""
        current = self.recording
        if current is not None and not current.stopped.is_set():
            current.problems.append(f"{why}: this recording ended there")
            current.finish_now()

    def finish(self) -> None:
        """Finish what is being recorded, now: the process or its workers are about to end."""
        if self.recording is not None:
            self.recording.finish()

    # ------------------------------------------------------------ the process's record

    def _report(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """What a recording's record says of the process beside its trace. Fills the cards of the steps."""
        _fill_cards(steps)
        return {
            "ppid": os.getppid(),
            "hooks": {**hooks.status(self.targets), "cards_missed": [list(m) for m in sorted(cards.missed.items())]},
            "versions": identity.versions(),
            "device": identity.device(),
            "nice": identity.nice(),
            "parallel": identity.parallel(),
            "environment": identity.environment(),
        }


def _stopped() -> None:
    global recording
    recording = False
    collections.unwatch()


def _fill_cards(steps: list[dict[str, Any]]) -> None:
    """What the training code says by itself (tracetools.step) wins over what hooks have read."""
    for step in steps:
        read = step.pop(READ, {})
        said = {k for k in cards.KEYS if step.get(k) is not None}
        found, sources = cards.resolved({k: v for k, v in read.items() if k not in said})
        step.update(found)
        step["sources"] = {**dict.fromkeys(sorted(said), "tracetools.step"), **sources}
    steps[:] = _merged(steps)


def _merged(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per number: a worker may be called several times in a step of its driver."""
    found: dict[int, dict[str, Any]] = {}
    for step in sorted(steps, key=lambda s: (s["number"], s["start_unix_ns"])):
        known = found.setdefault(step["number"], step)
        if known is not step:
            known["end_unix_ns"] = max(known["end_unix_ns"], step["end_unix_ns"])
            for key in cards.KEYS:
                parts = [s.get(key) for s in (known, step)]
                known[key] = None if None in parts else sum(parts)
    return list(found.values())


def _whole(numbers: dict[str, Any]) -> dict[str, int | None]:
    """Card numbers as plain integers; what is no whole number is left out."""
    out: dict[str, int | None] = {}
    for key, value in numbers.items():
        try:
            out[key] = None if value is None else int(value)
        except (TypeError, ValueError):
            out[key] = None
    return out
