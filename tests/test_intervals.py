"""Interval arithmetic against sets of integers: an interval is the set of the whole instants in it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracetools.intervals import (
    EMPTY,
    NONE,
    SILENT,
    Spans,
    Timeline,
    clip,
    complement,
    covered,
    innermost,
    intersect,
    merge,
    minus,
    overlay,
    union,
)
from tracetools.model import Int64

Pair = tuple[int, int]
BOUNDED = settings(max_examples=300, derandomize=True, deadline=None, database=None)
LATEST = 40

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)
edges = st.lists(st.integers(-2, LATEST + 2), min_size=1, max_size=8).map(sorted)


def columns(intervals: list[Pair]) -> tuple[Int64, Int64]:
    return np.array([s for s, _ in intervals], np.int64), np.array([e for _, e in intervals], np.int64)


def spans(intervals: list[Pair]) -> Spans:
    return union(*columns(intervals))


def instants(intervals: list[Pair]) -> set[int]:
    return {i for s, e in intervals for i in range(s, e)}


def as_pairs(found: Spans) -> list[Pair]:
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


def is_set(found: Spans, want: set[int]) -> None:
    """The right instants, as disjoint, non-touching, non-empty intervals in order, of 64-bit integers."""
    assert instants(as_pairs(found)) == want
    assert all(s < e for s, e in as_pairs(found))
    assert all(e < s for (_, e), (s, _) in pairwise(as_pairs(found)))
    assert found.total == len(want) == sum(e - s for s, e in as_pairs(found))
    assert found.start.dtype == found.end.dtype == np.int64


# ---------------------------------------------------------------- sets
@BOUNDED
@given(a=pairs, b=pairs)
def test_sets(a: list[Pair], b: list[Pair]) -> None:
    one, other = spans(a), spans(b)
    is_set(one, instants(a))
    is_set(merge(one, other), instants(a) | instants(b))
    is_set(intersect(one, other), instants(a) & instants(b))
    is_set(minus(one, other), instants(a) - instants(b))


@BOUNDED
@given(a=pairs, lo=st.integers(-5, 45), length=st.integers(0, 50))
def test_windows(a: list[Pair], lo: int, length: int) -> None:
    window = set(range(lo, lo + length))
    is_set(clip(spans(a), lo, lo + length), instants(a) & window)
    is_set(complement(spans(a), lo, lo + length), window - instants(a))


@BOUNDED
@given(a=pairs, at=edges)
def test_cover_between_edges(a: list[Pair], at: list[int]) -> None:
    found = covered(spans(a), np.array(at, np.int64))
    assert found.tolist() == [sum(i < edge for i in instants(a)) for edge in at]


def test_sets_by_hand() -> None:
    # touching intervals join, an interval inside another adds nothing, an empty one covers nothing
    assert as_pairs(spans([(5, 9), (0, 3), (3, 5), (6, 7), (20, 20), (12, 15)])) == [(0, 9), (12, 15)]
    assert as_pairs(complement(spans([(2, 4)]), 0, 10)) == [(0, 2), (4, 10)]
    assert as_pairs(minus(spans([(0, 10)]), spans([(3, 4), (8, 20)]))) == [(0, 3), (4, 8)]
    assert (len(EMPTY), EMPTY.total, len(merge(EMPTY, EMPTY)), len(complement(EMPTY, 3, 3))) == (0, 0, 0, 0)


def test_epoch_nanoseconds_stay_exact() -> None:
    # 2^60 ns and a bit: a double would round these to multiples of 256
    base = 2**60
    found = union(np.array([base + 1, base + 2], np.int64), np.array([base + 3, base + 8], np.int64))
    assert (as_pairs(found), found.total) == ([(base + 1, base + 8)], 7)


# ---------------------------------------------------------------- timelines
def value_at(line: Timeline, instant: int) -> int:
    value = NONE
    for at, what in zip(line.at.tolist(), line.value.tolist(), strict=True):
        value = what if at <= instant else value
    return value


def in_trace_order(intervals: list[Pair]) -> list[Pair]:
    return sorted(intervals, key=lambda p: (p[0], -p[1]))


@BOUNDED
@given(intervals=pairs)
def test_innermost_is_what_began_last(intervals: list[Pair]) -> None:
    rows = in_trace_order(intervals)
    line = innermost(*columns(rows), np.arange(len(rows)))
    for instant in range(LATEST + 2):
        # in order of (start, longer first) the last one that is active is the one that began last, or the shorter one
        active = [i for i, (s, e) in enumerate(rows) if s <= instant < e]
        assert value_at(line, instant) == (active[-1] if active else NONE)
    assert (np.diff(line.at) > 0).all()
    assert not len(line.value) or line.value[-1] == NONE  # nothing lasts for ever


@pytest.mark.parametrize(
    ("intervals", "want"),
    [
        ([(0, 10), (2, 8), (4, 6)], [(0, 0), (2, 1), (4, 2), (6, 1), (8, 0), (10, NONE)]),  # nested
        ([(0, 10), (5, 15)], [(0, 0), (5, 1), (15, NONE)]),  # bleeds over its parent's end
        (
            [(0, 20), (5, 10), (7, 12)],
            [(0, 0), (5, 1), (7, 2), (12, 0), (20, NONE)],
        ),  # a child ends under its bleeding sibling
        ([(0, 4), (4, 6)], [(0, 0), (4, 1), (6, NONE)]),  # touching
        ([(0, 5), (0, 5)], [(0, 1), (5, NONE)]),  # the same: the later row is the inner one
        ([(0, 5), (2, 2)], [(0, 0), (5, NONE)]),  # no duration, no instant
        ([], []),
    ],
)
def test_innermost_by_hand(intervals: list[Pair], want: list[Pair]) -> None:
    line = innermost(*columns(intervals), np.arange(len(intervals)))
    assert list(zip(line.at.tolist(), line.value.tolist(), strict=True)) == want


@BOUNDED
@given(a=pairs, changes=st.dictionaries(st.integers(-1, LATEST), st.integers(NONE, 3), max_size=8))
def test_overlay_cuts_and_keeps_every_instant(a: list[Pair], changes: dict[int, int]) -> None:
    mine = spans(a)
    at = sorted(changes)
    line = Timeline(np.array(at, np.int64), np.array([changes[t] for t in at], np.int64))
    pieces = overlay(mine, line)
    found = as_pairs(pieces.spans)
    assert sum(e - s for s, e in found) == mine.total  # nothing twice, nothing lost
    for (s, e), parent, value in zip(found, pieces.parent.tolist(), pieces.value.tolist(), strict=True):
        assert mine.start[parent] <= s < e <= mine.end[parent]
        assert {value_at(line, i) for i in range(s, e)} == {value}
    assert instants(found) == instants(a)


def test_overlay_by_hand() -> None:
    # [0,10) and [12,14) over: nothing before 3, 1 from 3, 2 from 10, nothing from 13
    line = Timeline(np.array([3, 10, 13], np.int64), np.array([1, 2, NONE], np.int64))
    pieces = overlay(spans([(0, 10), (12, 14)]), line)
    assert as_pairs(pieces.spans) == [(0, 3), (3, 10), (12, 13), (13, 14)]
    assert (pieces.parent.tolist(), pieces.value.tolist()) == ([0, 0, 1, 1], [NONE, 1, 2, NONE])
    alone = overlay(spans([(0, 10)]), SILENT)
    assert (as_pairs(alone.spans), alone.value.tolist()) == ([(0, 10)], [NONE])
