"""What a profiler would have written of one process: Kineto-shaped, times exact to the nanosecond.

In: slices, as they end. Out: the text of a trace file. Knows nothing of the simulation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EPOCH_NS = 1_750_000_000_000_000_000  # wall clock of instant 0


class Record:
    """Slices of one process. `base_ns`: which instant its file calls 0, as every file has its own."""

    def __init__(self, pid: int, base_ns: int, about: Mapping[str, Any]) -> None:
        self.pid = pid
        self._base = base_ns
        self._about = about
        self._events: list[str] = []
        self.slices: list[tuple[str, int, int]] = []  # name, start, end of each, as they ended

    def host(self, name: str, category: str, tid: int, start: int, end: int, correlation: int = 0) -> None:
        args = f'"correlation":{correlation}' if correlation else ""
        self._add(name, category, self.pid, tid, start, end, args)

    def device(
        self, name: str, category: str, stream: int, start: int, end: int, correlation: int, told: str = ""
    ) -> None:
        """Work on a stream. `told`: further arguments, as JSON without braces."""
        args = f'"device":0,"stream":{stream},"correlation":{correlation}{"," + told if told else ""}'
        self._add(name, category, 0, stream, start, end, args)

    def overhead(self, name: str, start: int, end: int) -> None:
        """The profiler names no thread for its own doing."""
        self._add(name, "overhead", -1, 0, start, end, "")

    def _add(self, name: str, category: str, pid: int, tid: int, start: int, end: int, args: str) -> None:
        self.slices.append((name, start, end))
        self._events.append(
            f'{{"ph":"X","cat":"{category}","name":"{name}","pid":{pid},"tid":{tid},"ts":{_us(start - self._base)},'
            f'"dur":{_us(end - start)},"args":{{{args}}}}}'
        )

    def write(self, path: Path) -> None:
        head = {"schemaVersion": 1, "baseTimeNanoseconds": EPOCH_NS + self._base, **self._about}
        path.write_text(f'{json.dumps(head)[:-1]}, "traceEvents": [\n' + ",\n".join(self._events) + "\n]}")


def _us(ns: int) -> str:
    """Microseconds with three decimals, exact."""
    sign = "-" if ns < 0 else ""
    whole, rest = divmod(abs(ns), 1000)
    return f"{sign}{whole}.{rest:03d}"
