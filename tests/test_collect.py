"""collect on real processes with the real torch.profiler and real Ray: what is recorded, what is left behind, what is never changed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from jobs import markers, record, run_json, script

from tracetools.analysis import analyze
from tracetools.collect.launch import collect
from tracetools.collect.options import ProfilerOptions
from tracetools.errors import UsageError
from tracetools.load import load_run
from tracetools.model import Category
from tracetools.stackprofile import load_profile

pytest.importorskip("torch", reason="records with the real torch.profiler")


def test_a_plain_job(tmp_path: Path) -> None:
    found = record(tmp_path, "train(6)")
    run = load_run(found.folder)
    (process,) = analyze(run).processes

    assert (found.exit_code, found.missing, found.problems) == (0, (), ())
    assert markers(run) == {"rank 0": ["tracetools.step#2", "tracetools.step#3"]}
    assert [(s.number, s.card.tokens, s.card.sequences) for s in process.steps] == [(2, 102, 7), (3, 103, 7)]
    for step in process.steps:
        # slept in no operator: idle, charged to the region that slept; an upper bound would be a test of the machine
        assert {c.region: c.ns for c in step.causes}["data_processing"] >= 5_000_000
    assert {f.name for f in found.folder.iterdir()} == {"run.json", process.file}
    written = run_json(found.folder)
    assert written["versions"]["torch"].startswith("2.")
    assert written["steps"] == {"first": 2, "stop": 4}


def test_step_0_can_be_recorded(tmp_path: Path) -> None:
    found = record(tmp_path, "train(3)", 0, 1)

    assert markers(load_run(found.folder)) == {"rank 0": ["tracetools.step#0"]}


def test_results_and_exit_status_are_the_jobs_own(tmp_path: Path) -> None:
    out = tmp_path / "result.txt"
    body = f"""
        open({str(out)!r}, "a").write(repr(train(5)) + "\\n")
        sys.exit(7)
    """
    found = record(tmp_path, body)
    alone = subprocess.run(script(tmp_path, body), check=False)
    with_us, without = out.read_text().splitlines()

    assert (found.exit_code, alone.returncode) == (7, 7)
    assert with_us == without


def test_a_job_that_fails_keeps_what_it_recorded(tmp_path: Path) -> None:
    found = record(tmp_path, "train(3); raise RuntimeError('out of memory')", 1, 9)

    assert found.exit_code == 1
    assert found.steps == (1, 2)
    assert markers(load_run(found.folder)) == {"rank 0": ["tracetools.step#1", "tracetools.step#2"]}


def test_a_job_that_never_comes_so_far(tmp_path: Path) -> None:
    found = record(tmp_path, "train(2)", 5, 6)

    assert (found.exit_code, found.traces, found.steps) == (0, (), ())
    assert [f.name for f in found.folder.iterdir()] == ["run.json"]


def test_a_process_killed_while_recording_is_named(tmp_path: Path) -> None:
    found = record(tmp_path, "train(3); os.kill(os.getpid(), 9)", 1, 9)

    assert found.exit_code == -9
    assert found.traces == ()
    assert "ended while it recorded" in found.missing[0]
    assert [f.name for f in found.folder.iterdir()] == ["run.json"]


def test_ranks_that_a_job_starts_itself(tmp_path: Path) -> None:
    body = """
        import subprocess
        if "RANK" in os.environ:
            train(5)
        else:
            started = [
                subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2"}) for r in (0, 1)
            ]
            sys.exit(max(p.wait() for p in started))
    """
    run = load_run(record(tmp_path, body).folder)

    assert markers(run) == {f"rank {r}": ["tracetools.step#2", "tracetools.step#3"] for r in (0, 1)}
    assert [(p.role, p.rank, p.world_size) for p in run.processes] == [("rank", 0, 2), ("rank", 1, 2)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(tmp_path: Path, method: str) -> None:
    body = f"""
        import multiprocessing
        if __name__ == "__main__":
            torch.set_num_threads(1)
            context = multiprocessing.get_context({method!r})
            started = [context.Process(target=train, args=(5,)) for _ in range(2)]
            [p.start() for p in started]
            [p.join() for p in started]
    """
    found = record(tmp_path, body)
    every = [names for p in load_run(found.folder).processes for names in [p.trace.names]]

    assert len(found.traces) == 2
    assert all({"tracetools.step#2", "tracetools.step#3"} <= set(names) for names in every)


def test_ranges_of_other_threads_are_recorded(tmp_path: Path) -> None:
    body = """
        import threading
        def work():
            with tracetools.region("in another thread"):
                forward_backward()
        for i in range(5):
            with tracetools.step():
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
    """
    (process,) = load_run(record(tmp_path, body).folder).processes

    assert [process.trace.names[n] for n in process.trace.events.name].count("in another thread") == 2


def test_profiler_options_reach_the_profiler(tmp_path: Path) -> None:
    found = record(tmp_path, "train(5)", options=ProfilerOptions(record_shapes=True))
    (process,) = load_run(found.folder).processes

    assert process.trace.info.profiler == ("record_shapes",)
    assert run_json(found.folder)["profiler"]["record_shapes"] is True


# ---------------------------------------------------------------- hooks


PROFILE = """
    name = "test"
    extends = "torch"
    [step]
    functions = ["stack:train_step"]
    [[hook]]
    target = "stack:Loader.fetch"
    region = "data_loading"
    [[hook]]
    target = "stack:Loader.size"
    region = "static"
    [[hook]]
    target = "stack:Loader.make"
    region = "class"
    [[hook]]
    target = "stack:broken"
    region = "broken"
    [[hook]]
    target = "stack:numbers"
    region = "generator"
    [[hook]]
    target = "stack:gone.away"
    region = "gone"
    [[hook]]
    target = "never_imported:f"
    region = "never"
