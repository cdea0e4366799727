"""The command line as a user meets it: real processes, exit statuses, messages without tracebacks, files that are whole."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import kernel, launch, region, step, write

COMMAND = [sys.executable, "-m", "tracetools"]


def tracetools(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture
def a(tmp_path: Path) -> Path:
    events = [
        e
        for i in range(3)
        for e in (step(i, 100 * i, 100), launch(100 * i, i + 1), kernel("gemm", 100 * i + 20, 50, i + 1))
    ]
    return write(tmp_path / "a.json", events)


@pytest.fixture
def b(tmp_path: Path) -> Path:
    events = [
        e
        for i in range(3)
        for e in (
            step(i, 150 * i, 150),
            region("setup", 150 * i, 60),
            launch(150 * i + 60, i + 1),
            kernel("gemm", 150 * i + 80, 60, i + 1),
        )
    ]
    return write(tmp_path / "b.json.gz", events)


def test_breakdown_json(a: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = tracetools("breakdown", a, "--json", out)
    document = json.loads(out.read_text())
    (process,) = document["processes"]

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert document["schema"] == "tracetools.breakdown/1"
    assert [s["name"] for s in process["steps"]] == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    # launched at 0, runs 20-70 of 0-100: 20 us of launch latency before it, 30 us of host time after it
    assert process["steps"][0]["idle_causes"] == [
        {"process": "rank", "region": None, "kind": "host", "ns": 30000},
        {"process": "rank", "region": None, "kind": "launch_latency", "ns": 20000},
    ]


def test_json_on_standard_output_is_json_only(a: Path, b: Path) -> None:
    for arguments in (("breakdown", a), ("diff", a, b)):
        done = tracetools(*arguments, "--json", "-")
        assert json.loads(done.stdout)["schema"].startswith("tracetools.")


def test_diff_prints_an_answer_and_writes_the_same(a: Path, b: Path, tmp_path: Path) -> None:
    out = tmp_path / "diff.json"
    done = tracetools("diff", a, b, "--json", out)
    document = json.loads(out.read_text())

    assert done.returncode == 0
    assert " ".join(done.stdout.split()).startswith(document["sentence"])
    assert document["step_ns"]["delta"] == sum(row["delta_ns"] for row in document["waterfall"])
    assert {row["region"]: row["delta_ns"] for row in document["waterfall"] if row["region"] == "setup"} == {
        "setup": 60000
    }


@pytest.mark.parametrize("columns", ["200", "60", "20"])
def test_no_width_cuts_a_number(a: Path, b: Path, columns: str) -> None:
    environment = {**os.environ, "COLUMNS": columns, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(
        [*COMMAND, "diff", str(a), str(b)], capture_output=True, text=True, check=True, env=environment
    )

    for number in ("0.100", "0.150", "+0.050", "+0.060"):  # the steps, their difference, setup
        assert number in done.stdout


def test_export_is_one_file_that_a_strict_parser_reads(a: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    done = tracetools("export", a, "-o", out)
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    slices = [(e["name"], e["ts"]) for e in events if e["ph"] == "X"]

    # 3 steps, 3 launches and 3 kernels of the file; 3 steps and, of each, host time and launch latency of ours
    assert len(slices) == 9 + 3 + 6
    assert done.stdout == f"{out}: 18 slices, 0 arrows. Open it at https://ui.perfetto.dev\n"
    assert {name for name, _ in slices} == {
        "ProfilerStep#0",
        "ProfilerStep#1",
        "ProfilerStep#2",
        "cudaLaunchKernel",
        "gemm",
        "host",
        "launch_latency",
    }


def test_names_from_a_trace_are_never_markup_or_control_codes(tmp_path: Path) -> None:
    evil = "[bold red]\x1b[31m\nname[/]"
    done = tracetools(
        "breakdown",
        write(
            tmp_path / "e.json", [kernel("gemm", 0, 5), region(evil, 5, 10), launch(20, 1), kernel("gemm", 25, 5, 1)]
        ),
    )

    assert "[bold red]\\x1b[31m\\nname[/]" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["breakdown", "gone.json"], 1, "gone.json: no such file or folder"),
        (["diff", "empty.json", "empty.json"], 1, "empty.json: is empty"),
        (["info", "folder"], 1, "folder: no traces in this folder"),
        (["breakdown", "empty.json", "--profile", "nothing"], 1, "empty.json"),
        (["breakdown"], 2, "Missing argument 'TRACE'"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["collect", "--out", "r", "--steps", "6:3", "--", "true"], 2, "FIRST:STOP"),
        (["collect", "--out", "folder2", "--", "true"], 2, "folder2: the output folder is not empty"),
        (["collect", "--out", "r", "--profile", "nothing", "--", "true"], 2, "no stack profile named 'nothing'"),
        (["collect", "--out", "r", "--", "./no-such-command"], 2, "cannot be run: No such file"),
    ],
)
def test_errors_are_one_clear_message(tmp_path: Path, arguments: list[str], status: int, says: str) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder2").mkdir()
    (tmp_path / "folder2" / "precious").touch()
    done = tracetools(*arguments, cwd=tmp_path)

    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_file_that_cannot_be_written_leaves_nothing_behind(a: Path, tmp_path: Path) -> None:
    done = tracetools("breakdown", a, "--json", tmp_path / "no" / "such" / "folder.json")

    assert done.returncode == 1
    assert "folder.json: cannot be written" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json"]


HEAVY = {"torch", "pandas", "hta", "plotly", "ray", "megatron"}


@pytest.mark.parametrize(
    "code",
    [
        "import tracetools",
        "import tracetools; tracetools.step(); tracetools.region('x')",
        "from click.testing import CliRunner; from tracetools.cli import main; assert CliRunner().invoke(main, ['--help']).exit_code == 0",
        "import tracetools; tracetools.load_run; tracetools.analyze; tracetools.compare",
    ],
)
def test_start_up_loads_nothing_heavy(code: str) -> None:
    report = f"{code}\nimport sys\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import tracetools

    for name in tracetools.__all__:
        assert getattr(tracetools, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tracetools.nothing  # noqa: B018
