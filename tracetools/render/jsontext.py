"""JSON text that goes from a trace file into another one without being understood.

In: text of names and of `args` objects as a profiler wrote them. Out: text that every strict JSON parser and Perfetto's
trace processor read alike; unchanged, byte for byte, wherever it is that already. Knows nothing of events.
"""

from __future__ import annotations

import re

import msgspec

INT64 = range(-(2**63), 2**63)

# Numbers that trace_processor garbles: more digits than an int64 has, or an exponent of three digits.
_SUSPECT_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}")
_NUMBER = rb"(?P<number>-?(?P<whole>\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|' + _NUMBER, re.DOTALL)
_encode = msgspec.json.Encoder().encode


def string(text: str) -> bytes:
    """A JSON string: control characters escaped, the rest UTF-8 (escaped surrogate pairs in a name stop Perfetto)."""
    return _encode(text)


def arguments(raw: bytes) -> bytes:
    """An `args` object; b"" for none. Numbers beyond int64 and double become strings, invalid UTF-8 is replaced."""
    if raw in (b"", b"{}", b"null"):
        return b""
    if not raw.isascii():
        raw = raw.decode("utf-8", "replace").encode()
    if _SUSPECT_NUMBER.search(raw):
        raw = _TOKEN.sub(_quote_beyond_range, raw)
    return raw if raw.startswith(b"{") else b'{"value":%b}' % raw


def joined(first: bytes, second: bytes) -> bytes:
    """Two `args` objects as one."""
    return first.rstrip()[:-1] + b"," + second[1:] if first and second else first or second


def finite_numbers(raw: bytes) -> list[tuple[str, bytes]]:
    """The members of an object that are numbers within range (or strings of such): all that a counter can show."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    members = [(key, _TOKEN.fullmatch(bytes(value).strip(b'"'))) for key, value in found.items()]
    return [(key, m["number"]) for key, m in members if m and m["number"] and _quote_beyond_range(m) == m["number"]]


def _quote_beyond_range(match: re.Match[bytes]) -> bytes:
    number: bytes | None = match["number"]
    if number is None or (int(match["whole"]) in INT64 and abs(float(number)) != float("inf")):
        return match[0]
    return b'"%b"' % number
