"""A trace file that is as it should be, a few megabytes at a time: neither its text nor its events are ever there as a whole.

In: a path. Out: pieces, each an array of events as text and as `Usual` records, in file order, and the top-level keys.
A file that is not as it should be (damaged, cut off, in another container, with unusual events) is refused as `NotUsual`, at
whatever place that shows: load.document reads it whole, and mends what can be mended. Knows nothing of what events mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

try:  # three times as fast as zlib, same interface; there are processors that it is not built for
    from isal.igzip_lib import IsalError as GzipError
    from isal.isal_zlib import decompressobj
except ImportError:
    from zlib import decompressobj  # type: ignore[assignment]
    from zlib import error as GzipError  # type: ignore[assignment]

from tracetools.load.document import TOP_KEYS, collector_paused, strict
from tracetools.load.records import Usual
from tracetools.load.source import GZIP_MAGIC

PIECE = 2**20  # bytes of text: large enough to cost nothing per piece, small enough for a processor's cache
LONGEST_EVENT = 128 * PIECE
_START = re.compile(rb'[ \t\r\n]*(?:\[|\{(?:.{,65536}?)"traceEvents"[ \t\r\n]*:[ \t\r\n]*\[)', re.DOTALL)
# From one event to the next. Its quotes cannot stand inside a string, so this is no place within one.
_BETWEEN = re.compile(rb'\}[ \t\r\n]*,[ \t\r\n]*\{[ \t\r\n]*"(?:ph|name|cat|pid|ts|args)"')


class NotUsual(Exception):
    """The file must be read whole (internal to the reader)."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some events in a row. `text` is a JSON document of them and nothing else but top-level keys."""

    text: bytes
    events: list[Any]  # Slice, Metadata, and events of which nothing is read


def each_piece(path: Path, take: Callable[[Piece], None]) -> dict[str, Any]:
    """Hand every piece to `take`; return the top-level keys. Raises NotUsual, perhaps after some pieces."""
    try:
        with collector_paused():
            return _each_piece(_texts(path), take)
    except (OSError, GzipError, msgspec.DecodeError) as error:  # type: ignore[misc]  # isal's stub types its class as a value
        raise NotUsual(str(error)) from error


def _each_piece(texts: Iterator[bytes], take: Callable[[Piece], None]) -> dict[str, Any]:
    text = next(texts, b"")
    start = _START.match(text)
    if start is None:
        raise NotUsual("no list of events near the start")
    head, text = text[: start.end()], text[start.end() :]
    bare = head.lstrip() == b"["
    top = {} if bare else _top_level(head)
    between: bytes | None = None
    for more in texts:
        if between is None and (found := _BETWEEN.search(more)):
            between = found[0]
        cut = more.rfind(between) if between is not None else -1
        if cut >= 0:
            whole = b"".join((b"[", text, memoryview(more)[: cut + 1], b"]"))
            take(Piece(whole, strict(whole, Usual).events))
            text = more[more.index(b"{", cut) :]
        elif len(text) > LONGEST_EVENT:
            raise NotUsual("no end of an event in sight")
        else:
            text += more
    return top | _last(text, bare, take)


def _top_level(head: bytes) -> dict[str, Any]:
    """Keys before the events: `{"schemaVersion": 1, "traceEvents": [` without its end."""
    keys = head[: head.rindex(b'"traceEvents"')].rstrip().removesuffix(b",") + b"}"
    found = msgspec.json.decode(keys, type=dict[str, Any])
    return {k: v for k, v in found.items() if k in TOP_KEYS and v is not None}


def _last(text: bytes, bare: bool, take: Callable[[Piece], None]) -> dict[str, Any]:
    """The last events and the keys behind them."""
    text = (b"[" if bare else b'{"traceEvents":[') + text
    found = strict(text, Usual)
    take(Piece(text, found.events))
    return found.top


def _texts(path: Path) -> Iterator[bytes]:
    """The file's text in parts of about PIECE bytes. Raises NotUsual for containers but gzip with one member."""
    with path.open("rb") as file:
        if file.read(len(GZIP_MAGIC)) != GZIP_MAGIC:
            file.seek(0)
            while text := file.read(PIECE):
                yield text
            return
        file.seek(0)
        packed = file.read()
    member = decompressobj(wbits=31)
    while not member.eof:
        text = member.decompress(packed, PIECE)
        packed = member.unconsumed_tail
        if not text and not member.eof:
            raise NotUsual("gzip data is cut off")
        yield text
    if member.unused_data:
        raise NotUsual("more than one gzip member")
