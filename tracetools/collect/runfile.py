"""run.json: what a recording was, put together from what its processes have left.

In: the folder of one recording, and what the launcher knows of the job. Out: run.json, and `Collected`. docs/collect.md has the format.
Knows nothing of how a process records or of what traces mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracetools.collect.live import announcements, read
from tracetools.output import write_atomically

RUN_SCHEMA = "tracetools.run/1"
RUN_FILE = "run.json"
PRIVATE = re.compile(r"(token|secret|passw|credential|api[-_]?key|auth)", re.IGNORECASE)
HIDDEN = "(not recorded)"

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a recorded job left behind. `exit_code` is the command's own (-N: ended by signal N)."""

    exit_code: int
    folder: Path
    traces: tuple[str, ...]
    steps: tuple[int, ...]  # numbers of the steps that some process recorded
    missing: tuple[str, ...]  # processes that recorded and left no trace
    problems: tuple[str, ...]
    not_recorded: tuple[str, ...] = ()  # processes that were not chosen, or came too late
    recordings: tuple[str, ...] = ()  # folders of what `collect --attach` recorded meanwhile
    why_empty: str = ""  # where there is no trace: what is known of the reason


def write_run(folder: Path, job: Mapping[str, Any], about: Mapping[str, Any]) -> Fields:
    """Merge what the processes left in `folder` into its run.json -> the record. Raises TracetoolsError where it cannot be written.

    `job`: command, profile and so on; `about`: of this recording. The processes' own files are removed once the record is written.
    """
    record = {"schema": RUN_SCHEMA, **job, **about, **_processes(folder)}
    write_atomically(folder / RUN_FILE, (json.dumps(record, indent=1) + "\n").encode())
    clean(folder)
    return record


def clean(folder: Path) -> None:
    """Remove the hidden files of a recording that is over."""
    for leftover in folder.glob(".*"):
        with suppress(OSError):
            leftover.unlink()


def collected(folder: Path, exit_code: int, record: Mapping[str, Any]) -> Collected:
    processes, left_out = record["processes"], record["not_recorded"]
    timeline = [t["problem"] for t in record["ray_timelines"] if t["problem"]]
    return Collected(
        exit_code=exit_code,
        folder=folder,
        traces=tuple(p["file"] for p in processes),
        steps=tuple(sorted({s["number"] for p in processes for s in p["steps"]})),
        missing=tuple(f"{m['role']} (pid {m['pid']}): {m['why']}" for m in record["missing"]),
        problems=(*(f"{_name(p)}: {problem}" for p in processes for problem in p["problems"]), *timeline),
        not_recorded=tuple(f"{_name(n)}: {n['why']}" for n in left_out),
        recordings=tuple(r["folder"] for r in record.get("recordings", ())),
    )


def _name(process: Mapping[str, Any]) -> str:
    rank = "" if process["rank"] is None else f" {process['rank']}"
    return f"{process['role']}{rank} (pid {process['pid']})"


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line whose values of options like --api-key are not told."""
    out: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            out.append(HIDDEN)
            hide = False
            continue
        private = bool(PRIVATE.search(name)) and (name.startswith("-") or bool(equals)) and " " not in name
        hide = private and not equals
        out.append(f"{name}={HIDDEN}" if private and equals else word)
    return out


# ---------------------------------------------------------------- what the processes left


def _processes(folder: Path) -> Fields:
    found = [p for f in sorted(folder.glob(".process-*.json")) if (p := read(f))]
    found.sort(key=lambda p: (p["role"] != "driver", p["rank"] is None, p["rank"] or 0, p["pid"]))
    recorded = [p for p in found if p["file"]]
    common = _common(recorded)
    sizes = [layout["sizes"] for p in recorded if (layout := p.get("parallel"))]
    hosts = _hosts(recorded)
    for process in recorded:
        layout = process.pop("parallel", None)
        process["parallel_ranks"] = layout["ranks"] if layout else None
    return {
        **common,
        "hosts": hosts,
        "parallel": sizes[0] if sizes and all(s == sizes[0] for s in sizes) else None,
        "ray_timelines": _timelines(folder),
        "processes": recorded,
        "missing": _missing(folder, found),
        "not_recorded": [_who(p) | {"why": p["not_recorded"]} for p in found if p.get("not_recorded")],
    }


def _common(processes: list[Fields]) -> dict[str, Fields]:
    """Versions and environment that all processes share; what differs stays with the process."""
    out: dict[str, Fields] = {}
    for key in ("versions", "environment"):
        every = [p.get(key, {}) for p in processes]
        names = {name for values in every for name in values}
        if key == "versions":  # a process that has not imported a library does not differ in it
            shared = {n: v for n in sorted(names) if len(v := {e[n] for e in every if n in e}) == 1}
        else:
            shared = {n: v for n in sorted(names) if len(v := {e.get(n) for e in every}) == 1}
        out[key] = {name: next(iter(values)) for name, values in shared.items()}
        for process in processes:
            process[key] = {k: v for k, v in process.get(key, {}).items() if k not in out[key]}
    return out


def _hosts(processes: list[Fields]) -> list[Fields]:
    hosts: dict[str, set[str]] = {}
    for process in processes:
        gpus = hosts.setdefault(process["host"], set())
        if process.get("device"):
            gpus.add(process["device"]["name"])
    return [{"host": host, "gpus": sorted(gpus)} for host, gpus in sorted(hosts.items())]


def _timelines(folder: Path) -> list[Fields]:
    out = []
    for file in sorted(folder.glob(".timeline-*.json")):
        said = read(file)
        lost = "Ray's timeline was not saved: the process that fetched it ended before" if said.get("pending") else None
        out.append({"file": said.get("file"), "events": said.get("events", 0), "problem": said.get("problem") or lost})
    return out


def _missing(folder: Path, processes: list[Fields]) -> list[Fields]:
    """Processes that began to record and left no trace."""
    missing = []
    for file in announcements(folder):
        said = read(file)
        doing = "its trace was being written" if file.name.startswith(".exporting-") else "it recorded"
        gone = f"ended while {doing}: killed, or its host is gone"
        if not said.get("file"):
            missing.append(_who(said) | {"why": said.get("why") or gone})
    missing += [
        _who(p) | {"why": "; ".join(p["problems"]) or "wrote no trace"}
        for p in processes
        if not p["file"] and not p.get("not_recorded")
    ]
    return missing


def _who(said: Mapping[str, Any]) -> Fields:
    return {k: said.get(k) for k in ("role", "rank", "host", "pid")}
