"""Reading traces: file -> bytes (source) -> records (document, repair) -> columns (times, columns, trace) -> run (run).

In: paths. Out: `Trace` and `Run` values with every rejected or repaired event counted. Knows nothing of steps or causes.
"""

from __future__ import annotations

from tracetools.load.run import load_run
from tracetools.load.trace import read_trace

__all__ = ["load_run", "read_trace"]