"""

STACK = '''
    """A training stack."""
    import functools

    class Loader:
        def fetch(self, n, *, scale=2):
            """Docs."""
            return [n * scale]

        @staticmethod
        def size():
            return 3

        @classmethod
        def make(cls):
            return cls()

    def broken():
        raise KeyError("own error")

    def numbers():
        yield 1

    def train_step(loader):
        return loader.fetch(1)
'''

USES_STACK = """
    import inspect, pickle, stack
    loader = stack.Loader.make()
    for _ in range(5):
        assert stack.train_step(loader) == [2]
    assert loader.fetch(4, scale=5) == [20]
    assert str(inspect.signature(stack.Loader.fetch)) == "(self, n, *, scale=2)"
    assert stack.Loader.fetch.__doc__ == "Docs." and stack.Loader.fetch.__qualname__ == "Loader.fetch"
    assert stack.Loader.size() == 3 and stack.Loader().size() == 3
    assert list(stack.numbers()) == [1] and inspect.isgeneratorfunction(stack.numbers)
    assert pickle.loads(pickle.dumps(stack.train_step)) is stack.train_step
    assert stack.__loader__ is stack.__spec__.loader and "A training stack" in inspect.getsource(stack)
    try:
        stack.broken()
    except KeyError as error:
        assert error.args == ("own error",)
