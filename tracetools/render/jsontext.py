"""JSON text that goes from a trace file into another one without being understood.

In: text of names and of `args` objects as a profiler wrote them. Out: text that every strict JSON parser and Perfetto's
trace processor read alike; unchanged, byte for byte, wherever it is that already. Knows nothing of events.
"""

from __future__ import annotations

import re

import msgspec

INT64 = range(-(2**63), 2**63)

# What needs a second look: numbers of more digits than an int64 has or with an exponent of three digits, which Perfetto
# garbles, and strings that end in a backslash, for which it refuses the whole file (seen in trace_processor v52).
_SUSPECT = re.compile(rb'\d{19}|[eE]\+?\d{3}|\\\\"')
_NUMBER = rb"(?P<number>(?P<whole>-?\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|' + _NUMBER, re.DOTALL)
_encode = msgspec.json.Encoder().encode


def string(text: str) -> bytes:
    """A JSON string: control characters escaped, the rest UTF-8 (escaped surrogate pairs in a name stop Perfetto)."""
    return _readable_end(_encode(text))


def arguments(raw: bytes) -> bytes:
    """An `args` object; b"" for none. Numbers beyond int64 and double become strings, invalid UTF-8 is replaced."""
    if raw in (b"", b"{}", b"null"):
        return b""
    raw = checked(raw)
    return raw if raw.startswith(b"{") else b'{"value":%b}' % raw


def checked(raw: bytes) -> bytes:
    """Any JSON value, as `arguments`."""
    if not raw.isascii():
        raw = raw.decode("utf-8", "replace").encode()
    return _TOKEN.sub(_readable, raw) if _SUSPECT.search(raw) else raw


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
    return [(key, m["number"]) for key, m in members if m and m["number"] and _readable(m) == m["number"]]


def _readable(token: re.Match[bytes]) -> bytes:
    number: bytes | None = token["number"]
    if number is None:
        return _readable_end(token[0])
    fits = int(token["whole"]) in INT64 and abs(float(number)) != float("inf")
    return number if fits else b'"%b"' % number


def _readable_end(quoted: bytes) -> bytes:
    """The same string; a backslash at its end is spelled by its number."""
    return quoted[:-3] + b'\\u005c"' if quoted.endswith(b'\\"') else quoted
