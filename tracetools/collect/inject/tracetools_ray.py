"""What Ray needs: the recorder in workers of a cluster that was there before, time for traces before workers end, Ray's timeline.

In: calls of ray.init, ray.kill and ray.shutdown in a driver. Out: the same calls, and the recorder in every worker. Standard
library only, and Ray where it is imported already. Nothing in here raises into the training code.

Workers of a cluster that the job starts inherit the environment. Those of a cluster that runs already do not: there the job's
runtime_env brings the configuration, and a setup hook that is pickled by value, because the workers cannot import ours. A
hook of the user's runs after it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tracetools_files as files
import tracetools_hooks as hooks
import tracetools_identity as identity

CONFIG = "TRACETOOLS_RECORD"
PATIENCE_S = 60.0  # a driver that leaves waits so long for the traces of its workers
TIMELINE_PATIENCE_S = 15.0  # ... and so long for Ray's timeline
TIMELINE_FILE = "ray_timeline.json.gz"
KEY_OF_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # Ray's own: where the hook of an outer job is

Current = Callable[[], Any]  # -> the Recorder of this process, or None

_joins = False  # ray.init is about to join a cluster that runs already
_timeline: Any = None  # the process that fetches it


def targets(current: Current) -> list[hooks.Target]:
    return [
        hooks.Target("ray:init", _init, "init"),
        hooks.Target("ray._private.worker:_maybe_modify_runtime_env", _runtime_env, "runtime_env"),
        # these end workers: let them finish what they have recorded
        hooks.preceded("ray:shutdown", functools.partial(leaving, current)),
        hooks.preceded("ray:kill", functools.partial(_killing, current)),
    ]


# ---------------------------------------------------------------- clusters that run already


def _init(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def init(*args: Any, **kwargs: Any) -> Any:
        global _joins
        with suppress(Exception):  # an address that Ray does not take is Ray's to refuse
            _joins = _running_cluster(args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _joins = False

    return init


def _running_cluster(args: Any, kwargs: dict[str, Any]) -> bool:
    ray = sys.modules["ray"]
    if ray.is_initialized():
        return False
    address = kwargs.get("address", args[0] if args else None) or os.environ.get("RAY_ADDRESS")
    if address is not None and "://" in address:
        sys.stderr.write("tracetools: workers behind a Ray client address (ray://) are not reached\n")
        return False
    return ray._private.services.canonicalize_bootstrap_address(address, kwargs.get("_temp_dir")) is not None


def _runtime_env(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ray calls it with the job's runtime_env, when it has put it together from all that was said of it."""

    @functools.wraps(function)
    def modify(runtime_env: Any, *args: Any, **kwargs: Any) -> Any:
        found = function(runtime_env, *args, **kwargs)
        if not _joins:
            return found
        try:
            return with_recorder(found, os.environ[CONFIG])
        except Exception as error:  # noqa: BLE001  the job must start
            sys.stderr.write(f"tracetools: the Ray workers of this job are not reached: {error!r}\n")
            return found

    return modify


def with_recorder(runtime_env: Any, config: str) -> dict[str, Any]:
    """A copy of the job's runtime_env that installs the recorder in every worker."""
    made = dict(runtime_env or {})
    variables = dict(made.get("env_vars") or {})
    if KEY_OF_HOOK in variables:
        raise RuntimeError("an outer Ray job has set a worker_process_setup_hook, which cannot be chained")
    made["env_vars"] = {**variables, CONFIG: config}
    here = os.path.dirname(os.path.abspath(__file__))
    made["worker_process_setup_hook"] = setup_hook(here, made.get("worker_process_setup_hook"))
    return made


# Built from text in a module of the name __main__: cloudpickle then sends the code itself, not a name to import.
_SETUP = """
def make(folder, users):
    def setup():
        import importlib, os, sys
        try:
            if folder not in sys.path:
                sys.path.append(folder)
            path = os.environ.get("PYTHONPATH")
            if folder not in (path or "").split(os.pathsep):
                os.environ["PYTHONPATH"] = os.pathsep.join([folder] + ([path] if path else []))
            import tracetools_recorder
            tracetools_recorder.install(os.environ["TRACETOOLS_RECORD"])
        except Exception as error:
            sys.stderr.write("tracetools: not recording in process %d: %r\\n" % (os.getpid(), error))
        if isinstance(users, str):
            module, _, name = users.rpartition(".")
            return getattr(importlib.import_module(module), name)()
        if users is not None:
            return users()
    return setup
"""


