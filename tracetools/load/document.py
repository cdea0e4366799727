"""Trace file -> its events as typed records, and the other top-level keys.

In: a path (or its text) and the msgspec Struct that says which fields of an event are wanted.
Out: a Document. The text is parsed strictly and at once; only where that fails is it mended, and then event by event.
Nothing is lost without a Problem. Knows nothing of categories, time or ranks.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tracetools.errors import TracetoolsError
from tracetools.load.repair import WHAT, mend, requote
from tracetools.load.source import read_text
from tracetools.model import Problem

E = TypeVar("E", bound=msgspec.Struct)

# Top-level keys of Kineto, Chrome and our own recorder that some stage reads.
TOP_KEYS = (
    "schemaVersion",
    "deviceProperties",
    "distributedInfo",
    "baseTimeNanoseconds",
    "displayTimeUnit",
    "traceName",
    "host_name",
    "trace_id",
    "record_shapes",
    "with_stack",
    "with_flops",
    "with_modules",
    "profile_memory",
    "nccl_version",
    "cupti_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
    "username",
    "metadata",
    "tracetools",
)

# Where one event ends and the next begins, whatever is broken inside them.
_BOUNDARY = re.compile(rb'(?<=\})\s*,?\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args)"\s*:)')
_VISIBLE = re.compile(rb"[^ \t\r\n\f\v]")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_NUMBER_TOO_BIG = "Number out of range"
_TRUNCATED = "Input data was truncated"

# Files that are often mistaken for a Kineto trace, by a key only they have.
LOOKALIKES = {
    "nodes": "a PyTorch execution trace (Chakra), which holds no times of the device",
    "rocprofiler-sdk-tool": "the output of rocprofv3, which is not in Chrome's format",
    "resourceSpans": "an OpenTelemetry export",
    "segments": "a CUDA memory snapshot",
}


@dataclass(frozen=True, slots=True, eq=False)
class Document(Generic[E]):
    """All events of a file, in file order, and the top-level keys of TOP_KEYS that it has."""

    events: list[E]
    top: dict[str, Any]
    problems: tuple[Problem, ...]


def read_document(path: Path, event_type: type[E]) -> Document[E]:
    """Raises TracetoolsError naming the file where it is no trace or nothing of it can be read."""
    text, problems = read_text(path)
    found = parse_document(text, event_type, path)
    return Document(found.events, found.top, problems + found.problems)


def parse_document(text: bytes, event_type: type[E], path: Path) -> Document[E]:
    """Like read_document, from text that was read before; `path` is for messages only."""
    with collector_paused():
        try:
            return strict(text, event_type)
        except msgspec.ValidationError as error:
            return _untyped(text, event_type, path, error)
        except msgspec.DecodeError as error:
            return _broken(text, event_type, path, error)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Decoding makes millions of objects and no cycle: the cyclic collector would only walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@lru_cache
def _decoder(event_type: type[msgspec.Struct], bare: bool) -> msgspec.json.Decoder[Any]:
    if bare:
        return msgspec.json.Decoder(list[event_type])  # type: ignore[valid-type]
    fields: list[Any] = [("traceEvents", list[event_type])]  # type: ignore[valid-type]
    fields += [(key, Any, None) for key in TOP_KEYS]
    return msgspec.json.Decoder(msgspec.defstruct("Top", fields))


def _first(text: bytes) -> bytes:
    """The first byte that is no white space. (strip() would copy a whole file.)"""
    match = _VISIBLE.search(text)
    return match[0] if match else b""


def strict(text: bytes, event_type: type[E]) -> Document[E]:
    """Raises msgspec.DecodeError where the text is not as it should be. `event_type` may be a union of Structs."""
    if _first(text) == b"[":
        return Document(_decoder(event_type, True).decode(text), {}, ())
    top = _decoder(event_type, False).decode(text)
    keys = {k: v for k in TOP_KEYS if (v := getattr(top, k)) is not None}
    return Document(top.traceEvents, keys, ())


def _untyped(text: bytes, event_type: type[E], path: Path, error: msgspec.ValidationError) -> Document[E]:
    """Valid JSON whose shape is not the usual one."""
    if _NUMBER_TOO_BIG in str(error):  # 1e999: JSON to a grammarian, not to a number
        return _by_event(text, event_type, path, error)
    document = msgspec.json.decode(text, type=Any if _first(text) != b"{" else dict[str, msgspec.Raw])
    if isinstance(document, dict):
        inner = document.get("traceEvents")
        if inner is None:
            raise TracetoolsError(not_a_trace(path, list(document)))
        if _first(bytes(inner)) == b"{":
            found = parse_document(bytes(inner), event_type, path)
            return Document(
                found.events, found.top, (*found.problems, Problem("wrapped", 1, "traceEvents inside traceEvents"))
            )
        if _first(bytes(inner)) != b"[":
            raise TracetoolsError(f"{path}: traceEvents is not a list. This is not a trace that a profiler wrote.")
    elif not isinstance(document, list):
        raise TracetoolsError(f"{path}: holds a single JSON value, not a trace. Give a Kineto or Chrome trace.")
    return _by_event(text, event_type, path, error)


def not_a_trace(path: Path, keys: list[str]) -> str:
    """The message for a JSON object without traceEvents."""
    known = next((what for key, what in LOOKALIKES.items() if key in keys), None)
    has = ", ".join(keys[:6]) + (" ..." if len(keys) > 6 else "")
    guess = f" It looks like {known}." if known else ""
    return f"{path}: not a trace: no traceEvents among its keys ({has}).{guess} Give a file written by torch.profiler."


def _broken(text: bytes, event_type: type[E], path: Path, error: msgspec.DecodeError) -> Document[E]:
    """Not valid JSON: cut off, or with faults that profilers are known for."""
    head = _first(text)
    if head not in (b"{", b"["):
        raise TracetoolsError(
            f"{path}: not JSON (starts with {text[:12]!r}). Give a trace written by torch.profiler."
        ) from error
    if _TRUNCATED in str(error) and (found := _truncated(text, event_type)) is not None:
        return found
    if "UTF-8" in str(error):
        cleaned = text.decode("utf-8", "replace").encode()
        found = parse_document(cleaned, event_type, path)
        return Document(
            found.events, found.top, (*found.problems, Problem("encoding", 1, "bytes that are not UTF-8, replaced"))
        )
    mended, counts = mend(text)
    problems = tuple(Problem("json_repaired", n, f"{WHAT[k]} ({error})") for k, n in counts.items() if n)
    if counts:
        try:
            found = strict(mended, event_type)
        except msgspec.DecodeError as second:
            cut = _truncated(mended, event_type) if _TRUNCATED in str(second) else None
            found = cut or _by_event(mended, event_type, path, error)
        return Document(found.events, found.top, problems + found.problems)
    return _by_event(mended, event_type, path, error)


def _truncated(text: bytes, event_type: type[E], tries: int = 12) -> Document[E] | None:
    """The whole events of a text that was cut off, found from its end; None where the cut is not all that is wrong."""
    at = len(text)
    closing = b"]" if _first(text) == b"[" else b"]}"
    for _ in range(tries):
        at = text.rfind(b"}", 0, at)
        if at < 0:
            return None
        try:
            found = strict(text[: at + 1] + closing, event_type)
        except msgspec.DecodeError:
            continue
        lost = text[at + 1 :].strip(b" \t\r\n,]}")
        if _BOUNDARY.search(b"}" + lost[1:]):
            return None  # more than the last event would go: something else is wrong in it
        if not lost and closing == b"]":
            return found  # a bare array may stay open, with or without a last comma
        what = "last event dropped" if lost else "no event lost"
        return Document(found.events, found.top, (Problem("truncated", 1, f"truncated at byte {len(text)}, {what}"),))
    return None


def _by_event(text: bytes, event_type: type[E], path: Path, error: msgspec.DecodeError) -> Document[E]:
    """Every event on its own, so that one bad event costs one event."""
    start, tail_keys = _body_start(text, path, error)
    pieces = _BOUNDARY.split(text[start:])
    pieces[-1], tail = _cut_tail(pieces[-1])
    decoder = msgspec.json.Decoder(event_type)
    events: list[E] = []
    counts: Counter[str] = Counter()
    for piece in pieces:
        event = _one(piece, decoder, counts)
        if event is not None:
            events.append(event)
    if not events:
        raise TracetoolsError(f"{path}: no event can be read: {error}. Was the file damaged, or is it not a trace?")
    kinds = {
        "event_repaired": "mended and kept",
        "event_rejected": "cannot be read, dropped",
        "truncated": "cut off, dropped",
    }
    problems = [
        Problem(kind, n, f"events that were {kinds[kind]}; first fault: {error}") for kind, n in counts.items() if n
    ]
    return Document(events, _top(tail_keys, tail), tuple(problems))


def _body_start(text: bytes, path: Path, error: msgspec.DecodeError) -> tuple[int, bytes]:
    """(where the first event begins, the text of the keys before)."""
    if _first(text) == b"[":
        return text.index(b"[") + 1, b""
    match = _EVENTS_KEY.search(text)
    if match is None:
        raise TracetoolsError(f"{path}: broken JSON without a list of traceEvents: {error}.")
    return match.end(), text[: match.start()]


def _cut_tail(piece: bytes) -> tuple[bytes, bytes]:
    """The last piece, split into its event and what follows the list."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(piece.decode("utf-8", "replace").lstrip())
    except ValueError:
        close = piece.rfind(b"}", 0, piece.rfind(b"]")) if b"]" in piece else -1
        return (piece[: close + 1], piece[close + 1 :]) if close >= 0 else (piece, b"")
    raw = piece.lstrip()
    cut = len(raw.decode("utf-8", "replace")[:end].encode())
    return raw[:cut], raw[cut:]


