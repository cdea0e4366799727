"""A run folder, a plain folder of traces, or one trace file -> `Run`.

In: a path. Out: its processes in order of rank, on one clock, with what run.json knows of them.
What is missing, double or cannot be placed in time is named in problems. Knows nothing of steps or causes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tracetools.errors import TracetoolsError
from tracetools.load.trace import read_trace
from tracetools.model import Card, Problem, Process, Run, Trace

RUN_FILE = "run.json"
RUN_SCHEMA = "tracetools.run/1"
TRACE_SUFFIXES = (".json", ".json.gz", ".json.zst", ".json.zip", ".trace", ".trace.gz")
Progress = Callable[[str, int, int], None]  # (what is read, files done, files in all)


def load_run(path: Path | str, progress: Progress | None = None) -> Run:
    """Raises TracetoolsError naming the path (or the file in it) where there is nothing to analyse."""
    path = Path(path)
    if not path.exists():
        raise TracetoolsError(f"{path}: no such file or folder.")
    if not path.is_dir():
        return _assemble(path, [_process(read_trace(path), {}, path)], {}, ())
    record = _read_record(path / RUN_FILE)
    files, missing = _trace_files(path, record)
    processes, unreadable = _read_all(files, record, progress)
    return _assemble(path, processes, record, (*missing, *unreadable))


def _read_record(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise TracetoolsError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except msgspec.DecodeError as error:
        raise TracetoolsError(
            f"{path}: not valid JSON: {error}. Move it away to open the traces beside it as a plain folder."
        ) from error
    schema = record.get("schema")
    if schema != RUN_SCHEMA:
        raise TracetoolsError(
            f"{path}: key `schema` is {schema!r}, this version reads {RUN_SCHEMA!r}. Use the tracetools that wrote it."
        )
    return record


def _trace_files(folder: Path, record: Mapping[str, Any]) -> tuple[list[Path], list[Problem]]:
    """Files to read, and what the run's record says is not there."""
    problems = []
    if record:
        files = []
        for entry in _entries(record):
            file = folder / Path(str(entry.get("file", ""))).name
            if file.is_file():
                files.append(file)
            else:
                problems.append(Problem("missing_process", 1, f"{file.name}: named in {RUN_FILE}, not in the folder"))
        for lost in record.get("missing") or []:
            who = " ".join(str(lost[k]) for k in ("role", "rank") if lost.get(k) is not None)
            problems.append(
                Problem(
                    "missing_process", 1, f"{who or 'process'} (pid {lost.get('pid')}): {lost.get('why', 'no trace')}"
                )
            )
    else:
        files = sorted(
            f
            for f in folder.iterdir()
            if f.name.endswith(TRACE_SUFFIXES) and f.name != RUN_FILE and not f.name.startswith(".")
        )
    if not files:
        hint = "; ".join(p.detail for p in problems) or "none of its files ends in .json or .json.gz"
        recordings = [str(r.get("folder")) for r in record.get("recordings") or [] if isinstance(r, dict)]
        if recordings:
            raise TracetoolsError(
                f"{folder}: the run itself was not recorded. It holds recordings of `collect --attach`: {', '.join(recordings)}. "
                f"Give one of them: {folder / recordings[0]}"
            )
        raise TracetoolsError(
            f"{folder}: no traces in this folder ({hint}). Give a trace, a folder of traces, or a run folder of `tracetools collect`."
        )
    return files, problems


