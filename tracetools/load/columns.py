"""Records -> numpy columns with interned names.

In: decoded events that are complete slices, and their times. Out: the columns of `Events` and the tables they point into.
Ids, streams and sizes that are missing or not numbers become -1 (0 for correlation and external id, as Kineto does).
Knows nothing of files, time units or what is done with the columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec
import numpy as np

from tracetools.load.records import NOTHING, Args, Body, Slice
from tracetools.model import Category, Collective, Int32, Int64, Thread, UInt8

T = TypeVar("T", bound=Hashable)
NO_ARGS = Args()
INT64_MAX = 2**63 - 1

# `cat` as Kineto wrote it over the years, in lower case. Everything else is Category.OTHER.
CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "python_function": Category.PYTHON_FUNCTION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "hip_driver": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    "overhead": Category.OVERHEAD,
}
_COMMUNICATES = ("nccl:", "gloo:", "rccl:", "mpi:", "ucc:")  # annotations of torch.distributed's backends
_ON_DEVICE = np.isin(np.arange(max(Category) + 1), (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """`Events` without times, and its tables."""

    name: Int32
    category: UInt8
    thread: Int32
    correlation: Int64
    external_id: Int64
    device: Int32
    stream: Int64
    size: Int64
    dims: Int32
    python_id: Int64
    python_parent: Int64
    collective: Int32
    names: tuple[str, ...]
    thread_keys: tuple[tuple[str, str], ...]
    dim_texts: tuple[str, ...]
    collectives: tuple[Collective, ...]


def make_columns(events: Sequence[Body]) -> Columns:
    """Columns of `events` (at least one), in their order."""
    args = [e.args or NO_ARGS for e in events]
    numbers = type(events[0]) is Slice  # the reader gives Slices or Events, never both
    category = _categories([e.cat for e in events])
    names, name = _intern([e.name for e in events])
    thread_keys, thread = _intern(list(zip([e.pid for e in events], [e.tid for e in events], strict=True)))
    dim_texts, dims = _dims([a.dims for a in args])
    collectives, collective = _collectives(names, name, args)
    on_device = np.flatnonzero(_ON_DEVICE[category]).tolist()
    in_python = np.flatnonzero(category == Category.PYTHON_FUNCTION).tolist()
    n = len(events)
    return Columns(
        name=name,
        category=category,
        thread=thread,
        correlation=_ids([a.correlation for a in args], 0, numbers),
        external_id=_ids([a.external_id for a in args], 0, numbers),
        device=_device(events, on_device).astype(np.int32),
        stream=_stream(events, on_device),
        size=_some(n, on_device, [args[row].bytes for row in on_device]),
        dims=dims,
        python_id=_some(n, in_python, [args[row].python_id for row in in_python]),
        python_parent=_some(n, in_python, [args[row].python_parent for row in in_python]),
        collective=collective,
        names=names,
        thread_keys=tuple((str(p), str(t)) for p, t in thread_keys),
        dim_texts=tuple(d.decode("utf-8", "replace") for d in dim_texts),
        collectives=collectives,
    )


def join(parts: Sequence[Columns]) -> Columns:
    """The columns of parts of a file as those of the whole (at least one part)."""
    if len(parts) == 1:
        return parts[0]
    names, name = _one_table([(p.names, p.name) for p in parts])
    thread_keys, thread = _one_table([(p.thread_keys, p.thread) for p in parts])
    dim_texts, dims = _one_table([(p.dim_texts, p.dims) for p in parts])
    collectives, collective = _one_table([(p.collectives, p.collective) for p in parts])
    plain = ("category", "correlation", "external_id", "device", "stream", "size", "python_id", "python_parent")
    return Columns(
        name=name,
        thread=thread,
        dims=dims,
        collective=collective,
        names=names,
        thread_keys=thread_keys,
        dim_texts=dim_texts,
        collectives=collectives,
        **{column: np.concatenate([getattr(p, column) for p in parts]) for column in plain},
    )


def _one_table(parts: Sequence[tuple[tuple[T, ...], Int32]]) -> tuple[tuple[T, ...], Int32]:
    """(the distinct entries of all tables in order of appearance, the indexes into it); -1 stays -1."""
    index: dict[T, int] = {}
    columns = []
    for table, column in parts:
        moved = np.array([*(index.setdefault(entry, len(index)) for entry in table), -1], np.int32)
        columns.append(moved[column])
    return tuple(index), np.concatenate(columns)


def _ids(values: Sequence[Any], missing: int, numbers: bool) -> Int64:
    """A column of ids. `numbers`: these are known to be integers."""
    if numbers:
        try:
            return np.fromiter(values, np.int64, len(values))
        except OverflowError:  # an id beyond 64 bits
            pass
    return _integers(values, missing)


def _categories(cats: Sequence[str]) -> UInt8:
    code = {cat: CATEGORIES.get(cat.lower(), Category.OTHER) for cat in set(cats)}
    return np.fromiter(map(code.__getitem__, cats), np.uint8, len(cats))


def _intern(values: Sequence[T]) -> tuple[tuple[T, ...], Int32]:
    """(distinct values in order of appearance, index of each value among them)."""
    index: defaultdict[T, int] = defaultdict(count().__next__)
    column = np.fromiter(map(index.__getitem__, values), np.int32, len(values))
    return tuple(index), column


def _intern_some(n: int, rows: Sequence[int], values: Sequence[T]) -> tuple[tuple[T, ...], Int32]:
    """The same where only these rows of n have a value: -1 in all others."""
    table, index = _intern(values)
    column = np.full(n, -1, np.int32)
    column[np.array(rows, np.int64)] = index
    return table, column


def _dims(dims: Sequence[msgspec.Raw]) -> tuple[tuple[bytes, ...], Int32]:
    """(distinct texts, index per event; -1: none)."""
    rows = [i for i, d in enumerate(dims) if d is not NOTHING]
    return _intern_some(len(dims), rows, [bytes(dims[i]) for i in rows])


def _integers(values: Sequence[Any], missing: int) -> Int64:
    """Column of integers; anything that is not one (text that is a number is) becomes `missing`."""
    if values.count(missing) == len(values):  # most columns of most files
        return np.full(len(values), missing, np.int64)
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:  # an id beyond 64 bits
            pass
    elif kinds == {int, type(None)}:
        try:
            return np.fromiter((missing if v is None else v for v in values), np.int64, len(values))
        except OverflowError:
            pass
    return np.array([_integer(v, missing) for v in values], np.int64)


def _integer(value: Any, missing: int) -> int:
    if isinstance(value, str):
        digits = value.strip().removeprefix("stream ").strip()
        value = int(digits) if digits.isdecimal() else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and abs(value) <= INT64_MAX else missing


def _stream(events: Sequence[Body], on_device: Sequence[int]) -> Int64:
    """args.stream of these rows, else the row's tid: device rows are one per stream. -1 for all others."""
    mine = [events[row] for row in on_device]
    return _spread(len(events), on_device, [(e.args or NO_ARGS).stream for e in mine], [e.tid for e in mine])


