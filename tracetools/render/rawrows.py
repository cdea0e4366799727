"""The original events of one trace file, sorted into rows, with their arguments as the file spells them.

In: a decoded document and the file's clock at the run's origin. Out: `RawRows`: per thread or stream its slices
(nanoseconds, ordered, on lanes) and instants, counters, and arrows whose ends all lie in slices. What cannot be shown
is counted. Names and arguments stay text: nothing here reads them. Knows nothing of other processes or of the output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracetools.load.columns import CATEGORIES
from tracetools.load.document import Document
from tracetools.load.times import LONGEST_NS, from_text
from tracetools.model import DEVICE_WORK, Category
from tracetools.render.jsontext import arguments, finite_numbers, joined, string
from tracetools.render.lanes import NONE, assign, surrounding

NOTHING = msgspec.Raw(b"")
DEVICE_ROWS = (*DEVICE_WORK, Category.SYNC, Category.GPU_USER_ANNOTATION)

BEGIN, END = ("B", "b", "S"), ("E", "e", "F")
ASYNC = ("b", "n", "e", "S", "T", "F")
INSTANT = ("i", "I", "R", "n", "T")
FLOW = ("s", "t", "f")


class RawEvent(msgspec.Struct, gc=False):
    """An event with its times and arguments as text."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    id: Any = None
    s: Any = None
    args: msgspec.Raw = NOTHING


@dataclass(slots=True, eq=False)
class Row:
    """One thread or stream of the file. Slices are in order of (start, longer first, file order)."""

    pid: str
    tid: str
    name: str = ""
    sort_index: int = 0
    device: bool = False
    start: list[int] = field(default_factory=list)  # ns since the run's origin
    end: list[int] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)  # `"name":...,"cat":...,"args":...`
    lane: list[int] = field(default_factory=list)
    instants: list[tuple[int, bytes]] = field(default_factory=list)  # (ns, body)

    def settle(self) -> None:
        """Order the slices and give them lanes."""
        order = sorted(range(len(self.start)), key=lambda i: (self.start[i], -self.end[i], i))
        self.start = [self.start[i] for i in order]
        self.end = [self.end[i] for i in order]
        self.body = [self.body[i] for i in order]
        self.lane = assign(self.start, self.end)


@dataclass(frozen=True, slots=True)
class FlowPoint:
    """Start (`s`), middle (`t`) or end (`f`) of an arrow at `ns`, in slice `index` of `row`."""

    ph: str
    ns: int
    key: tuple[str, str, str]  # cat, name, id: what belongs together
    row: Row
    index: int = NONE


@dataclass(slots=True, eq=False)
class RawRows:
    """All of a file. Of an arrow's points the first is a start and the last an end; each but the first has a head."""

    rows: list[Row] = field(default_factory=list)
    process_names: dict[str, str] = field(default_factory=dict)  # by pid
    process_order: dict[str, int] = field(default_factory=dict)
    counters: list[tuple[int, str, bytes, int]] = field(default_factory=list)  # (ns, pid, body, values in it)
    arrows: list[list[FlowPoint]] = field(default_factory=list)
    moved: int = 0  # instants and counters from before the first slice, put at its start
    left_out: Counter[str] = field(default_factory=Counter)


def raw_rows(document: Document[RawEvent], clock_zero_ns: int) -> RawRows:
    """`clock_zero_ns`: what the file's own clock (ts, in ns) shows at the run's origin."""
    sorter = _Sorter()
    events = document.events
    start, end, usable = from_text([bytes(e.ts) for e in events], [bytes(e.dur) or b"0" for e in events])
    at, until, known = (start - clock_zero_ns).tolist(), (end - clock_zero_ns).tolist(), usable.tolist()
    marks = []
    for i, event in enumerate(events):
        if event.ph == "X":
            sorter.complete(event, at[i], until[i], timed=known[i] and len(bytes(event.dur)) > 0)
        elif event.ph == "M":
            sorter.metadata(event)
        elif not known[i]:
            sorter.out.left_out[f"events of phase {event.ph!r} without a time"] += 1
        elif event.ph in BEGIN or event.ph in END:
            marks.append((at[i], event))
        else:
            sorter.mark(event, at[i])
    sorter.pairs(marks)
    return sorter.finish()


