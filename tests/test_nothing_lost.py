"""Whatever ends a job: what was recorded is whole, what is missing is named, the job's own exit status is returned. With real processes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from jobs import RAY_INIT, markers, marks, record, run_json, script, start, wait_until

from tracetools.collect.launch import collect, explain_empty
from tracetools.collect.runfile import without_secrets
from tracetools.load import load_run
from tracetools.stackprofile import load_profile

pytest.importorskip("torch", reason="records with the real torch.profiler")


def whole_traces(folder: Path) -> list[str]:
    """Names of the trace files; each must be readable to its end. Nothing else but run.json may lie there."""
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".trace.json.gz"))
    for name in names:
        json.loads(gzip.decompress((folder / name).read_bytes()))
    assert sorted(f.name for f in folder.iterdir() if not f.name.startswith("ray_timeline")) == sorted(
        [*names, "run.json"]
    )
    return names


RANKS = """
    import subprocess, signal
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        {ranks}
    else:
        started = [
            subprocess.Popen([sys.executable, __file__], env={{**os.environ, "RANK": str(r), "WORLD_SIZE": "2"}}) for r in (0, 1)
        ]
        codes = [p.wait() for p in started]
        sys.exit(max(codes) or 5 * (min(codes) < 0))
"""


def test_a_worker_killed_while_it_records(tmp_path: Path) -> None:
    ranks = "train(3); rank and os.kill(os.getpid(), signal.SIGKILL); train(3)"
    found = record(tmp_path, RANKS.format(ranks=ranks), 1, 5)

    assert found.exit_code == 5
    assert markers(load_run(found.folder)) == {"rank 0": marks(1, 2, 3, 4)}
    (missing,) = run_json(found.folder)["missing"]
    assert (missing["rank"], missing["why"]) == (1, "ended while it recorded: killed, or its host is gone")
    whole_traces(found.folder)


def test_a_worker_killed_after_its_recording(tmp_path: Path) -> None:
    """A recording that is finished is in its file before the process ends."""
    wait = "import glob\nwhile not glob.glob(sys.argv[1] + '/rank-0*.gz'): time.sleep(0.05)\nos.kill(os.getpid(), 9)"
    command = [*script(tmp_path, "train(4)\n" + wait), str(tmp_path / "run")]
    found = collect(command, tmp_path / "run", load_profile("torch"), 1, 3)

    assert found.exit_code == -signal.SIGKILL
    assert markers(load_run(found.folder)) == {"rank 0": marks(1, 2)}
    assert (found.missing, len(whole_traces(found.folder))) == ((), 1)


def test_an_exception_in_the_training_loop(tmp_path: Path) -> None:
    ranks = "train(3)\n        if rank: raise RuntimeError('loss is nan')\n        train(3)"
    found = record(tmp_path, RANKS.format(ranks=ranks), 1, 5)

    assert found.exit_code == 1
    assert markers(load_run(found.folder)) == {"rank 0": marks(1, 2, 3, 4), "rank 1": marks(1, 2)}
    assert len(whole_traces(found.folder)) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_while_a_job_records(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """SIGTERM goes to the launcher, as a scheduler sends it; Ctrl-C to everybody on the terminal."""
    ready = tmp_path / "ready"
    body = f"train(3)\nopen({str(ready)!r}, 'w').close()\nwhile True: time.sleep(0.1)"
    launcher = start(tmp_path, body, "--steps", "1:9")
    wait_until(ready.exists, launcher)
    if number == signal.SIGTERM:
        launcher.send_signal(number)
    else:
        os.killpg(launcher.pid, number)

    assert launcher.wait(60) in (status, 1)  # Python ends with 1 where KeyboardInterrupt is raised within its exit
    assert markers(load_run(tmp_path / "run")) == {"rank 0": marks(1, 2)}
    assert len(whole_traces(tmp_path / "run")) == 1


RAY_LOOP = """
    @ray.remote
    class Worker:
        def __init__(self, rank):
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")

        def train(self):
            with tracetools.step():
                return forward_backward()

        def die(self):
            os.kill(os.getpid(), 9)

    workers = [Worker.remote(r) for r in range(2)]
    for i in range(6):
        with tracetools.step():
            ray.get([w.train.remote() for w in workers])
        {each}
