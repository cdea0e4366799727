"""Python's garbage collections as ranges, while the process records.

In: the collector's own callbacks. Out: a range `garbage_collection` around each collection of generation 1 or 2. (Collections of the
youngest generation take microseconds and come by the thousand: a range around each would cost as much as it shows.)
Standard library only. Knows nothing of what is recorded otherwise; ranges are the recorder's.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

NAME = "garbage_collection"
_local = threading.local()


def watch() -> None:
    if _callback not in gc.callbacks:
        gc.callbacks.append(_callback)


def unwatch() -> None:
    if _callback in gc.callbacks:
        gc.callbacks.remove(_callback)


def _callback(phase: str, info: dict[str, Any]) -> None:
    if not info["generation"]:
        return
    try:
        if phase == "start":
            _local.span = sys.modules["tracetools_recorder"].region(NAME)
            _local.span.__enter__()
        elif (span := getattr(_local, "span", None)) is not None:
            _local.span = None
            span.__exit__(None, None, None)
    except Exception:  # noqa: BLE001  in the middle of anybody's code, at exit of the interpreter too
        unwatch()
