"""The same collective found on all its ranks.

In: per process its calls (`Member`). Out: `Matches`: one row per call of all processes with the collective it belongs to, and
what could not be paired, in words. Calls are paired within their process group: by sequence number where every call has one,
else by order, whole or step by step. Counts, kinds, sizes and types must agree, or nothing is paired and a problem says why.
Never looks at the time of a call but for its order within its own process. Knows nothing of clocks, waiting and steps' walls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracetools.collective_calls import EQUAL_SIZES, Calls, Group, What
from tracetools.intervals import NONE
from tracetools.model import Bool, Int64, Problem, Process

SHOWN = 6  # ranks or steps named in a sentence
_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A process that may take part in collectives; `index` is its place in Run.processes."""

    index: int
    process: Process
    calls: Calls


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """All calls of all members, in order of (process, start). `collective`: equal for calls that are one; NONE: not paired."""

    process: Int64
    start: Int64
    end: Int64
    what: Int64  # index into whats
    group: Int64  # index into groups
    sequence: Int64
    step: Int64
    thread: Int64
    collective: Int64
    whats: tuple[What, ...]
    groups: tuple[Group, ...]
    labels: tuple[str, ...]  # of the processes of the run, by index
    ordered: Bool  # per collective: paired by order, not by sequence number

    def __len__(self) -> int:
        return len(self.start)

    @property
    def count(self) -> int:
        return len(self.ordered)

    def kinds(self, *kinds: str) -> Bool:
        """Which calls do one of these."""
        table = np.array([w.kind in kinds for w in self.whats] + [False], np.bool_)
        return table[self.what]

    def without(self, rows: Bool) -> Matches:
        """The same with these calls not paired."""
        return replace(self, collective=np.where(rows, NONE, self.collective))


def members_of(processes: Sequence[Process], calls: Sequence[Calls]) -> list[Member]:
    """Processes that can be told apart: with a rank that no other process of their role claims. No driver is one."""
    claims = Counter((p.role, p.rank) for p in processes)
    usable = [p.role != "driver" and p.rank is not None and claims[p.role, p.rank] == 1 for p in processes]
    return [Member(i, p, calls[i]) for i, p in enumerate(processes) if usable[i]]


def match(processes: Sequence[Process], members: Sequence[Member]) -> tuple[Matches, list[Problem]]:
    """Pair the calls of each process group. One member alone has nothing to pair, and that is no problem."""
    table = _table(processes, members)
    if len(members) < 2 or not len(table):
        return table, []
    problems: list[Problem] = []
    collective = table.collective.copy()
    ordered: list[bool] = []
    for group, rows in _by_key(table.group):
        found, by_order, said = _Group(table, members, group, rows).pair()
        problems += said
        fresh, local = np.unique(found[found != NONE], return_inverse=True)
        collective[rows[found != NONE]] = len(ordered) + local
        ordered += [by_order] * len(fresh)
    return replace(table, collective=collective, ordered=np.array(ordered, np.bool_)), problems


def _by_key(key: Int64) -> Iterator[tuple[int, Int64]]:
    """(value, its rows in order) for every value of a column."""
    order = np.argsort(key, kind="stable")
    values, first = np.unique(key[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, first[1:]), strict=True)


def _table(processes: Sequence[Process], members: Sequence[Member]) -> Matches:
    whats: dict[What, int] = {}
    groups: dict[tuple[str, Group], int] = {}
    known = _known_ranks(members)
    parts: dict[str, list[Int64]] = defaultdict(list)
    for m in members:
        calls, role = m.calls, m.process.role
        what = np.array([whats.setdefault(w, len(whats)) for w in calls.whats] or [0], np.int64)
        completed = [_completed(g, known[role, g.name], m.process.rank) for g in calls.groups]
        group = np.array([groups.setdefault((role, g), len(groups)) for g in completed] or [0], np.int64)
        parts["process"].append(np.full(len(calls), m.index, np.int64))
        parts["what"].append(what[calls.what])
        parts["group"].append(group[calls.group])
        for column in ("start", "end", "sequence", "step", "thread"):
            parts[column].append(getattr(calls, column))
    columns = {key: np.concatenate(arrays) for key, arrays in parts.items()}
    columns = columns or dict.fromkeys(
        ("process", "what", "group", *("start", "end", "sequence", "step", "thread")), _NO
    )
    return Matches(
        **columns,
        collective=np.full(len(columns["start"]), NONE, np.int64),
        whats=tuple(whats),
        groups=tuple(g for _, g in groups),
        labels=tuple(p.label for p in processes),
        ordered=np.zeros(0, np.bool_),
    )


_NO = np.zeros(0, np.int64)


def _known_ranks(members: Sequence[Member]) -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """The sets of ranks that any member gives a group's name."""
    known: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
    for m in members:
        for group in m.calls.groups:
            if group.ranks is not None:
                known[m.process.role, group.name].add(group.ranks)
    return known


