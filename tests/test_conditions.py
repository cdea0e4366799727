"""What runs ran under, and what a comparison says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import kernel, launch, step, write

from tracetools.analysis import analyze, compare
from tracetools.conditions import conditions
from tracetools.load import load_run


def run(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    write(folder / "r.json", [step(0, 0, 9), step(1, 10, 9), launch(1, 1), kernel("gemm", 2, 5, 1)])
    process = {"file": "r.json", "role": "rank", "rank": 0, "world_size": 1, "nice": changes.pop("nice", 0)}
    record = {"schema": "tracetools.run/1", "processes": [process], "missing": [], **changes}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_layout_priority_versions_and_environment_are_compared(tmp_path: Path) -> None:
    one = run(
        tmp_path / "a",
        parallel={"tp": 2, "pp": 1},
        versions={"torch": "2.13.0", "ray": "2.60.0"},
        environment={"OMP_NUM_THREADS": "1"},
    )
    two = run(tmp_path / "b", parallel={"tp": 1, "pp": 1}, versions={"torch": "2.13.0"}, environment={}, nice=15)
    found = compare(analyze(load_run(one)), analyze(load_run(two))).comparability

    # ray is in one run's record only: a library that the other did not import is no difference. An unset variable is one.
    assert [(c.what, c.a, c.b, c.severity) for c in found] == [
        ("parallel layout", "tp2 pp1", "tp1 pp1", "warning"),
        ("scheduling priority (nice)", "0", "15", "warning"),
        ("environment: OMP_NUM_THREADS", "1", None, "note"),
    ]


def test_a_run_without_a_record_differs_in_nothing_that_is_known(tmp_path: Path) -> None:
    recorded = analyze(load_run(run(tmp_path / "a", parallel={"tp": 2})))
    plain = analyze(load_run(run(tmp_path / "b") / "r.json"))

    assert compare(recorded, plain).comparability == ()


@pytest.mark.parametrize(
    "record", [{}, {"parallel": 3, "processes": [7, {"nice": "x"}], "versions": None, "environment": []}]
)
def test_odd_records_say_nothing(record: dict[str, object]) -> None:
    assert conditions(record) == ()
