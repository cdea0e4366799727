"""The demo on NeMo-RL's own loop: what it refuses, and, where a checkout and its environment are named, that it finds the planted fault."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tracetools.cli import main
from tracetools.demo.nemo_rl_run import run_nemo_rl
from tracetools.errors import UsageError

CHECKOUT, PYTHON = os.environ.get("TRACETOOLS_NEMO_RL"), os.environ.get("TRACETOOLS_NEMO_RL_PYTHON")


def checkout(folder: Path) -> Path:
    """Something with the outline of NeMo-RL, and nothing in it."""
    (folder / "nemo_rl" / "algorithms").mkdir(parents=True)
    (folder / "nemo_rl" / "algorithms" / "sft.py").touch()
    return folder


def test_a_folder_without_nemo_rl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no checkout of NeMo-RL: it has no nemo_rl/algorithms/sft\.py\. Nothing was started"
    ):
        run_nemo_rl(tmp_path / "out", tmp_path, sys.executable, 1.0)
    assert not (tmp_path / "out").exists()


def test_an_environment_without_nemo_rls_libraries_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nemo_rl" / "nemo_rl").mkdir(parents=True)
    broken = checkout(tmp_path / "c")
    (broken / "nemo_rl" / "algorithms" / "sft.py").write_text("import no_such_library")
    with pytest.raises(UsageError, match="NeMo-RL cannot be imported there: ModuleNotFoundError"):
        run_nemo_rl(tmp_path / "out", broken, sys.executable, 1.0)
    with pytest.raises(UsageError, match=r"--python no/such/python: cannot be run: No such file or directory"):
        run_nemo_rl(tmp_path / "out", broken, "no/such/python", 1.0)
    assert not (tmp_path / "out").exists()


def test_only_data_processing_can_be_planted(tmp_path: Path) -> None:
    shown = CliRunner().invoke(
        main, ["demo", "--nemo-rl", str(tmp_path), "--plant", "forward:4", "--out", str(tmp_path / "out")]
    )
    assert shown.exit_code == 2
    assert "only data_processing:MS can be planted" in shown.output


@pytest.mark.skipif(
    not (CHECKOUT and PYTHON),
    reason="TRACETOOLS_NEMO_RL and TRACETOOLS_NEMO_RL_PYTHON name no checkout and environment",
)
def test_the_fault_is_found_in_nemo_rls_own_loop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = CliRunner().invoke(main, ["demo", "--nemo-rl", str(CHECKOUT), "--python", str(PYTHON), "--out", str(out)])

    assert shown.exit_code == 0, shown.output
    diff = json.loads((out / "diff.json").read_text())
    (row,) = [r for r in diff["waterfall"] if r["part"] == "idle" and r["region"] == "data_processing"]
    assert row["process"] == "driver"
    assert row["delta_ns"] == pytest.approx(40e6, rel=0.1)
    assert diff["a"]["tokens_per_step"] == diff["b"]["tokens_per_step"] > 0