def _completed(group: Group, known: set[tuple[int, ...]], rank: int | None) -> Group:
    """One spelling per group: its ranks as another member tells them, its size from its ranks."""
    ranks = group.ranks
    if ranks is None:
        mine = [r for r in known if rank in r]
        ranks = mine[0] if len(mine) == 1 else None
    return replace(group, ranks=ranks, size=len(ranks) if ranks is not None else group.size)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The calls of one process group, and how they are paired. Ids of collectives are local to the group."""

    table: Matches
    members: Sequence[Member]
    group: int
    rows: Int64

    @property
    def about(self) -> Group:
        return self.table.groups[self.group]

    def pair(self) -> tuple[Int64, bool, list[Problem]]:
        """(local id per row, was it by order?, problems)."""
        process = self.table.process[self.rows]
        present = np.unique(process)
        nothing = np.full(len(self.rows), NONE, np.int64)
        size = self.about.size
        if not self.about.known:
            detail = f"{self.label()}: calls of several process groups that the trace does not tell apart; not paired"
            return nothing, True, [Problem("collectives_unpaired", len(self.rows), detail)]
        if size is not None and len(present) > size:
            detail = f"{self.label()}: calls on {len(present)} ranks of a group of {size}: more than one group has this name; not paired"
            return nothing, True, [Problem("collectives_unpaired", len(self.rows), detail)]
        sequence = self.table.sequence[self.rows]
        if (sequence != NONE).all():
            found, problems = self._by_sequence(process, sequence)
            return self._shared(found, size), False, problems + self._absent(present)
        found, problems = self._by_order(process, self.table.step[self.rows])
        return self._shared(found, size), True, problems + self._absent(present)

    def label(self) -> str:
        return self.about.label

    def _shared(self, found: Int64, size: int | None) -> Int64:
        """Without collectives that only one rank recorded, unless its group is that rank alone."""
        if size == 1 or not (found != NONE).any():
            return found
        calls = np.bincount(found[found != NONE])
        return np.where((found != NONE) & (calls[np.maximum(found, 0)] > 1), found, NONE)

    def _by_sequence(self, process: Int64, sequence: Int64) -> tuple[Int64, list[Problem]]:
        """Calls with one sequence number (a coalesced call may be several kernels: the n-th with the n-th)."""
        nth = _occurrence(process, sequence)
        _, found = np.unique(np.stack([sequence, nth]), axis=1, return_inverse=True)
        found = found.reshape(-1).astype(np.int64)
        odd = self._disagree(found)
        if not odd.any():
            return found, []
        bad = odd[found]
        what = "the same sequence number is another operation, size or type on another rank"
        detail = f"{self.label()}: {what} ({self._example(found, odd)}); not paired"
        return np.where(bad, NONE, found), [Problem("collectives_unpaired", int(bad.sum()), detail)]

    def _by_order(self, process: Int64, step: Int64) -> tuple[Int64, list[Problem]]:
        steps = {tuple(np.unique(step[process == p]).tolist()) for p in np.unique(process)}
        if len(steps) == 1:
            found = self._in_order(process)
            if found is not None:
                return found, []
        if steps <= {(NONE,)}:
            why = self._why(np.arange(len(self.rows)))
            return np.full(len(self.rows), NONE, np.int64), [
                Problem("collectives_unpaired", len(self.rows), f"{self.label()}: {why}; not paired")
            ]
        return self._step_by_step(process, step)

    def _step_by_step(self, process: Int64, step: Int64) -> tuple[Int64, list[Problem]]:
        found = np.full(len(self.rows), NONE, np.int64)
        used, problems, failed = 0, [], []
        for number, rows in _by_key(step):
            part = _Group(self.table, self.members, self.group, self.rows[rows])
            local = part._in_order(process[rows]) if number != NONE else None
            if local is None and number != NONE:
                local = part._until_the_end(process[rows], number)
                if local is not None:
                    ends = f"the recording of a rank ends in step {number} ({part._counts()})"
                    detail = f"{self.label()}: {ends}; only what all ranks recorded is paired"
                    problems.append(Problem("collectives_incomplete", int((local == NONE).sum()), detail))
            if local is None:
                failed.append((number, rows))
                continue
            found[rows] = np.where(local == NONE, NONE, local + used)
            used += int(local.max(initial=-1)) + 1
        if failed:
            problems.append(self._failed(failed))
        return found, problems

    def _failed(self, failed: Sequence[tuple[int, Int64]]) -> Problem:
        _, rows = failed[0]
        steps = _listed([str(n) if n != NONE else "outside the steps" for n, _ in failed])
        why = self._why(rows)
        count = sum(len(r) for _, r in failed)
        return Problem("collectives_unpaired", count, f"{self.label()}, step {steps}: {why}; not paired")

    def _in_order(self, process: Int64) -> Int64 | None:
        """The n-th call of each rank with the n-th of the others; None where counts, kinds, sizes or types differ."""
        counts = np.bincount(process)
        counts = counts[counts > 0]
        found = _occurrence(process)
        if (counts != counts[0]).any() or self._disagree(found).any():
            return None
        return found

    def _until_the_end(self, process: Int64, step: int) -> Int64 | None:
        """Like _in_order where the ranks with fewer calls are ones whose recording ends in this step."""
        last = {m.index: m.calls.last_step for m in self.members}
        counts = np.bincount(process)
        shorter = [p for p in np.flatnonzero(counts) if counts[p] < counts.max()]
        if not shorter or any(last.get(int(p)) != step for p in shorter):
            return None
        found = _occurrence(process)
        found = np.where(found < counts[counts > 0].min(), found, NONE)
        return None if self._disagree(found).any() else found

    def _disagree(self, found: Int64) -> Bool:
        """Per local id: do kinds, or sizes and types where they must be equal, differ as far as they are known?"""
        what = self.table.what[self.rows]
        whats = self.table.whats
        types = {t: i for i, t in enumerate(dict.fromkeys(w.dtype for w in whats if w.dtype))}
        kinds = {k: i for i, k in enumerate(dict.fromkeys(w.kind for w in whats))}
        fixed = [w.kind in EQUAL_SIZES for w in whats]
        columns = (
            [kinds[w.kind] if w.kind != "other" else NONE for w in whats],
            [NONE if w.in_elements is None or not f else w.in_elements for w, f in zip(whats, fixed, strict=True)],
            [NONE if w.dtype is None or not f else types[w.dtype] for w, f in zip(whats, fixed, strict=True)],
        )
        paired = found != NONE
        out = np.zeros(int(found.max(initial=-1)) + 1, np.bool_)
        for column in columns:
            value = np.array(column, np.int64)[what]
            known = paired & (value != NONE)
            low, high = np.full(len(out), _LARGEST), np.full(len(out), NONE)
            np.minimum.at(low, found[known], value[known])
            np.maximum.at(high, found[known], value[known])
            out |= (high > low) & (high != NONE)
        return out

    def _example(self, found: Int64, odd: Bool) -> str:
        rows = self.rows[found == np.flatnonzero(odd)[0]]
        told = [f"{self._label(r)}: {_spelled(self.table.whats[self.table.what[r]])}" for r in rows[:SHOWN].tolist()]
        return ", ".join(told)

    def _why(self, rows: Int64) -> str:
        """Counts where they differ, else the first calls that do not go together."""
        part = _Group(self.table, self.members, self.group, self.rows[rows])
        process = self.table.process[part.rows]
        counts = np.bincount(process)
        if len(np.unique(counts[counts > 0])) > 1:
            return f"the ranks recorded different numbers of calls ({part._counts()})"
        found = _occurrence(process)
        odd = part._disagree(found)
        if not odd.any():
            return f"calls on {len(np.unique(process))} of the ranks ({part._counts()}) that no step holds"
        return f"the same place in the order is another operation, size or type on another rank ({part._example(found, odd)})"

    def _counts(self) -> str:
        process = self.table.process[self.rows]
        counts = [(self.table.labels[p], n) for p, n in enumerate(np.bincount(process).tolist()) if n]
        return _listed([f"{label}: {n}" for label, n in counts])

    def _label(self, row: int) -> str:
        return self.table.labels[int(self.table.process[row])]

    def _absent(self, present: Int64) -> list[Problem]:
        """Ranks of the group that have no call here: what the others wait for may be one of these."""
        index = {m.index: m for m in self.members}
        mine = {index[p].process.rank for p in present.tolist()}
        role = index[int(present[0])].process.role
        peers = {m.process.rank for m in self.members if m.process.role == role}
        if self.about.ranks is not None:
            absent = [r for r in self.about.ranks if r not in mine]
        else:
            absent = sorted(r for r in peers if r is not None and r not in mine)
            unknown = (self.about.size or 0) - len(mine) - len(absent)
            if unknown > 0:
                absent = []
                detail = f"{self.label()}: {len(mine)} of {self.about.size} ranks recorded it: waits are lower bounds"
                return [Problem("collectives_incomplete", len(self.rows), detail)]
        if not absent:
            return []
        files = [r for r in absent if r in peers]
        where = "recorded no call of it" if files else "not in the folder"
        alone = len(mine) == 1
        result = "not paired" if alone else "the others' waits are lower bounds"
        detail = f"{self.label()}: rank {_listed([str(r) for r in absent])} {where}: {result}"
        return [Problem("collectives_incomplete", len(self.rows), detail)]


def _occurrence(*keys: Int64) -> Int64:
    """How many earlier rows have the same keys."""
    order = np.lexsort((np.arange(len(keys[0])), *reversed(keys)))
    new = np.zeros(len(order), np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order][1:] != key[order][:-1]
    place = np.arange(len(order))
    nth = np.zeros(len(order), np.int64)
    nth[order] = place - np.maximum.accumulate(np.where(new, place, 0))
    return nth


def _spelled(what: What) -> str:
    size = "" if what.in_elements is None else f" of {what.in_elements}"
    return f"{what.kind}{size}{f' {what.dtype}' if what.dtype else ''}"


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
