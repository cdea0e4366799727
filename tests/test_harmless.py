"""The training job computes the same bits whatever collect does beside it: the demo's halves, with real Megatron-Core and Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import record

from tracetools.collect.attach import attach
from tracetools.collect.launch import collect, collect_idle
from tracetools.collect.options import ProfilerOptions
from tracetools.demo.metrics import read_metrics
from tracetools.demo.settings import Options
from tracetools.errors import TracetoolsError
from tracetools.stackprofile import load_profile

pytest.importorskip("torch", reason="records with the real torch.profiler")

needs_stacks = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("ray") and find_spec("megatron") and find_spec("megatron.core")),
    reason="needs torch, ray and megatron-core: pip install 'tracetools[demo]'",
)

STEPS = 4
EVERYTHING = ProfilerOptions(record_shapes=True, with_stack=True, profile_memory=True)


@pytest.mark.xdist_group("ray")
@needs_stacks
@pytest.mark.parametrize(("half", "profile"), [("megatron", "megatron_lm"), ("ray", "ray")])
def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, half: str, profile: str) -> None:
    def job(name: str) -> tuple[list[str], Path]:
        metrics = tmp_path / f"{name}.jsonl"
        arguments = Options(STEPS, 2, metrics).arguments()
        return [
            sys.executable,
            "-m",
            "tracetools.demo.launch",
            half,
            str(tmp_path / f"{name}.log"),
            *arguments,
        ], metrics

    alone, alone_log = job("alone")
    assert subprocess.run(alone, check=False).returncode == 0
    idle, idle_log = job("idle")
    assert collect_idle(idle, tmp_path / "idle", load_profile(profile)).exit_code == 0
    recorded, recorded_log = job("recorded")
    found = collect(recorded, tmp_path / "recorded", load_profile(profile), 1, 3, EVERYTHING)

    assert (found.exit_code, found.steps, found.missing) == (0, (1, 2), ())
    expected = [(line.loss, line.grad_norm, line.tokens) for line in read_metrics(alone_log)]
    assert len(expected) == STEPS
    for log in (idle_log, recorded_log):
        assert [(line.loss, line.grad_norm, line.tokens) for line in read_metrics(log)] == expected
    assert json.loads((tmp_path / "idle" / "run.json").read_text())["recordings"] == []
    with pytest.raises(TracetoolsError, match="no job runs here"):
        attach(tmp_path / "idle", 1)


OWN_PROFILER = """
    from torch.profiler import ProfilerActivity, profile
    own = None
    for i in range(9):
        if i == {first}:
            own = profile(activities=[ProfilerActivity.CPU])
            own.start()
        train(1)
        if i == {last}:
            own.stop()
            own.export_chrome_trace({out!r})
"""


@pytest.mark.parametrize(
    ("first", "last", "recorded"),
    [
        (4, 7, [3]),  # it begins within our recording, which ends there
        (4, 4, [3]),
        (1, 7, []),  # it is there already
        (1, 3, []),
        (7, 8, [3, 4, 5]),  # it begins when ours has ended
    ],
)
def test_a_profiler_of_the_jobs_own_comes_first(tmp_path: Path, first: int, last: int, recorded: list[int]) -> None:
    """torch ends the process where two profilers meet."""
    out = tmp_path / "own.json"
    found = record(tmp_path, OWN_PROFILER.format(first=first, last=last, out=str(out)), 3, 6)

    assert found.exit_code == 0
    assert any("aten::mm" in str(e.get("name")) for e in json.loads(out.read_text())["traceEvents"])
    assert list(found.steps) == recorded
    said = " ".join((*found.problems, *found.missing))
    assert ("the job started a torch profiler of its own" in said) is (len(recorded) < 3)