def _one(piece: bytes, decoder: msgspec.json.Decoder[E], counts: Counter[str]) -> E | None:
    if not piece.strip(b" \t\r\n,]}"):
        return None
    for attempt in (lambda b: b, lambda b: mend(b)[0], requote, lambda b: mend(requote(b))[0], _plain_args):
        try:
            event = decoder.decode(attempt(piece.strip(b" \t\r\n,")))
        except msgspec.DecodeError:
            continue
        counts["event_repaired"] += attempt(piece) != piece
        return event
    counts["event_rejected" if piece.rstrip().endswith(b"}") else "truncated"] += 1
    return None


def _plain_args(piece: bytes) -> bytes:
    """The event with fields of unusual type or size left out; b"" where it is no object at all."""
    try:
        event = json.loads(piece)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(event, dict):
        return b""
    args = event.get("args")
    event["args"] = {k: v for k, v in args.items() if isinstance(v, str | int)} if isinstance(args, dict) else {}
    for key in ("ph", "name", "cat"):
        if key in event and not isinstance(event[key], str):
            event[key] = str(event[key])
    return json.dumps(event).replace("Infinity", "null").replace("NaN", "null").encode()


def _top(head: bytes, tail: bytes) -> dict[str, Any]:
    """Top-level keys before and after the list, as far as they can be read."""
    keys: dict[str, Any] = {}
    for text in (head.rstrip(b" \t\r\n,") + b"}", b"{" + tail.strip().lstrip(b"]").strip().lstrip(b",")):
        try:
            part = msgspec.json.decode(mend(text)[0])
        except msgspec.DecodeError:
            continue
        if isinstance(part, dict):
            keys |= {k: v for k, v in part.items() if k in TOP_KEYS and v is not None}
    return keys
