"""run.json from what processes leave, the choices of the command line, and what the recorder may tell of a process. Nothing is started."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tracetools" / "collect" / "inject"))  # as in a recorded process

import tracetools_files as files
import tracetools_identity as identity

from tracetools.collect import runfile
from tracetools.collect.options import Choice, ProfilerOptions, Window, parse_activities, parse_ranks, parse_roles
from tracetools.errors import UsageError


def process(number: int, **changed: Any) -> dict[str, Any]:
    """What the recorder of rank `number` leaves."""
    return {
        "file": f"rank-{number}.trace.json.gz",
        "role": "rank",
        "rank": number,
        "world_size": 2,
        "host": "a",
        "pid": 100 + number,
        "ray": None,
        "steps": [{"number": 3}],
        "skipped": [],
        "problems": [],
        "versions": {"torch": "2.13", "python": "3.11"},
        "environment": {"NCCL_ALGO": "Ring"},
        "device": {"name": "H200", "index": number},
        "parallel": {"sizes": {"tp": 2, "dp": 1}, "ranks": {"tp": number, "dp": 0}},
        **changed,
    }


def merged(folder: Path, *processes: dict[str, Any]) -> dict[str, Any]:
    for p in processes:
        (folder / f".process-{p['host']}-{p['pid']}.json").write_text(json.dumps(p))
    return runfile.write_run(folder, {"command": ["x"]}, {"steps": {"first": 3, "stop": 4}})


def test_what_all_processes_share_is_said_once(tmp_path: Path) -> None:
    driver = process(
        9, role="driver", rank=None, versions={"python": "3.11", "ray": "2.60"}, parallel=None, device=None
    )
    record = merged(tmp_path, process(1, environment={"NCCL_ALGO": "Tree"}), process(0), driver)

    assert [p["role"] for p in record["processes"]] == ["driver", "rank", "rank"]
    assert record["versions"] == {"python": "3.11", "ray": "2.60", "torch": "2.13"}
    assert record["environment"] == {}  # they differ
    assert [p["environment"]["NCCL_ALGO"] for p in record["processes"]] == ["Ring", "Ring", "Tree"]
    assert record["hosts"] == [{"host": "a", "gpus": ["H200"]}]
    assert record["parallel"] == {"tp": 2, "dp": 1}
    assert [p["parallel_ranks"] for p in record["processes"]] == [None, {"tp": 0, "dp": 0}, {"tp": 1, "dp": 0}]
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == record


def test_who_is_missing_and_who_was_left_out(tmp_path: Path) -> None:
    (tmp_path / ".recording-a-1.json").write_text(json.dumps({"role": "rank", "rank": 4, "host": "a", "pid": 1}))
    (tmp_path / ".exporting-a-2.json").write_text(json.dumps({"role": "rank", "rank": 5, "host": "a", "pid": 2}))
    (tmp_path / ".exporting-a-3.json").write_text('{"half a')
    record = merged(
        tmp_path,
        process(0),
        process(1, file=None, problems=["the disk is full"]),
        process(2, file=None, not_recorded="rank 2 is not among the chosen ones"),
    )

    assert [(m["rank"], m["why"]) for m in record["missing"]] == [
        (4, "ended while it recorded: killed, or its host is gone"),
        (5, "ended while its trace was being written: killed, or its host is gone"),
        (None, "ended while its trace was being written: killed, or its host is gone"),
        (1, "the disk is full"),
    ]
    assert [(n["rank"], n["why"]) for n in record["not_recorded"]] == [(2, "rank 2 is not among the chosen ones")]


def test_every_key_of_a_run_is_documented(tmp_path: Path) -> None:
    record = merged(tmp_path, process(0), process(1, file=None, not_recorded="because"))
    text = (REPOSITORY / "docs" / "collect.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"[`\"]([a-z_0-9]+)[`\"]", text))

    keys = {*record, *record["processes"][0], *record["hosts"][0], *record["not_recorded"][0]}
    assert keys - {"schema"} <= documented


# ---------------------------------------------------------------- choices


def test_ranks() -> None:
    assert parse_ranks("0,1,4-7") == (0, 1, 4, 5, 6, 7)
    assert parse_ranks(" 3 ,1-2,2") == (1, 2, 3)


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1", "1-", "0-99999999"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks(text)


def test_names_that_are_none() -> None:
    assert (parse_roles("driver,policy"), parse_activities("cpu")) == (("driver", "policy"), ("cpu",))
    with pytest.raises(UsageError, match=r"--roles worker: there is no 'worker'\. There is: driver, policy"):
        parse_roles("worker")
    with pytest.raises(UsageError, match=r"--activities gpu: there is no 'gpu'\. There is: cpu, cuda\."):
        parse_activities("gpu")


def test_a_window_is_plain_json() -> None:
    window = Window(2, 5, ProfilerOptions(record_shapes=True), Choice(ranks=(1,)), 3, "recording-3")

    assert json.loads(json.dumps(window.for_recorder())) == {
        "number": 3,
        "first": 2,
        "stop": 5,
        "folder": "recording-3",
        "ranks": [1],
        "roles": None,
        "profiler": {
            "record_shapes": True,
            "with_stack": False,
            "profile_memory": False,
            "activities": ["cpu", "cuda"],
        },
    }


# ---------------------------------------------------------------- what a process may tell


def test_environment_by_an_allow_list_and_never_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "8", "NVTE_FLASH_ATTN": "1"}
    private = {
        "WANDB_API_KEY": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "RAY_AUTH_TOKEN": "x",
        "VLLM_API_KEY": "x",
        "TORCH_HUB_TOKEN": "x",
        "CUDA_PASSWORD": "x",
        "HOME": "x",
        "NRL_API_KEY": "x",
    }
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {**told, **private}.items():
        monkeypatch.setenv(name, value)

    assert identity.environment() == told


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on sys.path without importing it; on a branch, packed or not, and detached."""
    (tmp_path / "nemo_rl").mkdir()
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nemo_rl", raising=False)

    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "a" * 40 + " refs/heads/main\n")
    assert identity.versions()["nemo-rl"] == "a" * 40
    (git / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert identity.versions()["nemo-rl"] == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert identity.versions()["nemo-rl"] == "c" * 40


def test_megatrons_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions that a release does not have, or that are not set up, are left out."""

    def not_set_up() -> int:
        raise AssertionError("expert parallel group is not initialized")

    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: 2,
        get_tensor_model_parallel_rank=lambda: 1,
        get_virtual_pipeline_model_parallel_world_size=lambda: None,
        get_expert_model_parallel_world_size=not_set_up,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    assert identity.parallel() == {"sizes": {"tp": 2}, "ranks": {"tp": 1}}


# ---------------------------------------------------------------- files


def test_half_a_trace_never_gets_its_name(tmp_path: Path) -> None:
    raw, final = tmp_path / "raw.json", tmp_path / "rank-0.trace.json.gz"
    for text in ('{"traceEvents": [', '{"traceEvents": [{}', ""):
        raw.write_text(text)
        with pytest.raises(OSError, match="could not write all of it"):
            files.compress_trace(str(raw), str(final))
    with pytest.raises(OSError, match="could not write all of it"):
        files.compress_trace(str(tmp_path / "none.json"), str(final))
    assert [f.name for f in tmp_path.iterdir()] == ["raw.json"]

    raw.write_text('{"traceEvents": [],"traceName": "x" }')
    files.compress_trace(str(raw), str(final))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["rank-0.trace.json.gz", "raw.json"]


def test_an_announcement_has_room_for_what_is_said_later(tmp_path: Path) -> None:
    file = tmp_path / "announced.json"
    files.write_json(str(file), {"pid": 1}, files.RESERVED)
    size = file.stat().st_size
    files.overwrite_json(str(file), {"pid": 1, "why": "the disk is full"})

    assert (size, file.stat().st_size) == (files.RESERVED, files.RESERVED)
    assert files.read_json(str(file)) == {"pid": 1, "why": "the disk is full"}


def test_who_may_be_alive() -> None:
    here = socket.gethostname()
    assert files.may_be_alive({"host": here, "pid": os.getpid()})
    assert files.may_be_alive({"host": here + "-another", "pid": 1})  # of other hosts nothing is known
    assert not files.may_be_alive({"host": here, "pid": 2**22 + 1})  # beyond what Linux gives
    assert not files.may_be_alive(None)
