"""The difference between two runs, explained.

In: two analysed runs. Out: `Diff`: means per step, a waterfall of signed parts that sums to the step difference to the
nanosecond, kernel classes split into count and duration effects, per-token figures, comparability, coverage, a verdict.
A step's figures are means over ranks; a run's are means over the steps used. Means are rounded to whole nanoseconds so that
parts still sum (largest remainder). Intervals: 95 %, percentile bootstrap over steps (Efron 1979), fixed seed.
Knows nothing of files and formats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tracetools.chains import UNPAIRED
from tracetools.diff_records import ClassDelta, Diff, PerToken, Row, StepDelta
from tracetools.match import Matched, RunStep, match, working
from tracetools.model import Coverage, KernelClass, RunBreakdown, StepBreakdown
from tracetools.verdict import comparability, sentence, side, verdict

RESAMPLES = 2000
SEED = 20260101
Key = tuple[str, str | None, str | None, str | None]  # part, process, region, kind


def diff(a: RunBreakdown, b: RunBreakdown, *, skip: int = 0) -> Diff:
    """B against A. Raises TracetoolsError where a side has no step to compare."""
    matched = match(a, b, skip)
    split = _is_split(matched)
    keys = _keys(matched, split)
    table_a, table_b = _table(matched.a, keys, split), _table(matched.b, keys, split)
    waterfall, step = _waterfall(keys, table_a, table_b, _bootstrap(table_a, table_b))
    side_a, side_b = side(a, matched.a), side(b, matched.b)
    per_token = _per_token(matched)
    found = verdict(step)
    return Diff(
        verdict=found,
        sentence=sentence(found, step, waterfall, per_token),
        a=side_a,
        b=side_b,
        comparability=comparability(a, b, side_a, side_b),
        pairing=matched.how,
        step=step,
        per_token=per_token,
        waterfall=waterfall,
        kernel_classes=_classes(a, b),
        noise_ns=_noise(table_a, table_b),
        coverage=(_coverage(a), _coverage(b)),
        problems=tuple((which, p) for which, run in (("a", a), ("b", b)) for p in run.all_problems),
    )


# ---------------------------------------------------------------- steps as a table of parts


def _parts(step: StepBreakdown, split: bool) -> dict[Key, int]:
    """The step's wall, cut into the waterfall's parts; they sum to it. `split`: communication by what was waited for."""
    parts: dict[Key, int] = {("compute", None, None, None): step.compute_ns}
    if split:
        for c in step.comm_causes:
            parts["exposed_comm", c.process, c.region, c.kind] = c.ns
    else:
        parts["exposed_comm", None, None, None] = step.exposed_comm_ns
    parts["exposed_memory", None, None, None] = step.exposed_memory_ns
    for c in step.causes:
        process = "driver" if c.process == "driver" else None if c.process is None else "rank"
        key = ("idle", process, c.region, c.kind)
        parts[key] = parts.get(key, 0) + c.ns
    return parts


def _is_split(matched: Matched) -> bool:
    """Are the collectives of both sides paired across ranks, so that waiting on one can be held against waiting on the other?"""
    return all(
        any(c.kind != UNPAIRED for step in steps for rank in step.ranks for c in rank.comm_causes)
        for steps in (matched.a, matched.b)
    )


def _keys(matched: Matched, split: bool) -> list[Key]:
    keys = {k: None for step in (*matched.a, *matched.b) for rank in step.ranks for k in _parts(rank, split)}
    return list(keys)


def _table(steps: Sequence[RunStep], keys: Sequence[Key], split: bool) -> list[list[Fraction]]:
    """One row per step: the mean over ranks of each part, exact."""
    rows = []
    for step in steps:
        total: dict[Key, int] = defaultdict(int)
        for rank in step.ranks:
            for key, ns in _parts(rank, split).items():
                total[key] += ns
        rows.append([Fraction(total[k], len(step.ranks)) for k in keys])
    return rows


def _means(table: list[list[Fraction]]) -> list[int]:
    """Column means in whole ns that sum to the rounded mean of the row sums (largest remainder)."""
    exact = [sum(column, Fraction(0)) / len(table) for column in zip(*table, strict=True)]
    floors = [int(x // 1) for x in exact]
    missing = round(sum(exact, Fraction(0))) - sum(floors)
    order = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    for i in order[:missing]:
        floors[i] += 1
    return floors


# ---------------------------------------------------------------- intervals

Samples = NDArray[np.float64]  # (RESAMPLES, parts): resampled mean of B minus resampled mean of A, per part, ns


def _bootstrap(a: list[list[Fraction]], b: list[list[Fraction]]) -> Samples | None:
    """None where a side has a single step: nothing is known about its spread."""
    if min(len(a), len(b)) < 2:
        return None
    rng = np.random.default_rng(SEED)
    mean_a, mean_b = (_resampled(np.array(t, np.float64), rng) for t in (a, b))
    return mean_b - mean_a


def _resampled(table: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    picks = rng.integers(0, len(table), (RESAMPLES, len(table)))
    weights = np.apply_along_axis(np.bincount, 1, picks, minlength=len(table)) / len(table)
    return np.asarray(weights @ table, np.float64)


def _interval(values: NDArray[np.float64]) -> tuple[int, int]:
    low, high = np.percentile(values, [2.5, 97.5])
    return round(float(low)), round(float(high))


def _noise(a: list[list[Fraction]], b: list[list[Fraction]]) -> int | None:
    """Standard deviation of a step, the larger of the two sides, ns."""
    if min(len(a), len(b)) < 2:
        return None
    return round(max(float(np.std([float(sum(row)) for row in t], ddof=1)) for t in (a, b)))


# ---------------------------------------------------------------- figures


def _waterfall(
    keys: Sequence[Key], a: list[list[Fraction]], b: list[list[Fraction]], samples: Samples | None
) -> tuple[tuple[Row, ...], StepDelta]:
    mean_a, mean_b = _means(a), _means(b)
    rows = [
        Row(*key, x, y, y - x, _interval(samples[:, i]) if samples is not None else None)
        for i, (key, x, y) in enumerate(zip(keys, mean_a, mean_b, strict=True))
    ]
    order = {"compute": 0, "exposed_comm": 1, "exposed_memory": 2, "idle": 3}
    rows.sort(key=lambda r: (order[r.part], -abs(r.delta_ns), -max(r.a_ns, r.b_ns), r.region or "", r.kind or ""))
    total_a, total_b = sum(mean_a), sum(mean_b)
    step = StepDelta(
        a=total_a,
        b=total_b,
        delta=total_b - total_a,
        ratio=total_b / total_a if total_a else None,
        interval=_interval(samples.sum(axis=1)) if samples is not None else None,
    )
    if sum(r.delta_ns for r in rows) != step.delta:
        raise AssertionError("the waterfall does not sum to the step difference")
    return tuple(rows), step


def _per_token(matched: Matched) -> PerToken | None:
    """ns of a rank's step per token of that rank, over all steps used."""
    pairs = []
    for steps in (matched.a, matched.b):
        tokens = [s.tokens for s in steps]
        if any(not t for t in tokens):
            return None
        walls = [sum(r.wall_ns for r in s.ranks) / len(s.ranks) for s in steps]
        pairs.append((np.array(walls), np.array(tokens, np.float64)))
    (wall_a, tokens_a), (wall_b, tokens_b) = pairs
    value_a, value_b = float(wall_a.sum() / tokens_a.sum()), float(wall_b.sum() / tokens_b.sum())
    interval = None
    if min(len(wall_a), len(wall_b)) >= 2:
        rng = np.random.default_rng(SEED)
        pick_a, pick_b = (rng.integers(0, len(w), (RESAMPLES, len(w))) for w in (wall_a, wall_b))
        per_a = wall_a[pick_a].sum(1) / tokens_a[pick_a].sum(1)
        per_b = wall_b[pick_b].sum(1) / tokens_b[pick_b].sum(1)
        low, high = np.percentile(per_b / per_a, [2.5, 97.5])
        interval = float(low), float(high)
    return PerToken(value_a, value_b, value_b / value_a, interval)


