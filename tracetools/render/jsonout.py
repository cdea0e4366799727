"""Results as JSON with the keys of schema tracetools.breakdown/1 and tracetools.diff/1.

In: `RunBreakdown` or `Diff`. Out: UTF-8 JSON. Times are integer nanoseconds; unknown or undefined is null, never NaN.
Keys may be added, never renamed without a new schema number. Knows nothing of terminals or files.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tracetools.diff_records import Diff
from tracetools.model import Card, Cause, Problem, ProcessBreakdown, RunBreakdown, StepBreakdown, Straggler

BREAKDOWN_SCHEMA = "tracetools.breakdown/1"
DIFF_SCHEMA = "tracetools.diff/1"


def render(result: RunBreakdown | Diff) -> bytes:
    """Indented JSON that ends with a newline."""
    document = breakdown_document(result) if isinstance(result, RunBreakdown) else diff_document(result)
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def breakdown_document(run: RunBreakdown) -> dict[str, Any]:
    return {
        "schema": BREAKDOWN_SCHEMA,
        "path": run.path,
        "stack": run.stack,
        "processes": [_process(p) for p in run.processes],
        "collectives": [msgspec.to_builtins(c) for c in run.collectives],
        "stragglers": [_straggler(s) for s in run.stragglers],
        "clocks": [msgspec.to_builtins(c) for c in run.clocks],
        "problems": [_problem(p) for p in run.problems],
    }


def _process(p: ProcessBreakdown) -> dict[str, Any]:
    return {
        "file": p.file,
        "role": p.role,
        "rank": p.rank,
        "host": p.host,
        "pid": p.pid,
        "device": p.device,
        "world_size": p.world_size,
        "steps_from": p.steps_from,
        "device_span": msgspec.to_builtins(p.device_span),
        "steps": [_step(s) for s in p.steps],
        "kernel_classes": [
            {
                "class": k.name,
                "count": k.count,
                "total_ns": k.total_ns,
                "mean_ns": round(k.total_ns / k.count) if k.count else None,
            }
            for k in p.kernel_classes
        ],
        "regions": [msgspec.to_builtins(r) for r in p.regions],
        "synchronisations": [msgspec.to_builtins(s) for s in p.synchronisations],
        "coverage": msgspec.to_builtins(p.coverage),
        "problems": [_problem(q) for q in p.problems],
    }


def _step(s: StepBreakdown) -> dict[str, Any]:
    card: Card = s.card
    return {
        "name": s.name,
        "start_ns": s.start_ns,
        "wall_ns": s.wall_ns,
        "compute_ns": s.compute_ns,
        "exposed_comm_ns": s.exposed_comm_ns,
        "exposed_memory_ns": s.exposed_memory_ns,
        "idle_ns": s.idle_ns,
        "comm_ns": s.comm_ns,
        "overlapped_comm_ns": s.overlapped_comm_ns,
        "comm_wait_ns": s.comm_wait_ns,
        "kernels": s.kernels,
        **msgspec.to_builtins(card),
        "idle_causes": [_cause(c) for c in s.causes],
        "exposed_comm_causes": [_cause(c) for c in s.comm_causes],
    }


def _cause(c: Cause) -> dict[str, Any]:
    row: dict[str, Any] = {"process": c.process, "region": c.region, "kind": c.kind, "ns": c.ns}
    if c.filled_by:
        row["filled_by"] = [{"name": name, "ns": ns} for name, ns in c.filled_by]
    return row


def _straggler(s: Straggler) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(s)
    del row["causes"]
    return {**row, "idle_causes": [_cause(c) for c in s.causes]}


def _problem(p: Problem) -> dict[str, Any]:
    return {"kind": p.kind, "count": p.count, "detail": p.detail}


def diff_document(d: Diff) -> dict[str, Any]:
    return {
        "schema": DIFF_SCHEMA,
        "verdict": d.verdict,
        "sentence": d.sentence,
        "a": msgspec.to_builtins(d.a),
        "b": msgspec.to_builtins(d.b),
        "comparability": [msgspec.to_builtins(c) for c in d.comparability],
        "pairing": d.pairing,
        "step_ns": msgspec.to_builtins(d.step),
        "per_token_ns": msgspec.to_builtins(d.per_token),
        "waterfall": [msgspec.to_builtins(w) for w in d.waterfall],
        "kernel_classes": [
            {("class" if k == "name" else k): v for k, v in msgspec.to_builtins(row).items()}
            for row in d.kernel_classes
        ],
        "what_if": None,
        "replay_error": None,
        "noise_ns": d.noise_ns,
        "coverage": {"a": msgspec.to_builtins(d.coverage[0]), "b": msgspec.to_builtins(d.coverage[1])},
        "problems": [{"side": side, **_problem(p)} for side, p in d.problems],
    }