"""


def test_hooked_functions_are_named_and_otherwise_the_same(tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text(textwrap.dedent(STACK))
    (tmp_path / "test.toml").write_text(textwrap.dedent(PROFILE))
    found = record(tmp_path, USES_STACK, profile=str(tmp_path / "test.toml"))
    (process,) = load_run(found.folder).processes
    ev = process.trace.events
    annotations = [process.trace.names[ev.name[i]] for i in ev.where(Category.USER_ANNOTATION)]

    assert found.exit_code == 0
    assert annotations == ["tracetools.step#2", "data_loading", "tracetools.step#3", "data_loading"]
    hooks = run_json(found.folder)["processes"][0]["hooks"]
    assert [target for target in hooks["wrapped"] if target.startswith("stack:")] == [
        "stack:Loader.fetch",
        "stack:Loader.make",
        "stack:Loader.size",
        "stack:broken",
        "stack:numbers",
        "stack:train_step",
    ]
    why = dict(hooks["missed"])
    assert "no attribute 'gone'" in why["stack:gone.away"]
    assert why["never_imported:f"] == "module not imported"


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __name__, __file__\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    body = """
        assert mine == ("sitecustomize", sys.modules["sitecustomize"].__file__), mine
        train(5)
    """
    found = record(tmp_path, body)

    assert (found.exit_code, found.steps) == (0, (2, 3))


def test_a_recorder_that_cannot_start_does_not_touch_the_job(tmp_path: Path) -> None:
    body = """
        import torch.profiler
        def no(*_, **__): raise OSError("no profiler here")
        torch.profiler.profile = no
        print(train(5))
    """
    found = record(tmp_path, body)

    assert (found.exit_code, found.traces) == (0, ())
    assert "no profiler here" in found.missing[0]


# ---------------------------------------------------------------- the launcher


def test_refusals_before_anything_is_started(tmp_path: Path) -> None:
    profile = load_profile("torch")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    for command, out, first, stop, says in [
        (["true"], "full", 1, 2, "not empty"),
        (["true"], "full/precious", 1, 2, "cannot be used"),
        (["./no-such-thing"], "new1", 1, 2, "cannot be run"),
        (["true"], "new2", 2, 2, "FIRST < STOP"),
    ]:
        with pytest.raises(UsageError, match=says):
            collect(command, tmp_path / out, profile, first, stop)


def test_sigterm_reaches_the_job_and_its_trace_is_kept(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = script(tmp_path, f"train(3)\nopen({str(ready)!r}, 'w').close()\ntime.sleep(60)")
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tracetools",
            "collect",
            "--steps",
            "1:9",
            "--out",
            str(tmp_path / "run"),
            "--",
            *command,
        ]
    )
    while not ready.exists() and launcher.poll() is None:
        time.sleep(0.05)
    # the recorder looks for the launcher's request a few times a second; a job that dies at once on SIGTERM may lose the race
    (tmp_path / "run" / ".stop").touch()
    while list((tmp_path / "run").glob(".recording-*")) and launcher.poll() is None:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)

    assert launcher.wait(30) == 128 + signal.SIGTERM
    assert markers(load_run(tmp_path / "run")) == {"rank 0": ["tracetools.step#1", "tracetools.step#2"]}


# ---------------------------------------------------------------- Ray


RAY_JOB = """
    import ray
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote
    class Worker:
        def __init__(self, rank):
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")

        def train(self, i):
            with tracetools.step(tokens=10 + i):
                with tracetools.region("forward_backward"):
                    return forward_backward()

    workers = [Worker.remote(r) for r in range(2)]
    for i in range(6):
        with tracetools.step(tokens=20):
            with tracetools.region("data_processing"):
                time.sleep(0.02)
            futures = [w.train.remote(i) for w in workers]
            ray.get(futures)
    for w in workers:
        ray.kill(w)
"""


@pytest.mark.xdist_group("ray")
def test_a_ray_driver_and_its_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = record(tmp_path, RAY_JOB, profile="ray")
    run = load_run(found.folder)
    driver, *workers = analyze(run).processes

    assert (found.exit_code, found.missing) == (0, ())
    assert markers(run) == {
        who: ["tracetools.step#2", "tracetools.step#3"] for who in ("driver", "policy 0", "policy 1")
    }
    assert [(p.role, p.rank) for p in (driver, *workers)] == [("driver", None), ("policy", 0), ("policy", 1)]
    assert all(e["ray"]["actor_id"] for e in run_json(found.folder)["processes"][1:])
    for worker in workers:
        assert worker.steps_from == "the driver's annotation tracetools.step#N"
        assert [s.card.tokens for s in worker.steps] == [12, 13]
        for step, of_driver in zip(worker.steps, driver.steps, strict=True):
            assert (step.start_ns, step.wall_ns) == (of_driver.start_ns, of_driver.wall_ns)
            causes = {(c.process, c.region): c.ns for c in step.causes}
            assert causes["driver", "data_processing"] >= 20_000_000
            # from profiles/ray.toml, without a mark in the job
            assert {("driver", "ray_submit"), ("driver", "ray_wait")} <= causes.keys()