def _device(events: Sequence[Body], on_device: Sequence[int]) -> Int64:
    """args.device of these rows, else the row's pid; -1 for all others."""
    mine = [events[row] for row in on_device]
    return _spread(len(events), on_device, [(e.args or NO_ARGS).device for e in mine], [e.pid for e in mine])


def _some(n: int, rows: Sequence[int], values: Sequence[Any]) -> Int64:
    """A column of n integers: -1 in all but these rows, and where the value is not one."""
    column = np.full(n, -1, np.int64)
    if rows:
        column[np.array(rows, np.int64)] = _integers(values, -1)
    return column


def _spread(n: int, rows: Sequence[int], values: Sequence[Any], otherwise: Sequence[Any]) -> Int64:
    """A column of n: in these rows their value, or what stands beside it where that is no number; -1 in all others."""
    column = np.full(n, -1, np.int64)
    mine = _integers(values, -1)
    for i in np.flatnonzero(mine < 0).tolist():
        mine[i] = _integer(otherwise[i], -1)
    column[np.array(rows, np.int64)] = mine
    return column


def _collectives(names: Sequence[str], name: Int32, args: Sequence[Args]) -> tuple[tuple[Collective, ...], Int32]:
    """(what is said of collectives, index per event; -1: nothing)."""
    said = [a.collective for a in args]
    rows = [] if said.count(None) == len(said) else [i for i, c in enumerate(said) if c is not None]
    typed = np.fromiter((n.startswith(_COMMUNICATES) for n in names), np.bool_, len(names))
    rows += [i for i in np.flatnonzero(typed[name]).tolist() if said[i] is None]
    found = [(i, c) for i in rows if (c := _collective(names[name[i]], args[i])) is not None]
    return _intern_some(len(args), [i for i, _ in found], [c for _, c in found])


def _collective(name: str, args: Args) -> Collective | None:
    """What the event says of its collective; where it has no such arguments, the type of an annotation's first tensor."""
    if args.collective is None:
        typed = args.types is not NOTHING and name.startswith(_COMMUNICATES)
        return Collective(input_type=_first_type(args.types)) if typed else None
    return Collective(
        name=_text(args.collective),
        group=_text(args.group),
        group_description=_text(args.group_description),
        group_ranks=_text(args.group_ranks),
        group_size=_number(args.group_size),
        in_elements=_number(args.in_elements),
        out_elements=_number(args.out_elements),
        dtype=_text(args.dtype),
        sequence=_number(args.sequence),
    )


def _first_type(types: msgspec.Raw) -> str | None:
    try:
        found = msgspec.json.decode(types)
    except msgspec.DecodeError:
        return None
    return str(found[0]) if isinstance(found, list) and found and found[0] else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> int | None:
    found = _integer(value, -1)
    return found if found >= 0 else None


def make_threads(keys: Sequence[tuple[str, str]], names: dict[tuple[str, str], str]) -> tuple[Thread, ...]:
    """Threads with the names that the file's metadata gives them."""
    return tuple(Thread(pid, tid, names.get((pid, tid), "")) for pid, tid in keys)
