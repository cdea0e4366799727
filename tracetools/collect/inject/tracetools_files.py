"""Files of the run folder, as the recorder writes them: each is whole, or not there.

In: paths and values. Out: JSON files, trace files, and announcements by which others see what a process is doing. Standard library only.
Knows nothing of profilers or steps.

A folder of one recording holds, until they are merged into its run.json:
  .recording-HOST-PID.json   a process records now; .exporting-... once its last step is over. One whose process is gone was lost.
  .process-HOST-PID.json     what a process has to say when it is through, with a trace or without
  .stop                      whoever still records is asked to finish with what it has
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Any

STOP_FILE = ".stop"
RECORDING, EXPORTING, PROCESS = "recording", "exporting", "process"
TAIL_BYTES = 4096  # the end of a trace, which shows whether all of it was written
GZIP_LEVEL = 4  # a quarter of the time of gzip's default, a fifth more bytes
RESERVED = 2048  # bytes of an announcement: room for a message when the disk has none left
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe(name: str) -> str:
    """A name with nothing in it that a file name must not have."""
    return _UNSAFE.sub("_", name)


def own(folder: str, kind: str) -> str:
    """Path of this process's file of a kind."""
    return os.path.join(folder, safe(f".{kind}-{os.uname().nodename}-{os.getpid()}") + ".json")


def write_json(path: str, value: dict[str, Any], reserve: int = 0) -> None:
    """Whole or not at all. `reserve`: at least so many bytes. Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.write(json.dumps(value).ljust(reserve))
        os.replace(temporary, path)
    finally:
        remove(temporary)


def overwrite_json(path: str, value: dict[str, Any]) -> None:
    """Into the bytes that the file has already: it works on a full disk. Not atomic; readers take half a text for none."""
    data = json.dumps(value).encode()
    with open(path, "r+b") as out:
        out.write(data.ljust(os.path.getsize(path)))


def read_json(path: str) -> dict[str, Any] | None:
    """None where there is no such file, or only half of one."""
    with suppress(OSError, ValueError):
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return found if isinstance(found, dict) else None
    return None


def compress_trace(raw: str, final: str) -> None:
    """A trace as the profiler left it -> a file under its final name, gzipped. Raises OSError where either is cut short."""
    import gzip  # here, because every Python process of a job starts with this module
    import shutil

    if not _is_whole(raw):
        raise OSError("the profiler could not write all of it; is the disk full?")
    temporary = os.path.join(os.path.dirname(final), f".{os.getpid()}.tmp.json.gz")
    try:
        with open(raw, "rb") as source, open(temporary, "wb") as target:
            with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=GZIP_LEVEL, mtime=0) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            target.flush()
            os.fsync(target.fileno())  # some file systems say only now that they are full
        os.replace(temporary, final)
    finally:
        remove(temporary)


def _is_whole(trace: str) -> bool:
    """The profiler says nothing when a write fails: then the end is missing, or there is no file at all."""
    if not os.path.exists(trace):
        return False
    with open(trace, "rb") as file:
        file.seek(max(0, os.path.getsize(trace) - TAIL_BYTES))
        tail = file.read().rstrip()
    return tail.endswith(b"}") and b'"traceName"' in tail


def may_be_alive(who: dict[str, Any] | None) -> bool:
    """False where the process of an announcement is known to be gone. Of other hosts nothing is known."""
    if who is None:
        return False
    if who.get("host") != os.uname().nodename:
        return True
    try:
        os.kill(int(who["pid"]), 0)
    except (ProcessLookupError, KeyError):
        return False
    except PermissionError:
        pass
    return True


def rename(old: str, new: str) -> None:
    with suppress(OSError):  # it only tells others how far we are
        os.replace(old, new)


def remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