"""


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("each", "recorded", "lost", "status"),
    [
        # ray.kill right after the last recorded step
        ("if i == 4: [ray.kill(w) for w in workers]; break", (0, 1), (), 0),
        # an actor dies in the middle; the driver goes on without it
        ("if i == 2: workers[1].die.remote(); workers.pop()", (0,), (1,), 0),
        # the driver fails: its workers end with it
        ("if i == 4: raise RuntimeError('loss is nan')", (0, 1), (), 1),
    ],
)
def test_ray_workers_that_end(
    tmp_path: Path, each: str, recorded: tuple[int, ...], lost: tuple[int, ...], status: int
) -> None:
    pytest.importorskip("ray")
    found = record(tmp_path, dedent(RAY_INIT) + dedent(RAY_LOOP).format(each=each), 1, 5, profile="ray")
    run = load_run(found.folder)

    assert found.exit_code == status
    assert markers(run) == {"driver": marks(1, 2, 3, 4), **{f"policy {r}": marks(1, 2, 3, 4) for r in recorded}}
    assert tuple(m["rank"] for m in run_json(found.folder)["missing"]) == lost
    assert len(whole_traces(found.folder)) == 1 + len(recorded)


def test_a_full_disk(tmp_path: Path) -> None:
    """No file of the job may grow beyond 20 kB: the trace does not fit, and the profiler itself would not say so."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    busy = "for i in range(8):\n    with tracetools.step():\n        [forward_backward() for _ in range(50)]"
    found = record(tmp_path, limit + busy, 1, 4)

    assert found.exit_code == 0
    assert (found.traces, whole_traces(found.folder)) == ((), [])
    (missing,) = run_json(found.folder)["missing"]
    assert (
        "the trace could not be written: OSError('the profiler could not write all of it; is the disk full?')"
        in missing["why"]
    )


def test_a_disk_that_is_full_for_everything(tmp_path: Path) -> None:
    """Not even the process's record fits: the place that was reserved for it before says why."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2100, 2100))\n"
    # the record of twelve steps is longer than that
    found = record(tmp_path, "train(1)\n" + limit + "train(20)", 3, 15)

    assert (found.exit_code, found.traces) == (0, ())
    (missing,) = run_json(found.folder)["missing"]
    assert "the record of the process could not be written" in missing["why"]
    assert whole_traces(found.folder) == []


def test_a_run_file_that_cannot_be_written_costs_the_job_nothing(tmp_path: Path) -> None:
    """The folder is gone when the job ends."""
    found = record(tmp_path, "train(5); import shutil; time.sleep(1); shutil.rmtree(sys.path[0] + '/run'); sys.exit(7)")

    assert found.exit_code == 7
    assert "run.json: cannot be written" in found.problems[0]


# ---------------------------------------------------------------- jobs that cannot be recorded


def test_a_job_that_is_not_python(tmp_path: Path) -> None:
    found = collect(["sh", "-c", "exit 3"], tmp_path / "run", load_profile("torch"), 1, 2)

    assert (found.exit_code, found.traces) == (3, ())
    assert "No Python process of the job had the recorder in it." in str(explain_empty(found, 1))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print('no step at all')", "No process of the job began a step."),
        ("train(2)", "The job ended after 2 step(s), numbered from 0, and step 3 was the first one to record."),
        ("torch.autograd.kineto_available = lambda: False; train(6)", "this torch was built without Kineto"),
    ],
)
def test_why_nothing_was_recorded(tmp_path: Path, body: str, says: str) -> None:
    found = record(tmp_path, body, 3, 5)

    assert (found.exit_code, found.traces) == (0, ())
    assert says in str(explain_empty(found, 3))


def test_a_python_without_torch(tmp_path: Path) -> None:
    no_torch = "import sys; sys.modules['torch'] = None\nimport tracetools\nfor i in range(5):\n    with tracetools.step(): pass\n"
    job = tmp_path / "job.py"
    job.write_text(no_torch)
    found = collect([sys.executable, str(job)], tmp_path / "run", load_profile("torch"), 1, 2)

    assert (found.exit_code, found.traces) == (0, ())
    assert "there is no torch in this process's Python" in found.missing[0]


def test_the_command_line_says_it_and_returns_the_jobs_own_status(tmp_path: Path) -> None:
    for job, status, says in (
        ("import sys; sys.exit(4)", 4, "No process of the job began a step"),
        ("pass", 0, "No process of the job began a step"),
    ):
        out = tmp_path / f"run{status}"
        command = [sys.executable, "-m", "tracetools", "collect", "--out", str(out), "--", sys.executable, "-c", job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)

        assert done.returncode == status
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_secrets_of_the_command_line_are_not_told() -> None:
    said = without_secrets(
        ["WANDB_API_KEY=a", "train.py", "--hf-token", "b", "--api-key=c", "--lr", "1", "--author", "d"]
    )

    assert said == [
        "WANDB_API_KEY=(not recorded)",
        "train.py",
        "--hf-token",
        "(not recorded)",
        "--api-key=(not recorded)",
        "--lr",
        "1",
        "--author",
        "(not recorded)",  # rather too much than too little
    ]
