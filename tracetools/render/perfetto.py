"""A whole run as one Chrome-JSON file for Perfetto: steps, causes of idle time and regions beside the original events.

In: per process its tracks (`ProcessTracks`) and a way to read its original events. Out: bytes of JSON, in pieces, and a
`Tally` of what they hold. Times are microseconds since the run's origin with three decimals: exact nanoseconds.
Every process and row gets a number of its own (viewers merge rows with number 0, negative or equal numbers), handed
out in the order in which the rows are to be seen. Nothing is dropped without being counted; names are data.
Knows nothing of files on disk, of the analysis beyond its spans, or of what a viewer does with the colours.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tracetools import __version__
from tracetools.load.document import Document
from tracetools.model import Process, ProcessBreakdown, Run
from tracetools.render.jsontext import checked, string
from tracetools.render.lanes import assign
from tracetools.render.rawrows import FlowPoint, RawEvent, RawRows, Row, raw_rows

if TYPE_CHECKING:
    from tracetools.breakdown import Explained

FIRST_ID = 1001  # of processes and rows: never 0, never one that a viewer gives a meaning
COLLECTIVE = "collective"  # the region of collectives in profiles/torch.toml
PIECE = 4096  # events per piece of output
PARTS = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")  # of a step
_DIGITS = re.compile(r"(\d+)")
Reader = Callable[[Process], Document[RawEvent]]


@dataclass(frozen=True, slots=True)
class Span:
    """A slice of ours: [start_ns, end_ns) since the run's origin."""

    start_ns: int
    end_ns: int
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessTracks:
    """What the analysis draws for one process. `regions` is by the name of the thread; all spans in any order."""

    process: Process
    steps: Sequence[Span] = ()
    causes: Sequence[Span] = ()
    regions: Mapping[str, Sequence[Span]] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What a file holds once it is written. To Perfetto an instant is a slice, and an arrow counts per arrowhead.

    `moved`: instants and counters from before the first slice, drawn at its start. `left_out`: by reason.
    """

    slices: int = 0
    instants: int = 0
    counters: int = 0
    flows: int = 0
    moved: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def tracks_of(found: Explained, figures: ProcessBreakdown | None = None) -> ProcessTracks:
    """The tracks of an analysed process; `figures` puts the partition of each step into its arguments."""
    by_start = {s.start_ns: s for s in figures.steps} if figures else {}
    steps = []
    for step in found.steps.steps:
        parts = by_start.get(step.start_ns)
        args = {part: getattr(parts, part) for part in PARTS} if parts else {}
        steps.append(Span(step.start_ns, step.end_ns, step.name, args))
    regions: dict[str, list[Span]] = {}
    spans, threads = found.classified.regions, found.process.trace.threads
    telling = _telling_threads(found)
    columns = (spans.start, spans.end, spans.name, spans.thread)
    for start, end, name, thread in zip(*(c.tolist() for c in columns), strict=True):
        if thread not in telling:
            continue
        regions.setdefault(_row_title(threads[thread].name, threads[thread].tid), []).append(
            Span(start, end, spans.names[name])
        )
    return ProcessTracks(found.process, steps, _causes(found), regions)


def _telling_threads(found: Explained) -> set[int]:
    """Threads whose regions are worth a row: not those that do nothing but serve collectives, of which gloo has dozens."""
    spans = found.classified.regions
    other = [i for i, name in enumerate(spans.names) if name != COLLECTIVE]
    return {int(t) for t in spans.thread[np.isin(spans.name, other)]}


def _causes(found: Explained) -> list[Span]:
    from tracetools.gaps import DRIVER, KINDS

    segments, spans = found.gaps.segments, []
    columns = (segments.start, segments.end, segments.process, segments.region, segments.kind)
    for start, end, process, region, kind in zip(*(c.tolist() for c in columns), strict=True):
        name = found.gaps.names[region] if region >= 0 else ""
        label = f"{name} ({KINDS[kind]})" if name and KINDS[kind] != "host" else name or KINDS[kind]
        spans.append(Span(start, end, f"driver: {label}" if process == DRIVER else label, {"kind": KINDS[kind]}))
    return spans


def chrome_trace(run: Run, tracks: Sequence[ProcessTracks], read: Reader, tally: Tally) -> Iterator[bytes]:
    """The file in pieces. `read` is called once per process, in its turn; `tally` is complete after the last piece."""
    writer = _Writer(tally)
    lead = b'{"displayTimeUnit":"ns","traceEvents":[\n'
    files = {}
    seen = Counter(t.process.label for t in tracks)
    for one in tracks:
        process = one.process
        document = read(process)
        zero = process.trace.origin_ns - (process.trace.info.base_ns or 0)
        title = process.label if seen[process.label] == 1 else f"{process.label} ({process.trace.file})"
        files[process.trace.file] = document.top
        rows = raw_rows(document, zero)
        tally.left_out.update(rows.left_out)
        tally.moved += rows.moved
        for piece in _pieces(writer.process(title, one, rows)):
            yield lead + piece
            lead = b",\n"
    about = {"version": __version__, "path": run.path, "origin_ns": run.origin_ns, "left_out": dict(tally.left_out)}
    closing = checked(msgspec.json.encode({"tracetools": about, "files": files}))
    yield (b"" if lead == b",\n" else lead) + b'\n],"metadata":' + closing + b"}\n"


def gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same, compressed; equal input gives equal bytes."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _pieces(events: Iterable[bytes]) -> Iterator[bytes]:
    batch: list[bytes] = []
    for event in events:
        batch.append(event)
        if len(batch) == PIECE:
            yield b",\n".join(batch)
            batch.clear()
    if batch:
        yield b",\n".join(batch)


class _Writer:
    """Hands out numbers and turns rows into events."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.ids = count(FIRST_ID)
        self.arrow_ids = count(1)
        self.order = count(1)
        self.places: dict[int, list[bytes]] = {}  # per row of the present process: pid and tid of each lane, as JSON

    def process(self, title: str, tracks: ProcessTracks, raw: RawRows) -> Iterator[bytes]:
        """Everything of one process: our rows, then device rows, then host rows; then arrows, as rows have numbers."""
        ours = [("steps", tracks.steps), ("idle: causes", tracks.causes)]
        ours += [(f"regions {thread}", spans) for thread, spans in tracks.regions.items()]
        rows = [_own_row(f"{title} {name}", spans) for name, spans in ours if spans]
        if rows:
            pid, named = self.process_metadata(f"{title}: steps, gaps, regions")
            yield named
            for row in rows:
                yield from self.row(pid, row, row.name)
        pids: dict[str, int] = {}
        for original, group in _grouped(raw):
            pids[original], named = self.process_metadata(_process_title(title, raw, original))
            yield named
            for row in group:
                yield from self.row(pids[original], row, _row_title(row.name, row.tid, device=row.device))
        yield from self.counters(title, raw, pids)
        yield from self.arrows(raw.arrows)
        self.places.clear()

    def process_metadata(self, title: str) -> tuple[int, bytes]:
        pid = next(self.ids)
        return pid, b",\n".join(
            (
                b'{"ph":"M","name":"process_name","pid":%d,"args":{"name":%b}}' % (pid, string(title)),
                b'{"ph":"M","name":"process_sort_index","pid":%d,"args":{"sort_index":%d}}' % (pid, next(self.order)),
            )
        )

    def row(self, pid: int, row: Row, title: str) -> Iterator[bytes]:
        """A row on as many lanes as it needs."""
        place = [b'"pid":%d,"tid":%d' % (pid, next(self.ids)) for _ in range(max(row.lane, default=0) + 1)]
        self.places[id(row)] = place
        for lane, where in enumerate(place):
            name = title if lane == 0 else f"{title} (overlap {lane})"
            yield b'{"ph":"M","name":"thread_name",%b,"args":{"name":%b}}' % (where, string(name))
            yield b'{"ph":"M","name":"thread_sort_index",%b,"args":{"sort_index":%d}}' % (where, next(self.order))
        for start, end, body, lane in zip(row.start, row.end, row.body, row.lane, strict=True):
            yield b'{"ph":"X",%b,"ts":%b,"dur":%b,%b}' % (place[lane], _us(start), _us(end - start), body)
        for at, body in row.instants:
            yield b'{"ph":"i",%b,"ts":%b,%b}' % (place[0], _us(at), body)
        self.tally.slices += len(row.start)
        self.tally.instants += len(row.instants)

    def counters(self, title: str, raw: RawRows, pids: dict[str, int]) -> Iterator[bytes]:
        for at, original, body, values in raw.counters:
            if original not in pids:  # a process that has counters and nothing else
                pids[original], named = self.process_metadata(_process_title(title, raw, original))
                yield named
            yield b'{"ph":"C","pid":%d,"ts":%b,%b}' % (pids[original], _us(at), body)
            self.tally.counters += values

    def arrows(self, arrows: Sequence[Sequence[FlowPoint]]) -> Iterator[bytes]:
        """Starts before ends: Perfetto draws no arrow whose end comes first in the file at the same instant."""
        numbers = {id(arrow): next(self.arrow_ids) for arrow in arrows}
        points = [(p, numbers[id(arrow)]) for arrow in arrows for p in arrow]
        for point, number in sorted(points, key=lambda p: "stf".index(p[0].ph)):
            cat, name, _ = point.key
            place = self.places[id(point.row)][point.row.lane[point.index]]
            body = b'"name":%b,"cat":%b' % (string(name), string(cat))
            body += b"" if point.ph == "s" else b',"bp":"e"'  # at the slice that is there, not the next one
            yield b'{"ph":"%b",%b,"ts":%b,"id":%d,%b}' % (point.ph.encode(), place, _us(point.ns), number, body)
            self.tally.flows += point.ph != "s"


