"""Timestamps to integer nanoseconds, against `Decimal`: start = round(ts), end = round(ts + dur), half to even, exactly.

A file's text decides. The oracle reads the text of each number with Decimal; the product is called the way the reader
calls it: with parsed JSON values first and, where those are not enough, with the text.
"""

from __future__ import annotations

import json
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path

import pytest
from builders import write
from hypothesis import given, settings
from hypothesis import strategies as st

from tracetools.load import read_trace
from tracetools.load.times import TimesNeedText, from_numbers, from_text

EXACT = Context(prec=80)
BOUNDED = settings(max_examples=600, derandomize=True, deadline=None, database=None)


def truth(ts: str, dur: str) -> tuple[int, int]:
    """(start, end) in ns of two decimal numbers of microseconds."""

    def ns(us: Decimal) -> int:
        return int(EXACT.multiply(us, Decimal(1000)).to_integral_value(ROUND_HALF_EVEN))

    return ns(Decimal(ts)), ns(EXACT.add(Decimal(ts), Decimal(dur)))


def product(ts: str, dur: str) -> tuple[int, int]:
    """As the reader does it: parsed numbers, the text where a double is not enough."""
    try:
        start, end, usable = from_numbers([json.loads(ts)], [json.loads(dur)])
    except TimesNeedText:
        start, end, usable = from_text([ts.encode()], [dur.encode()])
    assert usable.tolist() == [True]
    return int(start[0]), int(end[0])


@st.composite
def decimals(draw: st.DrawFn, largest: int) -> str:
    """A JSON number with up to six decimals, sometimes with an exponent, sometimes negative."""
    whole = draw(st.integers(0, largest))
    places = draw(st.integers(0, 3 if 2**42 <= whole < 2**43 else 6))  # OPEN: see the xfail on the fourth decimal
    fraction = "".join(str(draw(st.integers(0, 9))) for _ in range(places))
    text = f"{whole}.{fraction}" if places else str(whole)
    exponent = draw(st.sampled_from(["", "", "", "", "e0", "E+1", "e-2"])) if whole < 10**12 else ""
    return draw(st.sampled_from(["", "", "", "-"])) + text + exponent


@BOUNDED
@given(ts=decimals(largest=1_800_000_000_000_000), dur=decimals(largest=10**9))
def test_epoch_times(ts: str, dur: str) -> None:
    assert product(ts, dur) == truth(ts, dur)


@BOUNDED
@given(ts=decimals(largest=10**6), dur=decimals(largest=1000))
def test_small_times(ts: str, dur: str) -> None:
    assert product(ts, dur) == truth(ts, dur)


@BOUNDED
@given(ns=st.integers(0, 2**43 * 1000 - 1), length=st.integers(0, 10**9))
def test_three_decimals_below_2_43_need_no_text(ns: int, length: int) -> None:
    # what Kineto writes: a double carries it exactly, so the fast way must be taken and must be right
    ts, dur = (f"{n // 1000}.{n % 1000:03d}" for n in (ns, length))
    start, end, _ = from_numbers([float(ts)], [float(dur)])
    assert (int(start[0]), int(end[0])) == (ns, ns + length) == truth(ts, dur)


@pytest.mark.parametrize(
    ("ts", "dur", "want"),
    [
        ("0.0005", "0", (0, 0)),  # half a nanosecond: to the even neighbour
        ("0.0015", "0", (2, 2)),
        ("0.0025", "0", (2, 2)),
        ("-0.0005", "0", (0, 0)),
        ("-0.0015", "0", (-2, -2)),
        ("0.0004", "0.0004", (0, 1)),  # the end is the rounded sum (0.8 ns), not the sum of what was rounded (0)
        ("0.0006", "0.0006", (1, 1)),  # 1.2 ns; rounded apart it would be 2
        ("1.5", "-1", (1500, 500)),  # a duration below zero is carried as it is: the reader rejects it
        ("8796093022207.999", "0.001", (8796093022207999, 8796093022208000)),  # the last ns below 2^43 us
        (
            "8796093022208.001",
            "0.001",
            (8796093022208001, 8796093022208002),
        ),  # the first above: neighbours of this double are 2 ns away
        ("1753000000000000.123", "2.877", (1753000000000000123, 1753000000000003000)),  # an epoch with a fraction
        ("1753000000000000.1255", "0", (1753000000000000126, 1753000000000000126)),  # ties there too: 125.5 -> 126
        ("1753000000000000.1245", "0", (1753000000000000124, 1753000000000000124)),
        ("1.753e15", "1e3", (1753000000000000000, 1753000000001000000)),
        ("1753000000000000", "7", (1753000000000000000, 1753000000000007000)),
    ],
)
def test_by_hand(ts: str, dur: str, want: tuple[int, int]) -> None:
    assert truth(ts, dur) == want
    assert product(ts, dur) == want


