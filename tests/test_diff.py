"""The diff: a waterfall that sums to the step difference, pairing by tokens, count and duration effects, verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import Event, kernel, launch, region, step, write

from tracetools.analysis import analyze
from tracetools.diff import diff
from tracetools.diff_records import Diff
from tracetools.errors import TracetoolsError
from tracetools.load import load_run
from tracetools.model import Card, RunBreakdown


def run(tmp_path: Path, name: str, events: list[Event], tokens: list[int] | None = None, rank: int = 0) -> RunBreakdown:
    result = analyze(load_run(write(tmp_path / f"{name}.json", events, rank=rank)))
    if tokens is None:
        return result
    process = result.processes[0]
    steps = tuple(replace(s, card=Card(tokens=t)) for s, t in zip(process.steps, tokens, strict=True))
    return replace(result, processes=(replace(process, steps=steps),))


def steady(walls: list[float], busy: float, idle_region: str = "data_processing", count: int = 1) -> list[Event]:
    """Steps that begin with `idle_region` on the host and end with `count` gemms of `busy` us in all."""
    events: list[Event] = []
    at, corr = 0.0, 1
    for number, wall in enumerate(walls):
        events += [step(number, at, wall), region(idle_region, at, wall - busy)]
        for i in range(count):
            start = at + wall - busy + i * busy / count
            events += [launch(start, corr, 0.5), kernel("gemm", start, busy / count, corr)]
            corr += 1
        at += wall
    return events


def rows(d: Diff) -> dict[tuple[str, str | None, str | None], float]:
    """us by (part, process, region), without empty ones."""
    return {(r.part, r.process, r.region): r.delta_ns / 1000 for r in d.waterfall if r.delta_ns}


def test_the_waterfall_sums_to_the_step_difference(tmp_path: Path) -> None:
    # A: 100 us, 60 of them compute; B: 150 us, 70 of them compute; the rest is data processing
    d = diff(run(tmp_path, "a", steady([100] * 4, 60)), run(tmp_path, "b", steady([150] * 4, 70)))

    assert (d.step.a, d.step.b, d.step.delta) == (100_000, 150_000, 50_000)
    assert rows(d) == {("compute", None, None): 10, ("idle", "rank", "data_processing"): 40}
    assert sum(r.delta_ns for r in d.waterfall) == d.step.delta
    assert (d.verdict, d.step.interval) == ("slower", (50_000, 50_000))
    assert d.sentence == (
        "B is slower by 0.05 ms per step (1.50x), 0.10 -> 0.15 ms: mostly data_processing +0.04 ms, compute +0.01 ms."
    )


def test_means_that_are_no_whole_nanoseconds_still_sum(tmp_path: Path) -> None:
    # three steps of 100.000, 100.001 and 100.001 us: the mean is 100000.67 ns
    odd = run(tmp_path, "a", steady([100, 100.001, 100.001], 33.333))
    d = diff(odd, run(tmp_path, "b", steady([100.002] * 7, 41.111, "setup")))

    assert d.step.a == 100_001
    assert sum(r.a_ns for r in d.waterfall) == d.step.a
    assert sum(r.b_ns for r in d.waterfall) == d.step.b == 100_002
    assert sum(r.delta_ns for r in d.waterfall) == d.step.delta == 1


def test_more_kernels_and_slower_kernels_are_told_apart(tmp_path: Path) -> None:
    # A: 2 gemms of 30 us a step; B: 3 of 40 us. Count: 1 x 30 = 30; duration: 3 x 10 = 30
    d = diff(run(tmp_path, "a", steady([100] * 3, 60, count=2)), run(tmp_path, "b", steady([160] * 3, 120, count=3)))
    (gemm,) = d.kernel_classes

    assert (gemm.count_a, gemm.count_b) == (2, 3)
    assert (gemm.delta_ns, gemm.from_count_ns, gemm.from_duration_ns) == (60_000, 30_000, 30_000)


def test_a_class_that_only_one_side_has_comes_from_its_count(tmp_path: Path) -> None:
    other = [dict(e, name="softmax_kernel") if e["cat"] == "kernel" else e for e in steady([100] * 3, 50)]
    d = diff(run(tmp_path, "a", steady([100] * 3, 60)), run(tmp_path, "b", other))

    assert {c.name: (c.delta_ns, c.from_count_ns, c.from_duration_ns) for c in d.kernel_classes} == {
        "gemm": (-60_000, -60_000, 0),
        "softmax": (50_000, 50_000, 0),
    }


def test_steps_are_paired_by_nearest_tokens(tmp_path: Path) -> None:
    a = run(tmp_path, "a", steady([100, 200, 300], 60), [1000, 2000, 3000])
    b = run(tmp_path, "b", steady([330, 110, 500], 60), [3100, 1000, 9000])
    d = diff(a, b)

    # 1000 with 1000 and 3000 with 3100; 9000 has no partner within 5 %
    assert (d.a.steps, d.b.steps) == (("ProfilerStep#0", "ProfilerStep#2"), ("ProfilerStep#1", "ProfilerStep#0"))
    assert d.pairing == "2 of 3 and 3 steps paired by nearest tokens (within 5%)"
    assert (d.step.a, d.step.b) == (200_000, 220_000)
    assert d.per_token is not None
    assert (d.per_token.a, d.per_token.b) == (400_000 / 4000, 440_000 / 4100)


def test_without_a_pair_all_steps_are_used_and_that_is_said(tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", steady([100] * 2, 60), [1000] * 2), run(tmp_path, "b", steady([200] * 2, 60), [2000] * 2)
    d = diff(a, b)

    assert "no two steps have token counts within 5%" in d.pairing
    assert d.per_token is not None
    assert d.per_token.ratio == 1.0


def test_without_tokens_nothing_is_said_per_token(tmp_path: Path) -> None:
    d = diff(run(tmp_path, "a", steady([100] * 2, 60)), run(tmp_path, "b", steady([200] * 2, 60)))

    assert d.per_token is None
    assert "token counts unknown" in d.pairing


@pytest.mark.parametrize(
    ("walls_a", "walls_b", "verdict"),
    [
        ([100, 101, 99, 100], [150, 151, 149, 150], "slower"),
        ([150, 151, 149, 150], [100, 101, 99, 100], "faster"),
        ([100.1, 100.0, 99.9, 100.0], [100.0, 100.1, 100.0, 100.0], "no difference"),
        ([100, 180, 90, 120], [110, 95, 190, 120], "inconclusive"),
        ([100], [150], "inconclusive"),
        ([100], [100], "no difference"),
        ([100, 100], [100], "no difference"),
    ],
)
def test_verdict(tmp_path: Path, walls_a: list[float], walls_b: list[float], verdict: str) -> None:
    d = diff(run(tmp_path, "a", steady(walls_a, 60)), run(tmp_path, "b", steady(walls_b, 60)))

    assert d.verdict == verdict


def test_one_step_has_no_interval(tmp_path: Path) -> None:
    d = diff(run(tmp_path, "a", steady([100], 60)), run(tmp_path, "b", steady([150], 60)))

    assert d.step.interval is None
    assert d.noise_ns is None
    assert all(r.interval is None for r in d.waterfall)
    assert "a single step on a side says nothing about noise" in d.sentence


def test_the_same_comparison_gives_the_same_interval(tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", steady([100, 120, 90], 60)), run(tmp_path, "b", steady([150, 170, 160], 60))

    assert diff(a, b) == diff(a, b)


def test_skipping_warm_up(tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", steady([900, 100, 100], 60)), run(tmp_path, "b", steady([100, 100, 100], 60))

    assert diff(a, b, skip=1).step.delta == 0
    with pytest.raises(TracetoolsError, match=r"a\.json: no steps are left after skipping 3"):
        diff(a, b, skip=3)


def test_what_makes_two_runs_hard_to_compare_is_named(tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", steady([100] * 2, 60)), run(tmp_path, "b", steady([100] * 3, 60), rank=1)
    b = replace(b, processes=(replace(b.processes[0], device="Other GPU", world_size=8),), profiler=("with_stack",))

    assert {(c.what, c.a, c.b, c.severity) for c in diff(a, b).comparability} == {
        ("device", "Test GPU", "Other GPU", "warning"),
        ("world size", "1", "8", "warning"),
        ("ranks compared", "0", "1", "warning"),
        ("profiler options", "none", "with_stack", "warning"),
        ("steps", "2", "3", "note"),
    }


def test_a_rank_that_is_twice_as_slow_counts_as_one_of_two(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    write(folder / "rank-0.json", steady([100] * 2, 60), rank=0, world=2)
    write(folder / "rank-1.json", steady([200] * 2, 60), rank=1, world=2)
    d = diff(run(tmp_path, "a", steady([100] * 2, 60)), analyze(load_run(folder)))

    assert d.step.b == 150_000
    assert d.b.ranks == (0, 1)
