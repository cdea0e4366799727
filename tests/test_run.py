"""Folders and runs: order, clocks, what is missing, double or unreadable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import kernel, write

from tracetools.errors import TracetoolsError
from tracetools.load import load_run
from tracetools.model import Card, Run


def kinds(run: Run) -> dict[str, str]:
    return {p.kind: p.detail for p in run.problems}


def ranks(run: Run) -> list[int | None]:
    return [p.rank for p in run.processes]


def test_a_folder_is_ordered_by_rank_number(tmp_path: Path) -> None:
    for rank in (11, 3, 0):
        write(tmp_path / f"rank-{rank}.json", [kernel("k", 0, 1)], rank=None)
    (tmp_path / "notes.txt").write_text("not a trace")

    assert ranks(load_run(tmp_path)) == [0, 3, 11]


def test_double_and_missing_ranks_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", [kernel("k", 0, 1)], rank=0, world=3)
    run = load_run(tmp_path)

    assert ranks(run) == [0, 0]
    assert kinds(run) == {
        "duplicate_rank": "rank 0 in 2 files, each analysed on its own: a.json, b.json",
        "missing_rank": "rank 1, 2 of world size 3 not in the folder",
    }


def test_one_bad_file_among_good_ones_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "good.json", [kernel("k", 0, 1)])
    (tmp_path / "bad.json").write_text("{}")
    run = load_run(tmp_path)

    assert len(run.processes) == 1
    assert "bad.json: not a trace" in kinds(run)["unreadable_file"]


@pytest.mark.parametrize(("files", "says"), [([], "no traces in this folder"), (["bad.json"], "bad.json: not a trace")])
def test_nothing_to_analyse_is_an_error(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(TracetoolsError, match=says):
        load_run(tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TracetoolsError, match="no such file or folder"):
        load_run(tmp_path / "gone")


def test_files_share_a_clock_through_their_base(tmp_path: Path) -> None:
    # the same instant: 5 us after a base of 10^18 ns, 1 us after a base 4 us later
    write(tmp_path / "rank-0.json", [kernel("k", 5, 1)], baseTimeNanoseconds=10**18)
    write(tmp_path / "rank-1.json", [kernel("k", 1, 1), kernel("k", 3, 1)], rank=1, baseTimeNanoseconds=10**18 + 4000)
    run = load_run(tmp_path)

    assert run.origin_ns == 10**18 + 5000
    assert [p.trace.events.start.tolist() for p in run.processes] == [[0], [0, 2000]]


def test_a_clock_that_cannot_be_placed_is_said(tmp_path: Path) -> None:
    for rank, base in enumerate((10**18, 10**18, 0)):
        write(tmp_path / f"rank-{rank}.json", [kernel("k", 5, 1)], rank=rank, baseTimeNanoseconds=base)
    run = load_run(tmp_path)

    assert [p.clock_placed for p in run.processes] == [True, True, False]
    assert kinds(run)["clock"].endswith("rank-2.json")


def record(folder: Path, **changes: object) -> None:
    steps = [{"number": 3, "tokens": 512, "sequences": None}]
    entry = {"file": "w.json", "role": "policy", "rank": 1, "world_size": 2, "host": "h", "pid": 7, "steps": steps}
    run = {"schema": "tracetools.run/1", "profile": "ray", "processes": [entry], "missing": [], **changes}
    (folder / "run.json").write_text(json.dumps(run))


def test_run_json_says_who_is_who_and_what_was_worked_on(tmp_path: Path) -> None:
    write(tmp_path / "w.json", [kernel("k", 0, 1)], rank=None)
    write(tmp_path / "not in the record.json", [kernel("k", 0, 1)])
    record(tmp_path)
    run = load_run(tmp_path)
    (process,) = run.processes

    assert (process.role, process.rank, process.world_size, process.host, process.pid) == ("policy", 1, 2, "h", 7)
    assert process.cards == {3: Card(tokens=512)}
    assert run.stack == "ray"


def test_what_run_json_misses_is_named(tmp_path: Path) -> None:
    write(tmp_path / "w.json", [kernel("k", 0, 1)], rank=None)
    record(tmp_path, missing=[{"role": "policy", "rank": 0, "pid": 6, "why": "was killed"}])

    assert kinds(load_run(tmp_path))["missing_process"] == "policy 0 (pid 6): was killed"

    (tmp_path / "w.json").unlink()
    with pytest.raises(TracetoolsError, match=r"w\.json: named in run\.json, not in the folder"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not valid JSON"), ('{"schema": "tracetools.run/9"}', "key `schema`")]
)
def test_a_broken_run_json_is_an_error_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(TracetoolsError, match=says) as caught:
        load_run(tmp_path)
    assert "run.json" in str(caught.value)


def test_names_in_run_json_cannot_leave_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    write(tmp_path / "w.json", [kernel("k", 0, 1)])
    record(inside)
    text = (inside / "run.json").read_text().replace('"w.json"', '"../w.json"')
    (inside / "run.json").write_text(text)

    with pytest.raises(TracetoolsError, match="not in the folder"):
        load_run(inside)
