"""What a trace file says about itself: rank, world size, device, clock base, profiler settings.

In: its top-level keys and its name. Out: `TraceInfo`. Knows nothing of events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracetools.model import ProcessGroup, TraceInfo

PROFILER_FLAGS = ("record_shapes", "with_stack", "with_flops", "with_modules", "profile_memory")
VERSIONS = (
    "nccl_version",
    "cupti_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "hip_driver_version",
)
# rank-3, rank3, rank_3, worker0 (tensorboard_trace_handler), not num_workers_0
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_. ]?(\d+)", re.IGNORECASE)


def trace_info(top: Mapping[str, Any], path: Path) -> TraceInfo:
    """Never raises: a key of an unexpected kind counts as not said."""
    distributed = _mapping(top.get("distributedInfo"))
    ours = _mapping(top.get("tracetools"))
    rank, source = _whole(ours.get("rank")), "tracetools"
    if rank is None:
        rank, source = _whole(distributed.get("rank")), "distributedInfo"
    if rank is None and (match := _RANK_IN_NAME.search(path.name)):
        rank, source = int(match[1]), "file name"
    world = _whole(distributed.get("world_size"))
    return TraceInfo(
        rank=rank,
        world_size=world if world is not None else _whole(ours.get("world_size")),
        backend=_text(distributed.get("backend")),
        host=_text(ours.get("host")) or _text(top.get("host_name")),
        pid=_whole(ours.get("pid")),
        devices=_devices(top.get("deviceProperties")),
        base_ns=_whole(top.get("baseTimeNanoseconds")),
        profiler=tuple(flag for flag in PROFILER_FLAGS if top.get(flag)),
        rank_source=source if rank is not None else None,
        extra={
            **{key: str(top[key]) for key in VERSIONS if key in top},
            **({"nccl_version": str(distributed["nccl_version"])} if "nccl_version" in distributed else {}),
            **({"role": str(ours["role"])} if "role" in ours else {}),
        },
        groups=_groups(distributed.get("pg_config")),
    )


def _groups(config: Any) -> dict[str, ProcessGroup]:
    """Each process group that the file lists; one whose ranks it does not spell out is left out."""
    found = {}
    for entry in config if isinstance(config, list) else []:
        ranks = _mapping(entry).get("ranks")
        if isinstance(ranks, list) and ranks and all(_whole(r) is not None for r in ranks):
            description = _text(entry.get("pg_desc")) or ""
            group = ProcessGroup(tuple(sorted(map(int, ranks))), "" if description == "undefined" else description)
            found[str(entry.get("pg_name"))] = group
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and str(value) else None


def _devices(value: Any) -> tuple[str, ...]:
    rows = value if isinstance(value, list) else []
    return tuple(str(d.get("name", "")) for d in rows if isinstance(d, dict))
