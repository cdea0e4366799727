"""A run while its job is there: who takes part, how far each is, what still writes.

In: the hidden files that recorders leave in a run folder (inject/tracetools_files, inject/tracetools_counter). Out: plain values.
Writes nothing but requests to stop. Knows nothing of traces.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIVE = ".live"
JOB_FILE = "job.json"
REQUEST_FILE = "request.json"
PYTHON_FILE = "python"  # some Python process has come so far
STOP_FILE = ".stop"
COUNTER = struct.Struct(
    "<4q"
)  # steps begun, Unix ns of the latest begin, ns between the latest two, latest request seen
COUNTER_PREFIX = "count-"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one process has come. `key` is HOST-PID, as in the names of its files."""

    key: str
    who: dict[str, Any]  # role, rank, host, pid
    count: int  # steps begun
    took_ns: int  # between the latest two begins; 0 where there were no two
    seen: int  # number of the latest request that it has seen
    alive: bool


def counters(run: Path) -> list[Progress]:
    """Of every process that has begun a step."""
    found = []
    for file in sorted((run / LIVE).glob(COUNTER_PREFIX + "*")):
        with suppress(OSError, struct.error, ValueError, KeyError):
            data = file.read_bytes()
            count, _, took, seen = COUNTER.unpack_from(data)
            who = json.loads(data[COUNTER.size :])
            key = file.name.removeprefix(COUNTER_PREFIX)
            about = {name: who[name] for name in ("role", "rank", "host", "pid")}
            found.append(Progress(key, about, count, took, seen, alive(who)))
    return [p for p in found if p.count]


def announcements(folder: Path) -> list[Path]:
    """Of processes that record into this folder, or write their trace."""
    return [*sorted(folder.glob(".recording-*.json")), *sorted(folder.glob(".exporting-*.json"))]


def still_writing(folder: Path) -> bool:
    """Is there a process that may yet finish what it has announced?"""
    writing = any("why" not in said and alive(said) for said in map(read, announcements(folder)))
    return writing or any(said.get("pending") and alive(said) for said in map(read, folder.glob(".timeline-*.json")))


def ask_to_finish(folder: Path) -> None:
    """Whoever still records finishes with what it has."""
    with suppress(OSError):
        (folder / STOP_FILE).touch()


def alive(who: dict[str, Any]) -> bool:
    """Is this process there, and not a zombie? Of another host nothing is known: False."""
    if who.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(who["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return _state(int(who["pid"])) != "Z"


def _state(pid: int) -> str:
    """Linux's one letter for the state of a process; "" where it cannot be known."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def read(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is none to be read."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