def _classes(a: RunBreakdown, b: RunBreakdown) -> tuple[ClassDelta, ...]:
    """Per recorded step and rank. `delta = (count_b - count_a) x mean_a + count_b x (mean_b - mean_a)`."""
    rows_a, rows_b = _class_means(a), _class_means(b)
    out = []
    for name in dict.fromkeys((*rows_a, *rows_b)):
        count_a, total_a = rows_a.get(name, (Fraction(0), Fraction(0)))
        count_b, total_b = rows_b.get(name, (Fraction(0), Fraction(0)))
        in_a, in_b = round(total_a), round(total_b)
        # a class that A lacks has no mean duration there: its whole time comes from its count
        from_count = round((count_b - count_a) * (total_a / count_a)) if count_a else in_b
        delta = in_b - in_a
        out.append(ClassDelta(name, float(count_a), float(count_b), in_a, in_b, delta, from_count, delta - from_count))
    return tuple(sorted(out, key=lambda c: (-abs(c.delta_ns), c.name)))


def _class_means(run: RunBreakdown) -> dict[str, tuple[Fraction, Fraction]]:
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    processes = working(run)
    steps = sum(len(p.steps) for p in processes)
    row: KernelClass
    for process in processes:
        for row in process.kernel_classes:
            total[row.name][0] += row.count
            total[row.name][1] += row.total_ns
    return {name: (Fraction(n, steps), Fraction(ns, steps)) for name, (n, ns) in total.items()}


def _coverage(run: RunBreakdown) -> Coverage:
    rows = [p.coverage for p in working(run)]
    return Coverage(
        linked_ns=sum(c.linked_ns for c in rows),
        unlinked_ns=sum(c.unlinked_ns for c in rows),
        outside_steps_ns=sum(c.outside_steps_ns for c in rows),
        idle_explained_ns=sum(c.idle_explained_ns for c in rows),
    )
