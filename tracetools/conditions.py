"""What a run ran under, besides its code: what a reader must know before two runs are held against each other.

In: run.json as it stands. Out: (what, value) pairs, as text. A run without run.json has none. Knows nothing of other runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LAYOUT = "parallel layout"
PRIORITY = "scheduling priority (nice)"
DECISIVE = (LAYOUT, PRIORITY, "torch version")  # a difference in one of these may be the whole difference


def conditions(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """In a fixed order. Never raises: what is not as run.json has it counts as not said."""
    found: dict[str, str] = {}
    layout = _mapping(record.get("parallel"))
    if layout:
        found[LAYOUT] = " ".join(f"{name}{size}" for name, size in layout.items())
    workers = [p for p in _mappings(record.get("processes")) if p.get("role") != "driver"]
    priorities = sorted({p["nice"] for p in workers if isinstance(p.get("nice"), int)})
    if priorities:
        found[PRIORITY] = ", ".join(map(str, priorities))
    found |= {f"{name} version": str(version) for name, version in sorted(_mapping(record.get("versions")).items())}
    found |= {f"environment: {name}": str(value) for name, value in sorted(_mapping(record.get("environment")).items())}
    return tuple(found.items())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> Sequence[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
