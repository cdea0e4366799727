"""Which process group the calls of a host backend (gloo) belong to, where the trace does not say.

In: the members of one role, on one clock. Out: the same members with groups where they can be told, and a word that they were
inferred. gloo's annotations name no group, but each of its threads serves one group only, the files list the groups, and no rank
leaves a collective before all of its group have entered it. Calls that share a thread on any rank form a family; the ranks are
split as the largest listed groups that no call of the family contradicts. Where that is not one answer, or too few calls speak
for it, the calls stay without a group. Knows nothing of devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracetools.collective_calls import SYNCHRONISING, Calls, Group
from tracetools.collectives import Member
from tracetools.model import Int64, Problem

ENOUGH = 8  # calls that must agree before a larger group is believed where a smaller one would do
ENOUGH_TOGETHER = 3  # the same where the smaller ones are single ranks: their calls overlap by chance only
Split = frozenset[tuple[int, ...]]  # disjoint groups that hold every rank once


def with_groups(members: Sequence[Member]) -> tuple[list[Member], list[Problem]]:
    """Members whose calls are of unknown groups get groups if all ranks of their role made the same calls in the same order."""
    by_role: dict[str, list[Member]] = defaultdict(list)
    for m in members:
        if any(not g.known for g in m.calls.groups):
            by_role[m.process.role].append(m)
    done: dict[int, Member] = {}
    problems: list[Problem] = []
    for same_role in by_role.values():
        found = _assign(same_role)
        done.update({m.index: m for m in found})
        if found:
            told = sorted({g.name for m in found for g in m.calls.groups if g.known})
            detail = f"process groups of {len(found[0].calls)} gloo collectives per rank inferred from threads and times: {', '.join(told)}"
            problems += [Problem("groups_inferred", len(found), detail)] if told else []
    return [done.get(m.index, m) for m in members], problems


def _assign(members: Sequence[Member]) -> list[Member]:
    calls = [m.calls for m in members]
    one_clock = all(m.process.clock_placed for m in members) and len({m.process.host for m in members}) == 1
    if len(members) < 2 or not one_clock or len({len(c) for c in calls}) > 1 or not len(calls[0]):
        return []
    kinds = np.array([[c.whats[w].kind for w in c.what.tolist()] for c in calls])
    sizes = np.array([[c.whats[w].in_elements or 0 for w in c.what.tolist()] for c in calls])
    if (kinds != kinds[0]).any() or (sizes != sizes[0]).any():
        return []
    family = _families(calls)
    ranks = [m.process.rank for m in members]
    splits = _splits(members)
    start, end = np.stack([c.start for c in calls]), np.stack([c.end for c in calls])
    binding = np.isin(kinds[0], SYNCHRONISING)
    chosen = {f: _split_of(splits, ranks, start, end, (family == f) & binding) for f in np.unique(family).tolist()}
    return [_regrouped(m, family, chosen) for m in members]


def _families(calls: Sequence[Calls]) -> Int64:
    """Per place in the order the family of its call: places that one thread served, on any rank, are of one family."""
    family = np.arange(len(calls[0]))
    while True:
        before = family.copy()
        for c in calls:
            for thread in np.unique(c.thread):
                mine = c.thread == thread
                family[np.isin(family, family[mine])] = family[mine].min()
        if (family == before).all():
            return family


def _splits(members: Sequence[Member]) -> list[Split]:
    """The ways in which listed groups of one description (else one size) split the ranks."""
    here = {m.process.rank for m in members}
    sets: dict[object, set[tuple[int, ...]]] = defaultdict(set)
    for m in members:
        for group in m.process.trace.info.groups.values():
            sets[group.description or len(group.ranks)].add(group.ranks)
            sets[len(group.ranks)].add(group.ranks)
    splits = []
    for groups in sets.values():
        listed = sorted(r for g in groups for r in g if r in here)
        if listed == sorted(r for r in here if r is not None) and frozenset(groups) not in splits:
            splits.append(frozenset(groups))
    return splits


def _split_of(
    splits: Sequence[Split], ranks: Sequence[int | None], start: Int64, end: Int64, places: Int64
) -> Split | None:
    """The largest groups that agree with the times; None where none do, two differ, or too few calls decide."""
    agreeing = [s for s in splits if _agrees(s, ranks, start[:, places], end[:, places])]
    largest = [s for s in agreeing if all(_within(other, s) for other in agreeing)]
    if len(largest) != 1 or not places.any():
        return None
    others = [s for s in agreeing if s != largest[0]]
    alone = all(len(group) == 1 for s in others for group in s)  # no time can contradict groups of one rank
    return largest[0] if int(places.sum()) >= (0 if not others else ENOUGH_TOGETHER if alone else ENOUGH) else None


def _agrees(split: Split, ranks: Sequence[int | None], start: Int64, end: Int64) -> bool:
    for group in split:
        rows = [i for i, r in enumerate(ranks) if r in group]
        if (start[rows].max(axis=0) > end[rows].min(axis=0)).any():
            return False
    return True


def _within(small: Split, large: Split) -> bool:
    return all(any(set(s) <= set(g) for g in large) for s in small)


def _regrouped(member: Member, family: Int64, chosen: dict[int, Split | None]) -> Member:
    groups: list[Group] = []
    of_family = {}
    for number, split in chosen.items():
        ranks = next((g for g in split or () if member.process.rank in g), None)
        group = member.calls.groups[0] if ranks is None else Group(f"gloo {list(ranks)}", ranks, named=False)
        if group not in groups:
            groups.append(group)
        of_family[number] = groups.index(group)
    index = np.array([of_family[f] for f in family.tolist()], np.int64)
    return replace(member, calls=replace(member.calls, group=index, groups=tuple(groups)))
