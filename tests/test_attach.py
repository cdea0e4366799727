"""collect --idle and collect --attach on real jobs: asked once, again, too late, by two at once, for some processes only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
from jobs import RAY_INIT, markers, marks, run_json, start, wait_until

from tracetools.collect import live
from tracetools.collect.attach import attach, first_step
from tracetools.collect.options import Choice, ProfilerOptions
from tracetools.errors import TracetoolsError, UsageError
from tracetools.load import load_run

pytest.importorskip("torch", reason="records with the real torch.profiler")

UNTIL_TOLD = """
    def until_told(rank=0):
        i = 0
        while not os.path.exists({end!r}):
            train(1, sleep=0.02)
"""
RANKS = """
    import subprocess
    if "RANK" in os.environ:
        until_told()
    else:
        started = [
            subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2"}) for r in (0, 1)
        ]
        sys.exit(max(p.wait() for p in started))
"""


@contextmanager
def idle(folder: Path, body: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job that steps until the test is over."""
    end = folder / "end"
    job = dedent(UNTIL_TOLD).format(end=str(end)) + dedent(body)
    process = start(folder, job, "--idle", *arguments)
    try:
        wait_until(lambda: live.counters(folder / "run"), process)
        yield process
    finally:
        end.touch()
        process.wait(60)


def numbers(folder: Path) -> list[int]:
    asked = run_json(folder)["steps"]
    return list(range(asked["first"], asked["stop"]))


def test_a_job_records_its_next_steps_again_and_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with idle(tmp_path, "until_told()") as process:
        one = attach(run, 3)
        two = attach(run, 2, ProfilerOptions(record_shapes=True))

    assert process.returncode == 0
    assert (one.folder.name, two.folder.name) == ("recording-1", "recording-2")
    assert (len(one.steps), len(two.steps), one.missing, two.problems) == (3, 2, (), ())
    assert max(one.steps) < min(two.steps)
    for found in (one, two):
        assert markers(load_run(found.folder)) == {"rank 0": marks(*numbers(found.folder))}
        assert {f.name for f in found.folder.iterdir()} == {"run.json", *found.traces}
    assert run_json(two.folder)["profiler"]["record_shapes"] is True
    whole = run_json(run)
    assert (whole["steps"], whole["processes"]) == (None, [])
    assert [(r["folder"], r["traces"]) for r in whole["recordings"]] == [("recording-1", 1), ("recording-2", 1)]
    assert sorted(f.name for f in run.iterdir()) == ["recording-1", "recording-2", "run.json"]
    with pytest.raises(TracetoolsError, match=r"recordings of `collect --attach`: recording-1, recording-2\. Give one"):
        load_run(run)


def test_all_processes_begin_at_the_same_step(tmp_path: Path) -> None:
    with idle(tmp_path, RANKS) as process:
        wait_until(lambda: len(live.counters(tmp_path / "run")) == 2, process)
        found = attach(tmp_path / "run", 2)

    expected = marks(*numbers(found.folder))
    assert markers(load_run(found.folder)) == {"rank 0": expected, "rank 1": expected}


def test_one_rank_of_two(tmp_path: Path) -> None:
    with idle(tmp_path, RANKS) as process:
        wait_until(lambda: len(live.counters(tmp_path / "run")) == 2, process)
        found = attach(tmp_path / "run", 2, choice=Choice(ranks=(1,)))

    assert markers(load_run(found.folder)) == {"rank 1": marks(*numbers(found.folder))}
    (left_out,) = run_json(found.folder)["not_recorded"]
    assert (left_out["rank"], left_out["why"]) == (0, "rank 0 is not among the chosen ones")


@pytest.mark.xdist_group("ray")
def test_a_ray_job(tmp_path: Path) -> None:
    """The driver and an actor that is called only now and then record the same steps."""
    pytest.importorskip("ray")
    body = """
        @ray.remote
        class Worker:
            def __init__(self):
                os.environ.update(RANK="0", WORLD_SIZE="1")

            def train(self):
                with tracetools.step():
                    return forward_backward()

        worker = Worker.remote()
        i = 0
        while not os.path.exists({end!r}):
            with tracetools.step():
                time.sleep(0.02)
                if i % 2:
                    ray.get(worker.train.remote())
            i += 1
    """.format(end=str(tmp_path / "end"))
    with idle(tmp_path, dedent(RAY_INIT) + dedent(body), "--profile", "ray") as process:
        wait_until(lambda: len(live.counters(tmp_path / "run")) == 2, process)
        found = attach(tmp_path / "run", 4)

    expected = numbers(found.folder)
    # it is called in odd steps. Where the first one is odd, no step of its own ended right before: it warms up in that one
    odd = [n for n in expected if n % 2 and n > expected[0]]
    assert markers(load_run(found.folder)) == {"driver": marks(*expected), "policy 0": marks(*odd)}
    policy = run_json(found.folder)["processes"][1]
    assert [s["number"] for s in policy["skipped"]] == [n for n in expected[:1] if n % 2]
    (timeline,) = run_json(found.folder)["ray_timelines"]
    assert timeline["file"] == "ray_timeline.json.gz"


def test_a_job_that_ends_before_it_comes_so_far(tmp_path: Path) -> None:
    process = start(tmp_path, "train(20, sleep=0.1)", "--idle")
    wait_until(lambda: live.counters(tmp_path / "run"), process)
    found = attach(tmp_path / "run", 1000)

    assert process.wait(60) == 0
    assert 0 < len(found.steps) < 20
    assert found.steps[-1] == 19
    assert markers(load_run(found.folder)) == {"rank 0": marks(*found.steps)}


def test_refusals(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="no such run folder"):
        attach(run, 1)
    run.mkdir()
    with pytest.raises(TracetoolsError, match="no job runs here"):
        attach(run, 1)
    with pytest.raises(UsageError, match="at least one step"):
        attach(run, 0)


def test_a_job_without_steps_is_waited_for_in_vain(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(6)", "--idle")
    wait_until(lambda: (tmp_path / "run" / ".live" / "job.json").exists(), process)
    with pytest.raises(TracetoolsError, match=r"no process of the job has begun a step within 0\.5 s"):
        attach(tmp_path / "run", 1, patience_s=0.5)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("counts", "pace_ms", "first"),
    [
        ([8], 0, 10),  # in step 7, nothing known of its pace: 3 steps ahead
        ([8, 5], 1000, 11),  # half a second is a part of a step, so one more
        ([8], 100, 15),  # 5 steps in half a second
    ],
)
def test_the_first_step_lies_ahead_of_everybody(counts: list[int], pace_ms: int, first: int) -> None:
    running = [live.Progress(str(n), {}, n, pace_ms * 10**6, 0, True) for n in counts]

    assert first_step(running) == first
