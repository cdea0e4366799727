"""Where the processes of a run are: one small file per process with the number of steps it has begun, and one request for all.

In: the run's folder of live files. Out: this process's counter, the step number of the driver it works for, and what it was asked to
record. Standard library only. Knows nothing of profilers.

Per step it costs one write of 32 bytes at a fixed place, in a Ray worker one read of as many, and every 50 ms one look whether
there is a request. A counter file: four 64-bit integers (steps begun, Unix time in ns of the latest begin, ns between the latest
two begins, number of the latest request seen), then JSON that says whose it is.
"""

from __future__ import annotations

import json
import os
import struct
import time
from typing import Any

import tracetools_files as files

LIVE = ".live"
PREFIX = "count-"
REQUEST = "request.json"
LAYOUT = struct.Struct("<4q")
LOOK_S = 0.05  # how often to look for a request
OFTEN = 20


class Counter:
    """This process's own. It never raises: a run folder that is gone costs the counter, not the training."""

    def __init__(self, live: str, who: dict[str, Any]) -> None:
        self.path = os.path.join(live, files.safe(PREFIX + f"{os.uname().nodename}-{os.getpid()}"))
        self.count = 0
        self.begun = 0
        self.took = 0
        self.seen = 0
        self.file = -1
        try:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o644)
            os.write(self.file, LAYOUT.pack(0, 0, 0, 0) + json.dumps(who).encode())
        except OSError:
            self.close()

    def begin(self, number: int) -> None:
        now = time.time_ns()
        self.took = now - self.begun if self.begun else 0
        self.begun = now
        self.count = number + 1
        self.write()

    def write(self) -> None:
        if self.file >= 0:
            try:
                os.pwrite(self.file, LAYOUT.pack(self.count, self.begun, self.took, self.seen), 0)
            except OSError:
                self.close()

    def close(self) -> None:
        """The file stays: it says how far the process came."""
        if self.file >= 0:
            file, self.file = self.file, -1
            os.close(file)


class DriverCounter:
    """The counter of the Ray driver that this worker works for, once it has begun a step."""

    def __init__(self, live: str, job: str) -> None:
        self.live = live
        self.job = job
        self.file = -1
        self.same_host = False
        self.looks = 0
        self.next = 0.0

    def count(self) -> int:
        """Steps that the driver has begun; 0 where it has none, or no counter."""
        try:
            if self.file < 0 and not self._find():
                return 0
            return int(LAYOUT.unpack(os.pread(self.file, LAYOUT.size, 0))[0])
        except (OSError, struct.error):
            return 0

    def _find(self) -> bool:
        now = time.monotonic()
        if now < self.next:
            return False
        self.looks += 1
        self.next = now + (
            0 if self.looks < OFTEN else 1
        )  # a driver that marks no steps has none: stop searching at every step
        for name in os.listdir(self.live):
            if name.startswith(PREFIX):
                path = os.path.join(self.live, name)
                who = whose(path)
                if who.get("driver_of") == self.job:
                    self.file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                    self.same_host = who.get("host") == os.uname().nodename
                    return True
        return False


def whose(path: str) -> dict[str, Any]:
    """What the process of a counter file said of itself; empty where it is not to be read."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read()[LAYOUT.size :])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Requests:
    """Looks for a request to record, now and then."""

    def __init__(self, live: str) -> None:
        self.path = os.path.join(live, REQUEST)
        self.next = 0.0
        self.seen = 0  # by modification time

    def latest(self) -> dict[str, Any] | None:
        """A request that was not here at the last look."""
        now = time.monotonic()
        if now < self.next:
            return None
        self.next = now + LOOK_S
        try:
            changed = os.stat(self.path).st_mtime_ns
        except OSError:
            return None
        if changed == self.seen:
            return None
        self.seen = changed
        return files.read_json(self.path)
