"""The recorder: torch.profiler around the chosen steps of the process it runs in.

In: a configuration (JSON, from the launcher), step markers, regions. Out: one trace file and one small record of the process, in
the run folder, each whole or not there. Standard library plus the torch that is already in the process; Python 3.10.

When it does what (measured on torch 2.13: preparing takes about 1 s, stopping 15 ms, exporting 40 us an event):
  prepare and start   when step FIRST-1 ends (for FIRST = 0 when step 0 begins), so that warm-up is in no recorded step
  stop and export     on a thread of our own: when the next step begins, or a short grace time after the last recorded step ended. A Ray
                      worker's last step ends inside its driver's last step; exporting at once would be seen there as work of the
                      stack. `profile_all_threads` lets another thread stop the profiler, and records every thread's ranges;
                      where torch does not have it, the thread that started the profiler stops it when the next step begins.
  at the latest       at exit of the process, when the launcher or the driver asks by a file in the run folder (a driver does before it
                      leaves, kills actors or shuts Ray down, because workers end by SIGKILL)
Whatever goes wrong in here is written to the record and stops the recording, never the training.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import tracetools_cards as cards
import tracetools_hooks as hooks
import tracetools_ranges as ranges

SCHEMA = 1
GRACE_S = 0.3  # after the last recorded step: long enough for a driver to finish its step, short enough to lose nothing
POLL_S = 0.2  # how often a recording process looks for a request to stop
PATIENCE_S = 60.0  # a driver that leaves waits so long for the traces of its workers
STOP_FILE = ".stop"
READ = "read"  # in a step, until its record is written: what the profile's card rules found
NAME = re.compile(r"[^A-Za-z0-9._-]+")

recording = False  # read by every hook and region: keep it a plain global
_state: Recorder | None = None


def install(config: str) -> None:
    """Once per process; called by sitecustomize."""
    global _state
    if _state is None:
        settings = json.loads(config)
        cards.install(settings["cards"])
        ranges.step_names = frozenset(settings["step_ranges"])
        ranges.step_unless = tuple(settings["step_unless"])
        _state = Recorder(settings)
        hooks.install(_state.targets)
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """A child of a recording process has neither its threads nor its profiler: it starts afresh."""
    global recording, _state
    recording = False
    if _state is not None:
        _state = Recorder(_state.config, targets=_state.targets)


def region(name: str) -> Any:
    """A context manager that puts a range named `name` into the trace."""
    return sys.modules["torch"].autograd.profiler.record_function(name)


def enter_step() -> _Marker | None:
    """-> a marker for exit_step, or None where this step does not count (it lies inside another, or recording is over)."""
    return None if _state is None else _state.enter_step()


def exit_step(marker: _Marker, numbers: dict[str, Any]) -> None:
    if _state is not None:
        _state.exit_step(marker, numbers)


class _Marker:
    __slots__ = ("number", "range", "started")

    def __init__(self, number: int, span: Any, started: int) -> None:
        self.number = number
        self.range = span
        self.started = started


class Recorder:
    """State of one process: waiting, recording, or done."""

    def __init__(self, config: dict[str, Any], targets: list[hooks.Target] | None = None) -> None:
        self.config = config
        self.out = config["out"]
        self.first, self.stop = config["first"], config["stop"]
        self.targets = targets if targets is not None else self._targets()
        self.count = 0  # steps begun
        self.inside = False
        self.profiler: Any = None
        self.done = False
        self.steps: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.lock = threading.Lock()
        self.wake = threading.Event()
        self.finished = threading.Event()
        self.over_at: float | None = None  # monotonic time at which the last wanted step ended
        self.any_thread = False

    def _targets(self) -> list[hooks.Target]:
        made = hooks.targets(self.config)
        # these end workers: let them finish what they have recorded
        made += [
            hooks.preceded("ray:shutdown", wait_for_workers),
            hooks.preceded("ray:kill", partial(wait_for_workers, ask=False)),
        ]
        return made

    # ------------------------------------------------------------ steps

    def enter_step(self) -> _Marker | None:
        if self.inside:
            return None
        self.inside = True
        number = self.count
        self.count += 1
        if number == self.first == 0 and not self.done:
            self._start()
        if self.over_at is not None and not self.done:
            self._finish_now()
        if not recording:  # not yet, no more, or just being written
            return _Marker(number, None, 0)
        cards.take()  # what was read since the last step belongs to none
        span = region(f"tracetools.step#{number}")
        span.__enter__()
        return _Marker(number, span, time.time_ns())

    def exit_step(self, marker: _Marker, numbers: dict[str, Any]) -> None:
        self.inside = False
        number = marker.number
        if marker.range is not None:
            marker.range.__exit__(None, None, None)
            self.steps.append(
                {
                    "number": number,
                    "start_unix_ns": marker.started,
                    "end_unix_ns": time.time_ns(),
                    **_whole(numbers),
                    READ: cards.take(),
                }
            )
        if number + 1 == self.first and self.profiler is None and not self.done:
            self._start()
        if number + 1 == self.stop and self.profiler is not None:
            self.over_at = time.monotonic()
            _rename(self._own("recording"), self._own("exporting"))
            self.wake.set()

    # ------------------------------------------------------------ start and end

    def _start(self) -> None:
        global recording
        try:
            self.profiler = self._profiler()
            self._announce()
        except Exception as error:  # noqa: BLE001  any fault of ours ends the recording, not the training
            self.profiler, self.done = None, True
            self.problems.append(f"the profiler did not start: {error!r}")
            self._write_record(None, 0, 0)
            return
        recording = True
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="tracetools-recorder", daemon=True).start()

    def _profiler(self) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile

        wanted = self.config["profiler"]
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        made = profile(
            activities=activities,
            record_shapes=wanted["record_shapes"],
            with_stack=wanted["with_stack"],
            profile_memory=wanted["profile_memory"],
            experimental_config=self._all_threads(torch),
        )
        made.preset_metadata_json("tracetools", json.dumps({"schema": SCHEMA, **identity()}))
        # not made.start(): that would add a ProfilerStep of its own
        made.prepare_trace()
        made.start_trace()
        return made

    def _all_threads(self, torch: Any) -> Any:
        try:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except (AttributeError, TypeError):
            self.problems.append("this torch cannot profile all threads: ranges of other threads are missing")
            return None
        self.any_thread = True
        return config

    def _watch(self) -> None:
        """Our thread: waits for the end of the last step or for a request, then stops and exports."""
        while not self.wake.wait(POLL_S) and not self.done:
            if os.path.exists(os.path.join(self.out, STOP_FILE)):
                break
        if self.over_at is not None and not self.done:
            self.wake.clear()
            self.wake.wait(max(0.0, self.over_at + GRACE_S - time.monotonic()))  # the next step's begin cuts this short
        if self.any_thread:
            self._finish()

    def _finish_now(self) -> None:
        """On the thread that begins the step after the last one."""
        if self.any_thread:
            self.wake.set()
            self.finished.wait(PATIENCE_S)
        else:
            self._finish()

    def _at_exit(self) -> None:
        """The watching thread may be gone by now, or in the middle of it."""
        wait_for_workers()
        self._finish()

    def _finish(self) -> None:
        """Stop and export, once, whoever comes first."""
        global recording
        with self.lock:
            if self.done:
                return
            self.done = True
            recording = False
            started, name = time.time_ns(), None
            try:
                self.profiler.stop_trace()
                name = self._export()
            except Exception as error:  # noqa: BLE001  a full disk must not end the training
                self.problems.append(f"the trace could not be written: {error!r}")
            self.profiler = None
            self._write_record(name, started, time.time_ns())
            _remove(self._own("recording"))
            _remove(self._own("exporting"))
            self.finished.set()

    def _export(self) -> str:
        who = identity()
        rank = "" if who["rank"] is None else f"-{who['rank']}"
        name = NAME.sub("_", f"{who['role']}{rank}.{who['host']}.{who['pid']}") + ".trace.json.gz"
        temporary = os.path.join(self.out, f".{os.getpid()}.tmp.json.gz")  # torch looks at the ending
        try:
            self.profiler.export_chrome_trace(temporary)
            os.replace(temporary, os.path.join(self.out, name))
        finally:
            _remove(temporary)
        return name

    # ------------------------------------------------------------ files in the run folder

    def _own(self, prefix: str) -> str:
        return os.path.join(self.out, NAME.sub("_", f".{prefix}-{socket.gethostname()}-{os.getpid()}") + ".json")

    def _announce(self) -> None:
        """Says that this process records, for those who wait for its trace and for the case that it never comes."""
        _write(self._own("recording"), {**identity(), "first": self.first, "stop": self.stop})

    def _fill_cards(self) -> None:
        """What the training code says by itself (tracetools.step) wins over what hooks have read."""
        for step in self.steps:
            read = step.pop(READ, {})
            said = {k for k in cards.KEYS if step.get(k) is not None}
            found, sources = cards.resolved({k: v for k, v in read.items() if k not in said})
            step.update(found)
            step["sources"] = {**dict.fromkeys(sorted(said), "tracetools.step"), **sources}

    def _write_record(self, file: str | None, export_started: int, export_ended: int) -> None:
        self._fill_cards()
        record = {
            "file": file,
            **identity(),
            "ppid": os.getppid(),
            "steps": self.steps,
            "export_started_unix_ns": export_started,
            "export_ended_unix_ns": export_ended,
            "hooks": {**hooks.status(self.targets), "cards_missed": [list(m) for m in sorted(cards.missed.items())]},
            "versions": _versions(),
            "problems": self.problems,
        }
        try:
            _write(self._own("process"), record)
        except OSError as error:
            sys.stderr.write(f"tracetools: process {os.getpid()} could not write its record: {error}\n")


def wait_for_workers(ask: bool = True) -> None:
    """In a Ray driver that is about to end workers: wait for their traces. Elsewhere nothing.

    `ask`: also those that have steps left to record are told to finish with what they have.
    """
    if _state is None or identity()["role"] != "driver":
        return
    waiting_for = (".recording-", ".exporting-") if ask else (".exporting-",)
    mine = {os.path.basename(_state._own(kind)) for kind in ("recording", "exporting")}
    deadline = time.monotonic() + PATIENCE_S
    asked = not ask
    while time.monotonic() < deadline:
        names = [
            f for f in os.listdir(_state.out) if f.startswith(waiting_for) and f.endswith(".json") and f not in mine
        ]
        if not any(_may_be_alive(os.path.join(_state.out, name)) for name in names):
            return
        if not asked:
            _write(os.path.join(_state.out, STOP_FILE), {})
            asked = True
        time.sleep(0.05)


def _may_be_alive(announcement: str) -> bool:
    """False where the process that announced itself in this file is known to be gone. Of other hosts nothing is known."""
    try:
        with open(announcement, encoding="utf-8") as file:
            who = json.load(file)
        if who["host"] == socket.gethostname():
            os.kill(who["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def identity() -> dict[str, Any]:
    """Who this process is: role, rank, world size, host, pid, and Ray's names for it."""
    ray = sys.modules.get("ray")
    who: dict[str, Any] = {
        "role": "rank",
        "rank": None,
        "world_size": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ray": None,
    }
    who["rank"], who["world_size"] = _rank()
    if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        in_worker = ray._private.worker.global_worker.mode == ray._private.worker.WORKER_MODE
        who["role"] = "policy" if in_worker else "driver"
        if in_worker:
            context = ray.get_runtime_context()
            who["ray"] = {
                "worker_id": context.get_worker_id(),
                "actor_id": context.get_actor_id(),
                "job_id": context.get_job_id(),
            }
        else:
            who["rank"] = who["world_size"] = None
    elif who["rank"] is None:
        who["rank"], who["world_size"] = 0, 1
    return who


def _rank() -> tuple[int | None, int | None]:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank) if rank.isdigit() else None), (int(world) if world.isdigit() else None)


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "ray", "megatron.core"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name.replace(".", "-")] = str(version)
    return found


def _whole(numbers: dict[str, Any]) -> dict[str, int | None]:
    """Card numbers as plain integers; what is no whole number is left out."""
    out: dict[str, int | None] = {}
    for key, value in numbers.items():
        try:
            out[key] = None if value is None else int(value)
        except (TypeError, ValueError):
            out[key] = None
    return out


def _write(path: str, value: dict[str, Any]) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as out:
        json.dump(value, out)
    os.replace(temporary, path)


def _rename(old: str, new: str) -> None:
    with suppress(OSError):  # it only tells others how far we are
        os.replace(old, new)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
