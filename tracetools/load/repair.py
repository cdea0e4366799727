"""Broken JSON text -> the same text mended, and a count of each kind of mend.

In: bytes that a strict parser rejects. Out: bytes that it may accept, with what was changed.
Profilers write numbers that are not numbers, raw control characters, Windows paths with single backslashes, missing
values and commas before a closing bracket. Each of these has one obvious meaning; it is mended and counted.
Knows nothing of events.
"""

from __future__ import annotations

import re
from collections import Counter

# A string that is closed, or one of the things that may be wrong outside strings.
_PIECE = re.compile(
    rb'(?P<string>"(?:[^"\\]|\\.)*")'
    rb"|(?P<number>-?\b(?:NaN|Infinity|nan|inf|Inf)\b)"
    rb"|(?P<missing>:(?=\s*[,}\]]))"
    rb"|(?P<comma>,(?=\s*[}\]]))",
    re.DOTALL,
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_ESCAPE = re.compile(rb'\\(?:(u[0-9a-fA-F]{4}|["\\/bfnrt])|.)', re.DOTALL)
# A string value of an object, up to a quote that is followed by the next key or the end of the object.
_LOOSE_VALUE = re.compile(rb'(:\s*")(.*?)("(?=\s*(?:,\s*"[^"]*"\s*:|\})))', re.DOTALL)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')

WHAT = {
    "string": "control characters or illegal escapes in strings",
    "number": "NaN or Infinity as a number, read as null",
    "missing": "a key without a value, read as null",
    "comma": "a comma before a closing bracket",
}


def mend(text: bytes) -> tuple[bytes, Counter[str]]:
    """Text with every known fault outside and inside strings mended; the counter is by the keys of WHAT."""
    counts: Counter[str] = Counter()

    def fix(match: re.Match[bytes]) -> bytes:
        kind = match.lastgroup or ""
        whole = match[0]
        if kind == "string":
            if b"\\" not in whole and not _CONTROL.search(whole):
                return whole
            mended = _mend_string(whole)
            counts[kind] += mended != whole
            return mended
        counts[kind] += 1
        return {"number": b"null", "missing": b":null", "comma": b""}[kind]

    return _PIECE.sub(fix, text), counts


def _mend_string(quoted: bytes) -> bytes:
    escaped = _ESCAPE.sub(lambda m: m[0] if m[1] else b"\\" + m[0], quoted)
    return _CONTROL.sub(lambda m: b"\\u%04x" % m[0][0], escaped)


def requote(event: bytes) -> bytes:
    """One event in which quotes inside string values were not escaped, with those quotes escaped."""
    return _LOOSE_VALUE.sub(lambda m: m[1] + _BARE_QUOTE.sub(rb'\\"', m[2]) + m[3], event)