def setup_hook(folder: str, users: Any) -> Callable[[], Any]:
    """For Ray's worker_process_setup_hook: installs the recorder from `folder`, then calls the user's hook, a function or its name."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_SETUP, "<tracetools>", "exec"), space)
    made: Callable[[], Any] = space["make"](folder, users)
    made.__name__ = users if isinstance(users, str) else getattr(users, "__name__", "tracetools")
    return made


# ---------------------------------------------------------------- before workers end


def leaving(current: Current) -> None:
    """A driver's ray.shutdown, or its end: nobody is left to record or to answer afterwards."""
    with suppress(Exception):
        recorder = current()
        if recorder is not None and identity.who()["role"] == "driver":
            wait_for_workers(current, ask=True)
            recorder.finish()
            wait_for_timeline()


def _killing(current: Current) -> None:
    with suppress(Exception):
        wait_for_workers(current, ask=False)


def wait_for_workers(current: Current, ask: bool) -> None:
    """In a Ray driver that is about to end workers: wait for their traces. Elsewhere nothing.

    `ask`: also those that have steps left to record are told to finish with what they have.
    """
    recorder = current()
    folder = None if recorder is None else recorder.folder
    if folder is None or identity.who()["role"] != "driver":
        return
    waiting_for = (f".{files.RECORDING}-", f".{files.EXPORTING}-") if ask else (f".{files.EXPORTING}-",)
    mine = {os.path.basename(files.own(folder, kind)) for kind in (files.RECORDING, files.EXPORTING)}
    deadline = time.monotonic() + PATIENCE_S
    asked = not ask
    while time.monotonic() < deadline:
        names = [f for f in os.listdir(folder) if f.startswith(waiting_for) and f.endswith(".json") and f not in mine]
        if not any(_still_writes(files.read_json(os.path.join(folder, name))) for name in names):
            return
        if not asked:
            files.write_json(os.path.join(folder, files.STOP_FILE), {})
            asked = True
        time.sleep(0.05)


def _still_writes(announcement: dict[str, Any] | None) -> bool:
    return announcement is not None and "why" not in announcement and files.may_be_alive(announcement)


# ---------------------------------------------------------------- Ray's own timeline


def save_timeline(folder: str, steps: list[dict[str, Any]]) -> None:
    """In a driver, after its recording: have Ray's events of that time written to the folder, by a process of its own.

    Reading them takes Ray's control service and Python a while, and could hang: neither is done to the training process.
    """
    global _timeline
    import subprocess  # here, because every Python process of a job starts with this module

    ray = sys.modules.get("ray")
    if ray is None or not steps or not ray.is_initialized():
        return
    first, last = min(s["start_unix_ns"] for s in steps), max(s["end_unix_ns"] for s in steps)
    name = TIMELINE_FILE
    if os.path.exists(os.path.join(folder, name)):  # of another driver
        name = f"ray_timeline.{os.getpid()}.json.gz"
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, os.path.join(here, "tracetools_timeline.py"), ray.get_runtime_context().gcs_address]
    _timeline = subprocess.Popen(
        [*command, os.path.join(folder, name), str(first), str(last), str(os.getpid())],
        env={k: v for k, v in os.environ.items() if k != CONFIG},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not meant for it
    )
    said = {"file": None, "driver_pid": os.getpid(), "host": os.uname().nodename, "pid": _timeline.pid, "pending": True}
    with suppress(OSError):
        if _timeline.poll() is None:
            files.write_json(os.path.join(folder, f".timeline-{os.getpid()}.json"), said)
    threading.Thread(target=_timeline.wait, name="tracetools-timeline", daemon=True).start()  # leave no zombie


def wait_for_timeline() -> None:
    """Before the driver leaves Ray. A timeline that does not come is given up."""
    global _timeline
    waited, _timeline = _timeline, None
    if waited is not None:
        deadline = time.monotonic() + TIMELINE_PATIENCE_S
        while waited.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if waited.poll() is None:
            waited.kill()
            waited.wait()
