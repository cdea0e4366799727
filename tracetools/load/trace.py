"""One trace file -> `Trace`.

In: a path. Out: its slices in columns, sorted, in exact nanoseconds, with what the file says about itself and a count
of everything that was rejected or repaired. Knows nothing of other files, steps or causes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracetools.errors import TracetoolsError
from tracetools.load.columns import Columns, join, make_columns, make_threads
from tracetools.load.document import parse_document
from tracetools.load.info import trace_info
from tracetools.load.records import Body, Event, EventTimes, Metadata, Slice
from tracetools.load.source import read_text
from tracetools.load.stream import NotUsual, Piece, each_piece
from tracetools.load.times import LONGEST_NS, TimesNeedText, from_numbers, from_text, text_of
from tracetools.model import Bool, Category, Events, Int64, Problem, Trace

DEVICE_CODES = (int(Category.KERNEL), int(Category.MEMCPY), int(Category.MEMSET))


def read_trace(path: Path) -> Trace:
    """Raises TracetoolsError naming the file where it cannot be read, is no trace, or holds no slice."""
    read = _usual(path) or _whole(path)
    if not read.parts:
        raise TracetoolsError(
            f"{path}: no events with a duration. Was anything recorded (profiler schedule, wait/warmup longer than the job)?"
        )
    columns = join([p.columns for p in read.parts])
    start, end = (np.concatenate([getattr(p, c) for p in read.parts]) for c in ("start", "end"))
    usable = np.concatenate([p.usable for p in read.parts])
    keep, rejected = _sane(columns, start, end, usable)
    if not keep.any():
        raise TracetoolsError(f"{path}: none of its {len(start)} events has a usable time: {_list(rejected)}.")
    info = trace_info(read.top, path)
    origin, events = _sorted_events(columns, start, end, keep)
    return Trace(
        file=path.name,
        events=events,
        names=columns.names,
        threads=make_threads(columns.thread_keys, _thread_names(read.metadata)),
        dims=columns.dim_texts,
        collectives=columns.collectives,
        info=info,
        origin_ns=origin + (info.base_ns or 0),
        problems=(*read.problems, *rejected),
    )


def _list(problems: Sequence[Problem]) -> str:
    return "; ".join(f"{p.count} x {p.detail}" for p in problems)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some slices in columns; start and end in ns, and whether these are numbers."""

    columns: Columns
    start: Int64
    end: Int64
    usable: Bool


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What was found in a file, in file order."""

    parts: Sequence[_Part]
    metadata: Sequence[Body]
    top: dict[str, Any]
    problems: tuple[Problem, ...] = ()


def _usual(path: Path) -> _Read | None:
    """Piece by piece; None where the file has to be read whole."""
    parts: list[_Part] = []
    metadata: list[Body] = []

    def take(piece: Piece) -> None:
        kinds = set(map(type, piece.events))
        slices = piece.events if kinds == {Slice} else [e for e in piece.events if type(e) is Slice]
        if Metadata in kinds:
            metadata.extend(e for e in piece.events if type(e) is Metadata)
        if slices:
            parts.append(_Part(make_columns(slices), *_times(slices, piece.text, path)))

    try:
        return _Read(parts, metadata, each_piece(path, take))
    except NotUsual:
        return None


def _whole(path: Path) -> _Read:
    text, problems = read_text(path)
    document = parse_document(text, Event, path)
    phases = defaultdict(list)
    for event in document.events:
        phases[event.ph].append(event)
    problems += document.problems
    complete, parts = phases["X"], []
    if complete:
        parts.append(_Part(make_columns(complete), *_times(complete, text, path)))
    if phases["B"] or phases["E"]:
        marks = [e for e in document.events if e.ph in ("B", "E")]
        paired, start, end, found = _pair_begin_end(marks, *_mark_times(marks, text, path))
        problems += tuple(found)
        if paired:
            parts.append(_Part(make_columns(paired), start, end, np.ones(len(paired), np.bool_)))
    return _Read(parts, phases["M"], document.top, problems)


def _times(slices: Sequence[Body], text: bytes, path: Path) -> tuple[Int64, Int64, Bool]:
    """(start ns, end ns, usable) of the complete slices of a text."""
    try:
        return from_numbers([e.ts for e in slices], [e.dur for e in slices])
    except TimesNeedText:
        rows = [e for e in parse_document(text, EventTimes, path).events if e.ph == "X"]
        return from_text([text_of(e.ts) for e in rows], [text_of(e.dur) for e in rows])


def _pair_begin_end(marks: Sequence[Event], at: Int64, usable: Bool) -> tuple[list[Body], Int64, Int64, list[Problem]]:
    """B and E events as slices. A begin that is never ended lasts to its thread's last time; a lone end is counted."""
    stacks: dict[tuple[str, str], list[tuple[Event, int]]] = defaultdict(list)
    last: dict[tuple[str, str], int] = {}
    done: list[tuple[Event, int, int]] = []
    lone_ends = 0
    for row in np.argsort(at, kind="stable"):
        event, time = marks[row], int(at[row])
        if not usable[row]:
            continue
        key = (str(event.pid), str(event.tid))
        last[key] = max(last.get(key, time), time)
        if event.ph == "B":
            stacks[key].append((event, time))
        elif stacks[key]:
            begin, began = stacks[key].pop()
            done.append((begin, began, time))
        else:
            lone_ends += 1
    unfinished = [(event, began, last[key]) for key, stack in stacks.items() for event, began in stack]
    done += unfinished
    problems = [
        Problem("end_without_begin", lone_ends, "E events without a B, ignored"),
        Problem("unfinished", len(unfinished), "B events that never end, extended to their thread's last time"),
        Problem("no_time", int((~usable).sum()), "B or E events without a time, dropped"),
    ]
    slices: list[Body] = [d[0] for d in done]
    start = np.array([d[1] for d in done], np.int64)
    end = np.array([d[2] for d in done], np.int64)
    return slices, start, end, [p for p in problems if p.count]


