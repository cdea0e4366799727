"""Lanes: slices that overlap on one row of a trace, laid on as many rows as it takes to show them all.

In: starts and ends in integer nanoseconds, in order of (start, longer first). Out: a lane per slice, such that on
one lane slices nest or follow each other and never overlap in part; and, for instants, the slice that surrounds each.
Viewers drop or garble what overlaps in part; here nothing is dropped, clipped or moved in time.
Knows nothing of what the slices are.
"""

from __future__ import annotations

from collections.abc import Sequence

NONE = -1


def assign(start: Sequence[int], end: Sequence[int]) -> list[int]:
    """The lowest lane that each slice fits on: inside the innermost slice that is open there, or where none is open.

    A child that bleeds over its parent's end, if by one nanosecond, gets the next lane.
    """
    open_ends: list[list[int]] = []  # per lane: ends of the slices that are open, innermost last
    lanes: list[int] = []
    for begins, ends in zip(start, end, strict=True):
        lane = _fitting(open_ends, begins, ends)
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(ends)
        lanes.append(lane)
    return lanes


def _fitting(open_ends: list[list[int]], begins: int, ends: int) -> int:
    """The first lane with room; closes on the way what is over by `begins`."""
    for lane, stack in enumerate(open_ends):
        while stack and stack[-1] <= begins:
            stack.pop()
        if not stack or ends <= stack[-1]:
            return lane
    return len(open_ends)


def surrounding(start: Sequence[int], end: Sequence[int], instants: Sequence[int]) -> list[int]:
    """For each instant the index of the slice that began last among those with start <= instant <= end; else NONE.

    A slice that begins at the instant wins over one that ends there: that is where an arrow to the instant points.
    """
    found = [NONE] * len(instants)
    active: list[int] = []
    upcoming = 0
    for which in sorted(range(len(instants)), key=instants.__getitem__):
        at = instants[which]
        while upcoming < len(start) and start[upcoming] <= at:
            active.append(upcoming)
            upcoming += 1
        while active and end[active[-1]] < at:  # over for all later instants too
            active.pop()
        if active:
            found[which] = active[-1]
    return found
