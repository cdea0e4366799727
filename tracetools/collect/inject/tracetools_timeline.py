"""Run as a script beside a Ray driver: writes what Ray knows of its tasks in a span of time.

In: GCS address, file to write, begin and end in Unix ns, pid of the driver. Out: the file, gzipped JSON, whole or not there:
    {"schema": "tracetools.ray_timeline/1", "start_unix_ns", "end_unix_ns", "traceEvents": [...]}
with the events of ray.timeline() that touch the span, times in microseconds since 1970 as Ray gives them; and beside it
`.timeline-PID.json`, which says how that went. Ends when its time is up, or when the driver is gone. Not part of the training process.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from typing import Any

import tracetools_files as files

SCHEMA = "tracetools.ray_timeline/1"
TIME_S = 60.0


def main() -> None:
    address, target, first, last, driver = sys.argv[1:]
    threading.Thread(target=_end_in_time, args=(int(driver),), daemon=True).start()
    said: dict[str, Any] = {"file": os.path.basename(target), "driver_pid": int(driver)}
    started = time.time_ns()
    try:
        events = _within(_events(address), int(first), int(last))
        _write(target, {"schema": SCHEMA, "start_unix_ns": int(first), "end_unix_ns": int(last), "traceEvents": events})
        said |= {"events": len(events), "problem": None}
    except Exception as error:  # noqa: BLE001  whatever Ray answers: it is said in run.json
        said |= {"file": None, "events": 0, "problem": f"Ray's timeline could not be saved: {error!r}"}
    said["took_ns"] = time.time_ns() - started
    files.write_json(os.path.join(os.path.dirname(target), f".timeline-{driver}.json"), said)


def _end_in_time(driver: int) -> None:
    deadline = time.monotonic() + TIME_S
    while time.monotonic() < deadline and files.may_be_alive({"host": os.uname().nodename, "pid": driver}):
        time.sleep(0.2)
    os._exit(1)


def _events(address: str) -> list[dict[str, Any]]:
    """As ray.timeline() gives them, without joining the cluster as a job."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]

    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state = GlobalState()
    state._initialize_global_state(options)
    found: list[dict[str, Any]] = state.chrome_tracing_dump()
    return found


def _within(events: list[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """Those that touch the span, in order of time. The rounding to whole microseconds is generous."""
    low, high = first // 1000 - 1, last // 1000 + 1
    found = [e for e in events if e["ts"] <= high and e["ts"] + e.get("dur", 0) >= low]
    return sorted(found, key=lambda e: (e["ts"], str(e["tid"]), e["name"]))


def _write(path: str, value: dict[str, Any]) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as out:
            out.write(gzip.compress(json.dumps(value).encode(), files.GZIP_LEVEL, mtime=0))
        os.replace(temporary, path)
    finally:
        files.remove(temporary)


if __name__ == "__main__":
    main()
