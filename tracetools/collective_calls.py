"""The collectives that one process took part in.

In: a classified trace and the process's step markers. Out: `Calls`: per call its time, what it does (`What`), its process group
(`Group`), its sequence number and the step it was called in. On a device a call is a communication kernel, with what its own
arguments, else those of the annotation around its launch, say. Without a device it is a `gloo:*` annotation on one of gloo's
threads. Knows nothing of other processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from tracetools.classify import COMM, Classified, names_where
from tracetools.intervals import NONE
from tracetools.model import Category, Collective, Int64, Trace, TraceInfo
from tracetools.steps import Markers

T = TypeVar("T", bound=Hashable)

POINT_TO_POINT = ("send", "recv", "send_recv")
# No rank can leave one of these before every rank has entered it. (A broadcast's root may.)
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
EQUAL_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")  # on all ranks, by their definition

# Searched in the name without anything but its letters, in lower case; the first that is found wins.
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        ("reducescatter", "reduce_scatter"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
        ("allreduce|crossdevicereduce|quickreduce|oneshot|twoshot", "all_reduce"),
        ("barrier", "barrier"),
        ("broadcast|bcast", "broadcast"),
        ("sendrecv", "send_recv"),
        ("dispatch", "dispatch"),
        ("combine", "combine"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("reduce", "reduce"),
        ("recv", "recv"),
        ("send", "send"),
    )
)
_TYPES = {
    "float16": ("half", "f16", "__half"),
    "bfloat16": ("bf16", "__nv_bfloat16", "hip_bfloat16"),
    "float32": ("float", "f32"),
    "float64": ("double", "f64"),
    "int64": ("long", "long int", "int64_t", "i64"),
    "uint64": ("uint64_t", "u64"),
    "int32": ("int", "int32_t", "i32"),
    "uint32": ("uint32_t", "u32"),
    "int16": ("short", "int16_t"),
    "int8": ("char", "signed char", "int8_t", "i8"),
    "uint8": ("byte", "unsigned char", "uint8_t", "u8"),
    "bool": (),
    "float8": ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "f8e4m3", "f8e5m2"),
}
_TYPE = {spelling: name for name, others in _TYPES.items() for spelling in (name, *others)}
_BITS = re.compile(r"(\d+)$")
_TYPE_IN_KERNEL = re.compile(r"_(__half|__nv_bfloat16|u?int\d+_t|[a-z]+\d*(?:e\dm\d)?)(?=_|\(|$)")
_ANNOTATIONS = ("nccl:", "rccl:", "gloo:", "mpi:", "ucc:")
_ON_HOST = ("gloo:", "mpi:", "ucc:")  # run on the host: their annotations last as long as they do


@dataclass(frozen=True, slots=True)
class What:
    """What a call does. None where the trace does not say. Elements are those of this rank's own buffers."""

    kind: str
    name: str  # as the trace spells it
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. `name` is the trace's, else where its calls are found ("stream 2", "gloo"), then `named` is False."""

    name: str
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    named: bool = True
    description: str = ""
    known: bool = True  # False: calls of several groups that the trace does not tell apart

    @property
    def label(self) -> str:
        return self.description or (f"group {self.name}" if self.named else self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """In order of start. `step`: number of the step marker in which the host called it; NONE outside all steps."""

    start: Int64
    end: Int64
    what: Int64  # index into whats
    group: Int64  # index into groups
    sequence: Int64  # NONE where the trace has none
    step: Int64
    thread: Int64  # that served the call; NONE on a device
    whats: tuple[What, ...]
    groups: tuple[Group, ...]
    last_step: int = NONE  # of the recording
    point_to_point: int = 0  # calls between two ranks, not among these

    def __len__(self) -> int:
        return len(self.start)


def calls_of(classified: Classified, markers: Markers) -> Calls:
    """Never raises: what the trace does not say is None or NONE."""
    on_device = bool(len(classified.work))
    found = _on_device(classified) if on_device else _on_host(classified)
    row, called, whats, groups, sequence = found
    ev = classified.trace.events
    between_two = np.array([w.kind in POINT_TO_POINT for w in whats], np.bool_)
    order = np.argsort(ev.start[row], kind="stable")
    keep = order[~between_two[order]] if len(row) else order
    what_table, what = _interned([whats[i] for i in keep.tolist()])
    group_table, group = _interned([groups[i] for i in keep.tolist()])
    step, last = _steps(called[keep], markers)
    return Calls(
        start=ev.start[row[keep]],
        end=ev.end[row[keep]],
        what=what,
        group=group,
        sequence=sequence[keep],
        step=step,
        thread=np.full(len(keep), NONE, np.int64) if on_device else ev.thread[row[keep]].astype(np.int64),
        whats=what_table,
        groups=group_table,
        last_step=last,
        point_to_point=int(between_two.sum()),
    )


def message_bytes(what: What, ranks: int) -> int | None:
    """Size of a collective over so many ranks, as nccl-tests counts it: the whole of what is gathered, scattered or reduced."""
    if what.dtype is None:
        return None
    mine, others = what.in_elements, what.out_elements
    if what.kind in ("all_gather", "gather"):
        elements = mine * ranks if mine is not None else others
    elif what.kind in ("reduce_scatter", "scatter"):
        elements = others * ranks if others is not None and mine is None else mine
    else:
        elements = mine if mine is not None else others
    bits = _BITS.search(what.dtype)
    return None if elements is None else elements * (int(bits[1]) // 8 if bits else 1)


def kind_of(name: str) -> str:
    """`all_reduce`, ... of a collective's, an annotation's or a kernel's name; `other` where the name does not tell."""
    letters = re.sub(r"[^a-z]", "", re.split(r"[(<]", name, maxsplit=1)[0].lower())
    return next((kind for pattern, kind in _KINDS if pattern.search(letters)), "other")


def type_of(spelling: str | None) -> str | None:
    """One name per tensor type; None where the spelling is none of a type's."""
    return None if spelling is None else _TYPE.get(spelling.strip().removeprefix("c10::").lower())


def _interned(values: Sequence[T]) -> tuple[tuple[T, ...], Int64]:
    index: dict[T, int] = {}
    seen: dict[int, int] = {}  # the same object again needs no comparison
    rows = []
    for value in values:
        if (row := seen.get(id(value))) is None:
            row = seen[id(value)] = index.setdefault(value, len(index))
        rows.append(row)
    return tuple(index), np.array(rows, np.int64)


def _steps(called: Int64, markers: Markers) -> tuple[Int64, int]:
    """(the step in which each call was made, the recording's last step), as the markers number them, else counted."""
    if not len(markers):
        return np.full(len(called), NONE, np.int64), NONE
    tail = [re.search(r"#(\d+)$", name) for name in markers.name]
    numbers = np.array([int(m[1]) if m else i for i, m in enumerate(tail)], np.int64)
    at = np.searchsorted(markers.start, called, side="right") - 1
    inside = (at >= 0) & (called < markers.end[-1])
    return np.where(inside, numbers[np.maximum(at, 0)], NONE), int(numbers[-1])


# ---------------------------------------------------------------- on a device

Found = tuple[Int64, Int64, list[What], list[Group], Int64]  # rows, host times of the calls, what, group, sequence


def _on_device(classified: Classified) -> Found:
    trace, work = classified.trace, classified.work
    ev = trace.events
    mine = work.kind == COMM
    row, launch = work.row[mine], work.launch[mine]
    called = np.where(launch != NONE, ev.start[np.maximum(launch, 0)], ev.start[row])
    note, params = (_around(trace, rows, launch) for rows in (_annotations(trace), _parameters(trace)))
    streams = {key: i for i, key in enumerate(np.unique(_stream(trace, row)).tolist())}
    keys = np.stack([ev.name[row], ev.collective[row], _meta(trace, params), _meta(trace, note), _dims(trace, note)])
    told: dict[tuple[int, ...], tuple[What, Group, int]] = {}
    calls: list[tuple[What, Group, int]] = []
    columns = zip(keys.T.tolist(), note.tolist(), _stream(trace, row).tolist(), strict=True)
    for numbers, annotation, stream in columns:
        key = (*numbers, int(ev.name[annotation]) if annotation != NONE else NONE, stream)
        if key not in told:
            own = _collective(trace, key[1], key[2])
            group = _group(own, trace.info, f"stream {streams[stream]}")
            sequence = NONE if own is None or own.sequence is None else own.sequence
            told[key] = _what(trace, key[:-1], own), group, sequence
        calls.append(told[key])
    whats, groups = [c[0] for c in calls], [c[1] for c in calls]
    sequences = np.array([c[2] for c in calls], np.int64)
    return row, called, whats, groups, sequences


def _annotations(trace: Trace) -> Int64:
    """Annotations of torch.distributed's backends, outermost on their thread."""
    rows = trace.events.where(Category.USER_ANNOTATION)
    return rows[names_where(trace, lambda n: n.startswith(_ANNOTATIONS))[trace.events.name[rows]]]


def _parameters(trace: Trace) -> Int64:
    """Operators that carry a collective's arguments."""
    rows = trace.events.where(Category.CPU_OP)
    named = np.array([c.name is not None for c in trace.collectives] + [False], np.bool_)
    return rows[named[trace.events.collective[rows]]]


def _around(trace: Trace, rows: Int64, launch: Int64) -> Int64:
    """The last of `rows` that begins before each launch on its thread and holds it; NONE where there is none."""
    ev = trace.events
    found = np.full(len(launch), NONE, np.int64)
    linked = np.flatnonzero(launch != NONE)
    for thread in np.unique(ev.thread[launch[linked]]):
        there = rows[ev.thread[rows] == thread]
        asking = linked[ev.thread[launch[linked]] == thread]
        if len(there):
            at = np.searchsorted(ev.start[there], ev.start[launch[asking]], side="right") - 1
            holds = (at >= 0) & (ev.end[there[np.maximum(at, 0)]] >= ev.end[launch[asking]])
            found[asking[holds]] = there[at[holds]]
    return found


def _meta(trace: Trace, rows: Int64) -> Int64:
    column: Int64 = np.where(rows != NONE, trace.events.collective[np.maximum(rows, 0)], NONE).astype(np.int64)
    return column


def _dims(trace: Trace, rows: Int64) -> Int64:
    column: Int64 = np.where(rows != NONE, trace.events.dims[np.maximum(rows, 0)], NONE).astype(np.int64)
    return column


def _stream(trace: Trace, rows: Int64) -> Int64:
    ev = trace.events
    return ev.device[rows].astype(np.int64) << 40 | (ev.stream[rows] & 0xFFFFFFFFFF)


def _collective(trace: Trace, own: int, around: int) -> Collective | None:
    """The kernel's own arguments; a sequence number that only the operator around its launch has is taken from there."""
    mine = trace.collectives[own] if own != NONE else None
    outer = trace.collectives[around] if around != NONE else None
    if mine is None or mine.name is None or outer is None or mine.sequence is not None:
        return outer if mine is None or mine.name is None else mine
    same = kind_of(outer.name or "") == kind_of(mine.name) and outer.group == mine.group
    return replace(mine, sequence=outer.sequence) if same else mine


def _what(trace: Trace, key: Sequence[int], own: Collective | None) -> What:
    kernel, _, _, note, dims, annotation = key
    name = trace.names[kernel]
    if own is not None and own.name is not None:
        return What(kind_of(own.name), own.name, own.in_elements, own.out_elements, type_of(own.dtype))
    if annotation == NONE:
        return What(kind_of(name), name.split("(")[0], None, None, _type_in_kernel(name))
    told = trace.names[annotation]
    dtype = type_of(trace.collectives[note].input_type) if note != NONE else None
    return What(kind_of(told), told, _elements(trace, dims), None, dtype or _type_in_kernel(name))


def _type_in_kernel(name: str) -> str | None:
    """NCCL names a kernel by its type, but moves bytes (int8) where it only copies."""
    if kind_of(name) not in ("all_reduce", "reduce", "reduce_scatter"):
        return None
    types = [type_of(t) for t in _TYPE_IN_KERNEL.findall(name.split("(", maxsplit=1)[0].lower())]
    return next((t for t in types if t), None)


def _elements(trace: Trace, dims: int) -> int | None:
    """Elements of all tensors in an annotation's "Input Dims"; None where it lists none."""
    if dims == NONE:
        return None
    try:
        shapes = json.loads(trace.dims[dims])
    except ValueError:
        return None
    shapes = shapes if isinstance(shapes, list) else []
    flat = [s for s in shapes if isinstance(s, list) and all(isinstance(n, int) for n in s)]
    return sum(int(np.prod(s, dtype=object)) for s in flat) if flat and len(flat) == len(shapes) else None


def _group(own: Collective | None, info: TraceInfo, where: str) -> Group:
    if own is None or own.group is None:
        size = own.group_size if own is not None else None
        ranks = _ranks(own.group_ranks) if own is not None else None
        return Group(where, ranks, size, named=False)
    description = own.group_description or ""
    return Group(
        name=own.group,
        ranks=_ranks(own.group_ranks) or (info.groups[own.group].ranks if own.group in info.groups else None),
        size=own.group_size,
        description="" if description in ("", "undefined", own.group) else f"{description} (group {own.group})",
    )


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """[0, 1]: None where the text is cut short ("[0, 1, ...]") or is no list of ranks."""
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    if not isinstance(found, list) or not found or not all(isinstance(r, int) for r in found):
        return None
    return tuple(sorted(found))


# ---------------------------------------------------------------- on the host


def _on_host(classified: Classified) -> Found:
    """Annotations of backends that work on the host. They name no group: see `host_groups`."""
    trace = classified.trace
    ev = trace.events
    rows = _annotations(trace)
    rows = rows[names_where(trace, lambda n: n.startswith(_ON_HOST))[ev.name[rows]]]
    rows = np.sort(
        np.concatenate([_outermost(trace, rows[ev.thread[rows] == t]) for t in np.unique(ev.thread[rows])] or [rows])
    )
    group = host_group(trace.info)
    whats = [
        What(kind_of(trace.names[name]), trace.names[name], _elements(trace, dims), None,
             type_of(trace.collectives[meta].input_type) if meta != NONE else None)
        for name, dims, meta in zip(ev.name[rows].tolist(), ev.dims[rows].tolist(), ev.collective[rows].tolist(), strict=True)
    ]  # fmt: skip
    return rows, ev.start[rows], whats, [group] * len(rows), np.full(len(rows), NONE, np.int64)


def _outermost(trace: Trace, rows: Int64) -> Int64:
    if len(rows) < 2:
        return rows
    reach = np.maximum.accumulate(trace.events.end[rows])
    outer: Int64 = rows[np.concatenate([[True], trace.events.start[rows][1:] >= reach[:-1]])]
    return outer


def host_group(info: TraceInfo) -> Group:
    """The group of a host backend's calls where the file lists only one set of ranks; else it is not known from one file."""
    sets = {group.ranks for group in info.groups.values()}
    return Group("gloo", sets.pop() if len(sets) == 1 else None, None, named=False, known=len(sets) < 2)