def _us(ns: int) -> bytes:
    """Nanoseconds as microseconds with three decimals."""
    return b"%d.%03d" % divmod(ns, 1000)


def _own_row(name: str, spans: Sequence[Span]) -> Row:
    row = Row("", "", name)
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        row.start.append(span.start_ns)
        row.end.append(span.end_ns)
        args = b',"args":' + checked(msgspec.json.encode(span.args)) if span.args else b""
        row.body.append(b'"name":%b,"cat":"tracetools"%b' % (string(span.name), args))
    row.lane = assign(row.start, row.end)
    return row


def _grouped(raw: RawRows) -> list[tuple[str, list[Row]]]:
    """(pid as the file spells it, its rows): processes with device rows first, then as the file sorts them."""
    groups: dict[str, list[Row]] = {}
    for row in raw.rows:
        groups.setdefault(row.pid, []).append(row)

    def row_key(row: Row) -> tuple[Any, ...]:
        return not row.device, row.sort_index, _natural(row.tid)

    def group_key(pid: str) -> tuple[Any, ...]:
        return not any(r.device for r in groups[pid]), raw.process_order.get(pid, 0), _natural(pid)

    return [(pid, sorted(groups[pid], key=row_key)) for pid in sorted(groups, key=group_key)]


def _process_title(title: str, raw: RawRows, pid: str) -> str:
    """Kineto gives its own rows words for a pid ("Spans", "Traces", nothing at all)."""
    words = (raw.process_names.get(pid, ""), f"pid {pid}" if pid.lstrip("-").isdecimal() else pid)
    return f"{title}: {' '.join(w for w in words if w) or 'profiler'}"


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sorts "stream 7" before "stream 20"."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _DIGITS.split(text) if part]


def _row_title(name: str, tid: str, *, device: bool = False) -> str:
    """The row's name with its tid, which names of threads do not always hold."""
    name = name.strip()
    if not name:
        return tid if tid and not tid.isdecimal() else f"{'stream' if device else 'thread'} {tid}".strip()
    return name if tid in name else f"{name} {tid}"
