"""Interval arithmetic on integer nanoseconds.

In and out: arrays of starts and ends (half-open [start, end), int64, one length). Exact: nothing but integers.
Knows nothing of events, steps or causes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracetools.model import Int64

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Intervals in order of start. `union` and its kin return disjoint, non-touching, non-empty ones."""

    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """Sum of the lengths, ns."""
        return int((self.end - self.start).sum())


EMPTY = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start: Int64, end: Int64) -> Spans:
    """The set of instants covered by any of the intervals (any order, may overlap; empty ones cover nothing)."""
    full = end > start
    start, end = start[full], end[full]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Spans(start[first], reach[last])


def merge(*sets: Spans) -> Spans:
    """Union of several sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def complement(spans: Spans, lo: int, hi: int) -> Spans:
    """The instants of [lo, hi) that a disjoint set leaves."""
    inside = clip(spans, lo, hi)
    start = np.concatenate([[lo], inside.end]).astype(np.int64)
    end = np.concatenate([inside.start, [hi]]).astype(np.int64)
    full = end > start
    return Spans(start[full], end[full])


def clip(spans: Spans, lo: int, hi: int) -> Spans:
    start, end = np.maximum(spans.start, lo), np.minimum(spans.end, hi)
    full = end > start
    return Spans(start[full], end[full])


def intersect(a: Spans, b: Spans) -> Spans:
    """The instants in both of two disjoint sets."""
    if not len(a) or not len(b):
        return EMPTY
    return minus(a, complement(b, int(min(a.start[0], b.start[0])), int(max(a.end[-1], b.end[-1]))))


def minus(a: Spans, b: Spans) -> Spans:
    """The instants of disjoint set `a` that are not in disjoint set `b`."""
    if not len(a) or not len(b):
        return a
    pieces = overlay(a, presence(b))
    free = pieces.value == NONE
    return union(pieces.spans.start[free], pieces.spans.end[free])


def covered(spans: Spans, edges: Int64) -> Int64:
    """Instants of a disjoint set before each edge; differences give the cover between edges."""
    if not len(spans):
        return np.zeros(len(edges), np.int64)
    before = np.concatenate([[0], np.cumsum(spans.end - spans.start)])
    index = np.searchsorted(spans.start, edges, side="right")
    inside = np.where(index > 0, edges - spans.start[np.maximum(index - 1, 0)], 0)
    length = np.where(index > 0, (spans.end - spans.start)[np.maximum(index - 1, 0)], 0)
    return before[np.maximum(index - 1, 0)] + np.minimum(inside, length)


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A value at every instant: value[i] from at[i] to at[i+1], NONE before at[0]. The last value lasts for ever."""

    at: Int64
    value: Int64


SILENT = Timeline(np.zeros(0, np.int64), np.zeros(0, np.int64))


def presence(spans: Spans) -> Timeline:
    """1 inside the disjoint spans, NONE outside."""
    return Timeline(
        np.stack([spans.start, spans.end], 1).reshape(-1), np.tile(np.array([1, NONE], np.int64), len(spans))
    )


def value_at(timeline: Timeline, at: Int64) -> Int64:
    """The timeline's value at each instant."""
    index = np.searchsorted(timeline.at, at, side="right") - 1
    values = np.append(timeline.value, NONE)
    return np.where(index >= 0, values[index], NONE)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Parts of intervals: which interval each part came from, and the timeline's value in it."""

    spans: Spans
    parent: Int64
    value: Int64


def overlay(spans: Spans, timeline: Timeline) -> Pieces:
    """Cut disjoint intervals at the timeline's changes. The parts of an interval sum to the interval."""
    n = len(spans)
    first = np.searchsorted(timeline.at, spans.start, side="right")
    last = np.searchsorted(timeline.at, spans.end, side="left")
    inner = np.maximum(last - first, 0)
    parent = np.repeat(np.arange(n), inner + 1)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(inner + 1) - (inner + 1), inner + 1)
    change = first[parent] + nth - 1  # the change at which this part begins (for nth > 0)
    padded = np.concatenate([timeline.at, [0]])
    start = np.where(nth == 0, spans.start[parent], padded[np.clip(change, 0, None)])
    end = np.where(nth == inner[parent], spans.end[parent], padded[np.minimum(change + 1, len(timeline.at))])
    values = np.concatenate([timeline.value, [NONE]])
    value = (
        np.where(change >= 0, values[np.clip(change, 0, None)], NONE)
        if len(timeline.at)
        else np.full(len(parent), NONE)
    )
    return Pieces(Spans(start.astype(np.int64), end.astype(np.int64)), parent, value.astype(np.int64))


def innermost(start: Int64, end: Int64, value: Int64) -> Timeline:
    """At every instant the value of the interval that began last (ties: the shorter one; then the later row).

    Intervals must be in order of (start, longer first). Where they nest this is the innermost one; an interval that
    bleeds over its parent's end stays innermost until its own end. Nothing is active: NONE.
    """
    at: list[int] = []
    out: list[int] = []

    def mark(time: int, what: int) -> None:
        if at and at[-1] == time:
            out[-1] = what
        else:
            at.append(time)
            out.append(what)

    stack: list[tuple[int, int]] = []  # (end, value), innermost last
    for s, e, v in zip(start.tolist(), end.tolist(), value.tolist(), strict=True):
        _unwind(stack, s, mark)
        if e > s:
            stack.append((e, v))
            mark(s, v)
    _unwind(stack, None, mark)
    return Timeline(np.array(at, np.int64), np.array(out, np.int64))


def _unwind(stack: list[tuple[int, int]], until: int | None, mark: Callable[[int, int], None]) -> None:
    """Take off the stack what has ended by `until` (all of it: None), marking what is left on top each time."""
    while stack and (until is None or stack[-1][0] <= until):
        ended, _ = stack.pop()
        while stack and stack[-1][0] <= ended:  # it bled over these
            stack.pop()
        mark(ended, stack[-1][1] if stack else NONE)