def _entries(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    entries = record.get("processes") or []
    return [e for e in entries if isinstance(e, dict)]


def _read_all(
    files: Sequence[Path], record: Mapping[str, Any], progress: Progress | None
) -> tuple[list[Process], list[Problem]]:
    """Every readable file. One bad file among good ones is a problem; nothing but bad ones is an error."""
    by_file = {str(e.get("file")): e for e in _entries(record)}
    processes, errors = [], []
    for done, file in enumerate(files):
        if progress:
            progress(file.name, done, len(files))
        try:
            processes.append(_process(read_trace(file), by_file.get(file.name, {}), file))
        except TracetoolsError as error:
            errors.append(error)
    if not processes:
        raise errors[0] if len(errors) == 1 else TracetoolsError("\n".join(str(e) for e in errors))
    return processes, [Problem("unreadable_file", 1, str(e)) for e in errors]


def _process(trace: Trace, entry: Mapping[str, Any], file: Path) -> Process:
    """A trace with what run.json (`entry`) says of it, else what it says itself."""
    info = trace.info
    rank = entry.get("rank", info.rank)
    role = str(entry.get("role") or info.extra.get("role") or "rank")
    problems = []
    if info.rank is None and not entry:
        problems.append(Problem("no_rank", 1, "the file does not say which rank it is"))
    if info.world_size is None and not entry:
        problems.append(Problem("no_world_size", 1, "the file does not say how many ranks the run has"))
    return Process(
        trace=replace(trace, file=file.name),
        role=role,
        rank=rank if isinstance(rank, int) else None,
        host=entry.get("host") or info.host,
        pid=entry.get("pid") or info.pid,
        world_size=entry.get("world_size") or info.world_size,
        cards=_cards(entry),
        problems=tuple(problems),
    )


def _cards(entry: Mapping[str, Any]) -> dict[int, Card]:
    fields = Card.__dataclass_fields__
    return {
        int(step["number"]): Card(**{k: step[k] for k in fields if isinstance(step.get(k), int)})
        for step in entry.get("steps") or []
        if isinstance(step, dict) and isinstance(step.get("number"), int)
    }


def _assemble(path: Path, processes: Sequence[Process], record: Mapping[str, Any], problems: Sequence[Problem]) -> Run:
    ordered = sorted(processes, key=lambda p: (p.role != "driver", p.rank is None, p.rank or 0, p.trace.file))
    placed, clock_problems = _one_clock(ordered)
    stack = record.get("profile")
    return Run(
        path=str(path),
        processes=tuple(placed[0]),
        origin_ns=placed[1],
        stack=str(stack) if stack else None,
        record=record,
        problems=(*problems, *_rank_problems(ordered), *clock_problems),
    )


def _one_clock(processes: Sequence[Process]) -> tuple[tuple[list[Process], int], list[Problem]]:
    """Event times of all files on the clock of the run.

    Files that say their base, and files whose times are wall-clock microseconds already, share a clock. A file whose
    times begin far from the others' has a clock of its own: it is set to begin with the run and marked as not placed.
    """
    origins = sorted(p.trace.origin_ns for p in processes)
    middle = origins[len(origins) // 2]
    far = 3600 * 10**9  # no two processes of one step begin an hour apart
    near = [o for o in origins if abs(o - middle) <= far]
    origin = near[0]
    placed, lost = [], []
    for process in processes:
        shift = process.trace.origin_ns - origin
        if abs(process.trace.origin_ns - middle) > far:
            lost.append(process.trace.file)
            placed.append(replace(process, clock_placed=False))
        else:
            trace = process.trace
            placed.append(replace(process, trace=replace(trace, events=trace.events.shifted(shift), origin_ns=origin)))
    problems = [
        Problem("clock", len(lost), f"clock cannot be set against the other files, analysed alone: {', '.join(lost)}")
    ]
    return (placed, origin), problems if lost else []


def _rank_problems(processes: Sequence[Process]) -> list[Problem]:
    """Ranks that are there twice, or not at all."""
    files: dict[tuple[str, int], list[str]] = defaultdict(list)
    for p in processes:
        if p.rank is not None:
            files[p.role, p.rank].append(p.trace.file)
    problems = [
        Problem(
            "duplicate_rank",
            len(names),
            f"{role} {rank} in {len(names)} files, each analysed on its own: {', '.join(names)}",
        )
        for (role, rank), names in files.items()
        if len(names) > 1
    ]
    worlds = Counter(p.world_size for p in processes if p.world_size and p.role != "driver")
    if len(processes) > 1 and worlds:
        world = worlds.most_common(1)[0][0] or 0
        absent = sorted(set(range(world)) - {rank for _, rank in files})
        if absent:
            shown = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
            problems.append(
                Problem("missing_rank", len(absent), f"rank {shown} of world size {world} not in the folder")
            )
    return problems
