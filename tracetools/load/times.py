"""Timestamps and durations as a file spells them -> exact integer nanoseconds.

In: the `ts` and `dur` values (microseconds; numbers, or the text of numbers). Out: start and end in nanoseconds, int64,
each rounded half to even from the exact decimal value of `ts` and of `ts + dur`, and which rows are usable.
A double carries a microsecond value with three decimals exactly only below 2^43 us; above that, and for more decimals,
the number's own text decides. Knows nothing of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np

from tracetools.model import Bool, Int64

EXACT_BELOW_US = 2.0**43
# Longer than any training job: CUPTI is known to write durations of centuries, which would overflow sums.
LONGEST_NS = 2**53
_CONTEXT = Context(prec=60, rounding=ROUND_HALF_EVEN)
_THOUSAND = Decimal(1000)


class TimesNeedText(Exception):
    """A double cannot carry these times exactly: read the text of the numbers instead (internal to the reader)."""


def from_numbers(ts: Sequence[Any], dur: Sequence[Any]) -> tuple[Int64, Int64, Bool]:
    """(start ns, end ns, usable) from parsed JSON values. Raises TimesNeedText where doubles are not enough.

    Unusable rows (no number in `ts` or `dur`) have start = end = 0.
    """
    kinds = set(map(type, ts)) | set(map(type, dur))
    if kinds <= {int}:
        return _from_ints(ts, dur)
    if not kinds <= {int, float, type(None)}:
        raise TimesNeedText
    start_us, dur_us = np.array(ts, np.float64), np.array(dur, np.float64)  # None becomes NaN
    usable = np.isfinite(start_us) & np.isfinite(dur_us)
    start_us[~usable] = dur_us[~usable] = 0.0
    if len(start_us) and max(np.abs(start_us).max(), np.abs(dur_us).max()) >= EXACT_BELOW_US:
        raise TimesNeedText
    start, end = _split_and_round(start_us, dur_us)
    return start, end, usable


def _from_ints(ts: Sequence[int], dur: Sequence[int]) -> tuple[Int64, Int64, Bool]:
    try:
        start = np.array(ts, np.int64)
        length = np.array(dur, np.int64)
    except OverflowError as error:
        raise TimesNeedText from error
    limit = np.iinfo(np.int64).max // 4000
    if len(start) and max(np.abs(start).max(), np.abs(length).max()) > limit:
        raise TimesNeedText
    return start * 1000, (start + length) * 1000, np.ones(len(start), np.bool_)


def _split_and_round(start_us: Any, dur_us: Any) -> tuple[Int64, Int64]:
    whole_start, whole_dur = np.floor(start_us), np.floor(dur_us)
    frac_start = (start_us - whole_start) * 1000.0  # the subtraction is exact, the product is off by less than 1e-9
    frac_dur = (dur_us - whole_dur) * 1000.0
    near = np.rint(frac_start), np.rint(frac_dur)
    for frac, rounded, value in ((frac_start, near[0], start_us), (frac_dur, near[1], dur_us)):
        # what a double of this size can be off by, in ns; more than that is a real fourth decimal
        if (np.abs(frac - rounded) > np.spacing(np.abs(value)) * 500.0 + 1e-6).any():
            raise TimesNeedText
    start = whole_start.astype(np.int64) * 1000 + near[0].astype(np.int64)
    return start, start + whole_dur.astype(np.int64) * 1000 + near[1].astype(np.int64)


def from_text(ts: Sequence[bytes], dur: Sequence[bytes]) -> tuple[Int64, Int64, Bool]:
    """The same from the JSON text of each value; quoted numbers are accepted."""
    start, end = np.zeros(len(ts), np.int64), np.zeros(len(ts), np.int64)
    usable = np.zeros(len(ts), np.bool_)
    for row, (ts_text, dur_text) in enumerate(zip(ts, dur, strict=True)):
        pair = _exact_pair(ts_text, dur_text)
        if pair is not None:
            start[row], end[row] = pair
            usable[row] = True
    return start, end, usable


def _exact_pair(ts_text: bytes, dur_text: bytes) -> tuple[int, int] | None:
    start, length = _three_decimals(ts_text), _three_decimals(dur_text)
    if start is not None and length is not None:
        return _in_range(start, start + length)
    try:
        ts = Decimal(ts_text.decode().strip(' "'))
        dur = Decimal(dur_text.decode().strip(' "'))
        if not (ts.is_finite() and dur.is_finite()) or max(ts.adjusted(), dur.adjusted()) > 18:
            return None
        exact_end = _CONTEXT.add(ts, dur)
        return _in_range(_round(ts), _round(exact_end))
    except (InvalidOperation, UnicodeDecodeError):
        return None


def _in_range(start: int, end: int) -> tuple[int, int] | None:
    """None for a start beyond 64 bits; a length beyond LONGEST_NS is cut to just beyond it, which is as wrong and fits."""
    if abs(start) >= 2**62:
        return None
    return start, min(max(end, start - LONGEST_NS - 1), start + LONGEST_NS + 1)


def _round(us: Decimal) -> int:
    return int(_CONTEXT.multiply(us, _THOUSAND).to_integral_value(ROUND_HALF_EVEN))


def _three_decimals(text: bytes) -> int | None:
    """Nanoseconds of `digits[.ddd]`; None for every other spelling."""
    whole, point, frac = text.partition(b".")
    if not whole.isdigit() or len(frac) > 3 or (point and not frac.isdigit()):
        return None
    return int(whole) * 1000 + (int(frac) * 10 ** (3 - len(frac)) if frac else 0)


def text_of(value: Any) -> bytes:
    """The JSON text of a value that was kept raw."""
    return bytes(value) if isinstance(value, msgspec.Raw) else b""