class _Sorter:
    """Fills a RawRows, event by event."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.out = RawRows()
        self.flows: list[FlowPoint] = []

    def row(self, event: RawEvent) -> Row:
        key = (str(event.pid), f"async {event.cat}".strip() if event.ph in ASYNC else str(event.tid))
        found = self.rows.get(key)
        if found is None:
            found = self.rows[key] = Row(*key)
        return found

    def complete(self, event: RawEvent, start: int, end: int, *, timed: bool) -> None:
        if timed:
            self.add(self.row(event), event, start, end, arguments(bytes(event.args)))
        else:
            self.out.left_out["slices without a time"] += 1

    def add(self, row: Row, event: RawEvent, start: int, end: int, args: bytes) -> None:
        # the run's origin is the start of the first slice that the reader believes: what is earlier is invalid
        if end < start or end - start > LONGEST_NS or start < 0:
            self.out.left_out["slices whose time makes no sense"] += 1
            return
        row.start.append(start)
        row.end.append(end)
        row.body.append(_body(event, args))
        if not row.device and CATEGORIES.get(event.cat.lower()) in DEVICE_ROWS:
            row.device = True

    def mark(self, event: RawEvent, at: int) -> None:
        """Everything that has a time and no duration."""
        if event.ph in FLOW:
            key = (event.cat or "flow", event.name or "flow", str(event.id))
            self.flows.append(FlowPoint(event.ph, at, key, self.row(event)))
        elif event.ph in INSTANT:
            # "g" would put the instants of all files on one nameless row: global to a file is one process's here
            scope = b"p" if event.s in ("g", "p") else b"t"
            body = b'"s":"%b",%b' % (scope, _body(event, arguments(bytes(event.args))))
            self.row(event).instants.append((self.not_negative(at), body))
        elif event.ph == "C":
            self.counter(event, self.not_negative(at))
        else:
            self.out.left_out[f"events of phase {event.ph!r}"] += 1

    def not_negative(self, at: int) -> int:
        self.out.moved += at < 0
        return max(at, 0)

    def counter(self, event: RawEvent, at: int) -> None:
        values = finite_numbers(bytes(event.args))
        if not values:
            self.out.left_out["counters without a number"] += 1
            return
        name = event.name if event.id is None else f"{event.name} {event.id}"
        members = b",".join(b"%b:%b" % (string(key), number) for key, number in values)
        body = b'"name":%b,"args":{%b}' % (string(name), members)
        self.out.counters.append((at, str(event.pid), body, len(values)))

    def metadata(self, event: RawEvent) -> None:
        value, pid = _only_value(event.args), str(event.pid)
        names = self.out.process_names
        if value is None:
            return
        if event.name == "process_name":
            names[pid] = f"{value} {names.get(pid, '')}".strip()
        elif event.name == "process_labels" and value:
            names[pid] = f"{names.get(pid, '')} [{value}]".strip()
        elif event.name == "process_sort_index" and isinstance(value, int):
            self.out.process_order[pid] = value
        elif event.name == "thread_name":
            self.row(event).name = str(value)
        elif event.name == "thread_sort_index" and isinstance(value, int):
            self.row(event).sort_index = value

    def pairs(self, marks: Sequence[tuple[int, RawEvent]]) -> None:
        """Begin and end events as slices, the reader's way: what never ends lasts to the last mark of its row."""
        open_: dict[tuple[str, str, str], list[tuple[int, RawEvent]]] = defaultdict(list)
        last: dict[tuple[str, str, str], int] = {}
        for at, event in sorted(marks, key=lambda m: m[0]):
            row = self.row(event)
            key = (row.pid, row.tid, str(event.id) if event.ph in ASYNC else "")
            last[key] = at
            if event.ph in BEGIN:
                open_[key].append((at, event))
            elif open_[key]:
                began, begin = open_[key].pop()
                self.add(row, begin, began, at, joined(arguments(bytes(begin.args)), arguments(bytes(event.args))))
            else:
                self.out.left_out["ends without a begin"] += 1
        for key, unfinished in open_.items():
            for began, begin in unfinished:
                self.add(self.row(begin), begin, began, last[key], arguments(bytes(begin.args)))

    def finish(self) -> RawRows:
        for row in self.rows.values():
            row.settle()
        self.out.rows = [r for r in self.rows.values() if r.start or r.instants]
        self.out.arrows = _arrows(_bound(self.flows), self.out.left_out)
        self.out.left_out = +self.out.left_out  # without zeros
        return self.out


def _bound(flows: Sequence[FlowPoint]) -> list[FlowPoint]:
    """The points with the slices that surround them, in order of time, starts before ends."""
    by_row: dict[int, list[FlowPoint]] = defaultdict(list)
    for point in flows:
        by_row[id(point.row)].append(point)
    found = []
    for points in by_row.values():
        row = points[0].row
        indices = surrounding(row.start, row.end, [p.ns for p in points])
        found += [FlowPoint(p.ph, p.ns, p.key, row, i) for p, i in zip(points, indices, strict=True)]
    return sorted(found, key=lambda p: (p.ns, FLOW.index(p.ph)))


def _arrows(points: Sequence[FlowPoint], left_out: Counter[str]) -> list[list[FlowPoint]]:
    """Each end with the latest start before it. Viewers draw nothing for all others: they are counted in `left_out`."""
    current: dict[tuple[str, str, str], list[FlowPoint] | None] = {}
    begun: list[list[FlowPoint]] = []
    for point in points:
        if point.ph == "s":
            current[point.key] = [point] if point.index != NONE else None
            begun += [arrow] if (arrow := current[point.key]) else []
        if point.index == NONE:
            left_out["flow points outside any slice"] += 1
        elif point.ph != "s":
            arrow = current.get(point.key)
            if arrow is None:
                left_out["flow ends without a start before them"] += 1
            else:
                arrow.append(point)
    left_out["flow starts without an end after them"] += sum(len(a) for a in begun if a[-1].ph != "f")
    return [arrow for arrow in begun if arrow[-1].ph == "f"]


def _body(event: RawEvent, args: bytes) -> bytes:
    cat = b',"cat":' + string(event.cat) if event.cat else b""
    return b'"name":%b%b%b' % (string(event.name), cat, b',"args":' + args if args else b"")


def _only_value(args: msgspec.Raw) -> Any:
    """The value of a metadata event; None where there is none that can be read."""
    try:
        found = msgspec.json.decode(args)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return next(iter(found.values()), None) if isinstance(found, dict) else None


__all__ = ["FlowPoint", "RawEvent", "RawRows", "Row", "raw_rows"]