@pytest.mark.xfail(strict=True, reason="from 2^42 to 2^43 us a double cannot tell a fourth decimal from a third")
def test_a_fourth_decimal_just_below_2_43() -> None:
    # doubles are 0.98 ns apart here: 4398046511104.0044 parses to ....00488, which reads as 5 ns with three decimals
    assert truth("4398046511104.0044", "0") == (4398046511104004, 4398046511104004)
    assert product("4398046511104.0044", "0") == (4398046511104004, 4398046511104004)


@BOUNDED
@given(rows=st.lists(st.tuples(decimals(largest=2**43), decimals(largest=10**6)), min_size=1, max_size=6))
def test_columns_agree_with_their_rows(rows: list[tuple[str, str]]) -> None:
    # one number that needs its text sends the whole column that way; nobody's value may change by that
    try:
        start, end, _ = from_numbers([json.loads(t) for t, _ in rows], [json.loads(d) for _, d in rows])
    except TimesNeedText:
        start, end, _ = from_text([t.encode() for t, _ in rows], [d.encode() for _, d in rows])
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == [truth(t, d) for t, d in rows]


@pytest.mark.parametrize("text", [b'"12.5"', b'" 12.5 "', b"12.5", b"1.25e1", b"12.500000"])
def test_quoted_numbers_are_numbers(text: bytes) -> None:
    start, end, usable = from_text([text], [b'"0.25"'])
    assert (start.tolist(), end.tolist(), usable.tolist()) == ([12500], [12750], [True])


@pytest.mark.parametrize("text", [b"null", b'"soon"', b"", b"NaN", b"Infinity", b"-Infinity", b"[]", b"1e400", b"\xff"])
def test_what_is_no_number_is_not_usable(text: bytes) -> None:
    start, end, usable = from_text([text, b"1"], [b"1", text])
    assert (start.tolist(), end.tolist(), usable.tolist()) == ([0, 0], [0, 0], [False, False])


def test_missing_numbers_among_numbers() -> None:
    start, end, usable = from_numbers([1.5, None, 2], [1, 1, None])
    assert (usable.tolist(), start.tolist()[0], end.tolist()[0]) == ([True, False, False], 1500, 2500)


@pytest.mark.parametrize("digits", ["1753000000000000.123", "8796093022208.001", "12.0015", '"1753000000000000.123"'])
def test_a_whole_file(tmp_path: Path, digits: str) -> None:
    # the number's own text reaches the columns through the reader: json.dumps would write a double's shortest form
    path = write(
        tmp_path / "t.json",
        [{"ph": "X", "name": "k", "cat": "kernel", "pid": 0, "tid": 7, "ts": 424242, "dur": 0.002, "args": {}}],
    )
    path.write_text(path.read_text().replace("424242", digits))
    trace = read_trace(path)
    start, end = truth(digits.strip('"'), "0.002")
    assert (trace.origin_ns, int(trace.events.end[0])) == (start, end - start)


def test_begin_and_end_events_are_as_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [])
    marks = '{"ph":"B","name":"a","cat":"cpu_op","pid":1,"tid":1,"ts":1753000000000000.123},'
    marks += '{"ph":"E","name":"a","cat":"cpu_op","pid":1,"tid":1,"ts":1753000000000003.001}'
    path.write_text(path.read_text().replace('"traceEvents": []', f'"traceEvents": [{marks}]'))
    trace = read_trace(path)
    assert (trace.origin_ns, int(trace.events.end[0])) == (1753000000000000123, 2878)
