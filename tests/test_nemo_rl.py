"""The profile nemo_rl on NeMo-RL's real SFT loop: a driver and two workers on a CPU.

Needs a checkout of NeMo-RL beside the project and a Python that has what it imports (docs/profiles.md lists the packages):
TRACETOOLS_NEMO_RL names the checkout, TRACETOOLS_NEMO_RL_PYTHON that Python.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tracetools.analysis import analyze, compare
from tracetools.cli import main
from tracetools.collect.launch import collect
from tracetools.demo import nemo_rl_run
from tracetools.load import load_run
from tracetools.model import Category, Run
from tracetools.stackprofile import load_profile

CHECKOUT, PYTHON = os.environ.get("TRACETOOLS_NEMO_RL", ""), os.environ.get("TRACETOOLS_NEMO_RL_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(
        not (CHECKOUT and PYTHON), reason="TRACETOOLS_NEMO_RL and TRACETOOLS_NEMO_RL_PYTHON do not name a NeMo-RL"
    ),
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("nemo_rl"),  # they share two runs
]
LOOP = nemo_rl_run.FOLDER
STEPS, FIRST, STOP, PLANTED_MS = 8, 3, 6, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, int]]]:
    """Two run folders, "as it is" and "planted", each with the tokens that the loop printed per step (from 0)."""
    folder = tmp_path_factory.mktemp("nemo_rl")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([CHECKOUT, str(LOOP)]))
        patch.setenv("KINETO_LOG_LEVEL", "6")
        patch.setenv("RAY_ADDRESS", "local")  # NeMo-RL would join any cluster that it finds
        for name, arguments in (("as it is", []), ("planted", [str(PLANTED_MS)])):
            out, log = folder / name, folder / f"{name}.log"
            # collect's child writes to the real standard output, which pytest's capture replaces
            script = f"exec {PYTHON} {LOOP / 'loop.py'} {STEPS} {' '.join(arguments)} > '{log}' 2>&1"
            result = collect(["sh", "-c", script], out, load_profile("nemo-rl"), FIRST, STOP)
            assert result.exit_code == 0, log.read_text()[-2000:]
            printed = re.findall(r"^step (\d+) loss \S+ tokens (\d+)", log.read_text(), re.MULTILINE)
            found[name] = out, {int(step) - 1: int(tokens) for step, tokens in printed}
    return found


@pytest.fixture(scope="module")
def run(runs: dict[str, tuple[Path, dict[int, int]]]) -> Run:
    return load_run(runs["as it is"][0])


def test_driver_and_workers_record_the_same_steps(run: Run) -> None:
    steps = {
        p.label: [n for i in p.trace.events.name if (n := p.trace.names[i]).startswith("tracetools.step#")]
        for p in run.processes
    }

    wanted = [f"tracetools.step#{n}" for n in range(FIRST, STOP)]
    assert steps == {"driver": wanted, "policy 0": wanted, "policy 1": wanted}


def test_what_nemo_rl_names_is_in_the_traces(run: Run) -> None:
    driver, *workers = (
        {p.trace.names[n] for n in p.trace.events.name[p.trace.events.where(Category.USER_ANNOTATION)]}
        for p in run.processes
    )

    assert {
        *("total_step_time", "data_processing", "policy_training", "policy_training/sharding_data", "Policy.train"),
        *("policy_training/submit_training_futures", "RayWorkerGroup.run_all_workers_sharded_data"),
        *("RayWorkerGroup.get_all_worker_results", "add_loss_mask_to_message_log", "shard_by_batch_size"),
        *("ray_submit", "ray_wait"),
    } <= driver
    for worker in workers:
        assert {"actor/train", "megatron_policy_worker/train", "train"} <= worker


def test_regions_of_the_breakdown(run: Run) -> None:
    of_driver = ("data_processing", "sharding", "ray_submit", "ray_wait", "between_steps")
    for process in analyze(run).processes[1:]:
        causes = {(cause.process, cause.region) for step in process.steps for cause in step.causes}
        assert process.steps_from == "the driver's annotation tracetools.step#N"
        assert {*(("driver", region) for region in of_driver), ("policy", "train")} <= causes


def test_cards_hold_the_tokens_that_the_loop_prints(runs: dict[str, tuple[Path, dict[int, int]]]) -> None:
    for folder, printed in runs.values():
        driver, *workers = json.loads((folder / "run.json").read_text())["processes"]
        of_driver = {s["number"]: s for s in driver["steps"]}
        assert {n: s["tokens"] for n, s in of_driver.items()} == {n: printed[n] for n in range(FIRST, STOP)}
        for number, card in of_driver.items():
            shards = [s for w in workers for s in w["steps"] if s["number"] == number]
            for key in ("tokens", "padded_tokens", "sequences", "microbatches", "sum_squared_lengths"):
                assert card[key] == sum(s[key] for s in shards)
            assert (card["sequences"], card["microbatches"]) == (8, 4)
            assert "token_mask" in card["sources"]["tokens"]


def test_the_diff_finds_what_was_planted(runs: dict[str, tuple[Path, dict[int, int]]]) -> None:
    a, b = (analyze(load_run(folder)) for folder, _ in runs.values())
    found = compare(a, b)
    idle = {(row.process, row.region): row.delta_ns for row in found.waterfall if row.part == "idle"}

    # sleep() lasts at least as long as it is asked to; 2 ms for what the hooked code itself may take less in b
    assert idle["driver", "data_processing"] >= (PLANTED_MS - 2) * 1_000_000
    assert max(idle, key=lambda who: idle[who]) == ("driver", "data_processing")


def test_every_target_of_this_checkout_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CHECKOUT)
    result = CliRunner().invoke(main, ["profiles", "check", "nemo-rl", "--python", PYTHON, "--json", "-"])
    found: dict[str, Any] = json.loads(result.stdout)

    assert result.exit_code == 0 and found["faults"] == 0
    status = {t["target"]: t["status"] for t in found["targets"]}
    assert status["nemo_rl.utils.timer:Timer.start"] == status["nemo_rl.utils.nsys:wrap_with_nvtx_name"] == "found"
    assert sys.modules.get("nemo_rl") is None  # looked up elsewhere