def _mark_times(marks: Sequence[Event], text: bytes, path: Path) -> tuple[Int64, Bool]:
    """(ns, usable) of the B and E events of a text."""
    try:
        at, _, usable = from_numbers([e.ts for e in marks], [0] * len(marks))
    except TimesNeedText:
        rows = [e for e in parse_document(text, EventTimes, path).events if e.ph in ("B", "E")]
        at, _, usable = from_text([text_of(e.ts) for e in rows], [b"0"] * len(rows))
    return at, usable


def _sane(columns: Columns, start: Int64, end: Int64, usable: Bool) -> tuple[Bool, list[Problem]]:
    """Which slices can be believed, and what the others are."""
    device = np.isin(columns.category, DEVICE_CODES)
    backwards = usable & (end < start)
    endless = usable & (end - start > LONGEST_NS)
    keep = usable & ~backwards & ~endless
    zero = keep & device & (start == 0) & (end == 0) & _far_from_zero(start[keep & (start != 0)], end[keep])
    counts = {
        "no_time": (~usable, "events without a numeric ts and dur"),
        "unfinished": (backwards & ~device, "host events with a negative duration: they had not ended"),
        "negative_duration": (backwards & device, "device events with a negative duration"),
        "endless": (endless, "events longer than 104 days"),
        "zero_time": (zero, "device events at ts 0 with no duration: invalid records"),
    }
    problems = [Problem(k, int(m.sum()), f"{what}, rejected") for k, (m, what) in counts.items() if m.any()]
    return keep & ~zero, problems


def _far_from_zero(start: Int64, end: Int64) -> bool:
    """Is time 0 farther from the recording than the recording is long?"""
    return bool(len(start)) and int(start.min()) > int(end.max() - start.min())


def _sorted_events(columns: Columns, start: Int64, end: Int64, keep: Bool) -> tuple[int, Events]:
    """(the first start, events relative to it in order of start, longer first, file order)."""
    rows = np.flatnonzero(keep)
    origin = int(start[rows].min())
    order = rows[np.lexsort((-end[rows], start[rows]))]
    return origin, Events(
        start=start[order] - origin,
        end=end[order] - origin,
        name=columns.name[order],
        category=columns.category[order],
        thread=columns.thread[order],
        correlation=columns.correlation[order],
        external_id=columns.external_id[order],
        device=columns.device[order],
        stream=columns.stream[order],
        size=columns.size[order],
        dims=columns.dims[order],
        python_id=columns.python_id[order],
        python_parent=columns.python_parent[order],
        collective=columns.collective[order],
    )


def _thread_names(metadata: Sequence[Body]) -> dict[tuple[str, str], str]:
    named: dict[tuple[str, str], str] = {}
    for e in metadata:
        if e.name == "thread_name" and e.args is not None:
            label: Any = e.args.name
            named[str(e.pid), str(e.tid)] = str(label or "")
    return named
