"""Rows of a waterfall, by the cause that they are of.

In: a `Diff`. Out: ns per cause. What a rank does in a region, and another rank's wait for that, are two rows of one cause.
Knows nothing of where the runs came from.
"""

from __future__ import annotations

from collections.abc import Callable

from tracetools.diff_records import Diff, Row
from tracetools.verdict import label

Rule = Callable[[Row], bool]
COMPUTE = "compute"


def region(*names: str) -> Rule:
    return lambda row: row.region in names


def waterfall_by_cause(diff: Diff, but: Rule) -> dict[str, int]:
    """Cause -> ns of B's step more than of A's, of all rows that are not `but`."""
    found: dict[str, int] = {}
    for row in diff.waterfall:
        if not but(row):
            name = _cause(row)
            found[name] = found.get(name, 0) + row.delta_ns
    return found


def _cause(row: Row) -> str:
    if row.part == "compute" or row.kind == "wait_compute":
        return COMPUTE
    if row.region is None:
        return label(row)
    return f"{'driver' if row.process == 'driver' else 'rank'}: {row.region}"
