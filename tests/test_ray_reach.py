"""collect with real Ray: which workers the recorder reaches, and that what users bring along still works."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from jobs import RAY_INIT, markers, marks, record, run_json, script

from tracetools.collect.launch import collect
from tracetools.load import load_run
from tracetools.stackprofile import load_profile

pytest.importorskip("torch", reason="records with the real torch.profiler")
pytest.importorskip("ray", reason="needs Ray")

ACTOR = """
    class Worker:
        def __init__(self, rank, world=1):
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))

        def train(self):
            with tracetools.step(tokens=3):
                return forward_backward()

        def look(self, name):
            return os.environ.get(name)
"""


def job(body: str, start: str = RAY_INIT, actor: str = ACTOR) -> str:
    return dedent(start) + dedent(actor) + dedent(body)


@pytest.mark.xdist_group("ray")
def test_late_actors_threads_and_other_interpreters(tmp_path: Path) -> None:
    """Every kind of actor records the steps that its driver records, by the driver's numbers."""
    python = tmp_path / "other-python"
    python.write_text(f'#!/bin/sh\nOTHER_PYTHON=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    body = f"""
        class Async(Worker):
            async def train(self):
                import asyncio
                with tracetools.step(tokens=3):
                    await asyncio.sleep(0.001)
                    return forward_backward()

        remote = ray.remote(Worker)
        plain = remote.remote(0)
        threads = remote.options(max_concurrency=3).remote(1)
        other = remote.options(runtime_env={{"py_executable": {str(python)!r}}}).remote(2)
        asynchronous = ray.remote(Async).options(max_concurrency=4).remote(3)
        assert ray.get(other.look.remote("OTHER_PYTHON")) == "yes"
        workers = [plain, threads, other, asynchronous]
        for i in range(7):
            if i == 3:
                workers.append(remote.options(num_cpus=0).remote(4))
            with tracetools.step():
                # twice in a step, at once where the actor can do that: still one step of the run
                ray.get([w.train.remote() for w in workers for _ in range(2)])
    """
    found = record(tmp_path, job(body), 2, 5, profile="ray")
    run = load_run(found.folder)
    seen = {who: list(dict.fromkeys(names)) for who, names in markers(run).items()}

    assert (found.exit_code, found.missing) == (0, ())
    assert seen == {
        "driver": marks(2, 3, 4),
        **{f"policy {rank}": marks(2, 3, 4) for rank in range(4)},
        "policy 4": marks(4),  # came in step 3, which it warms up in
    }
    plain = run_json(found.folder)["processes"][1]
    assert [s["tokens"] for s in plain["steps"]] == [6, 6, 6]  # both calls of a step, 3 each
    late = run_json(found.folder)["processes"][-1]
    assert [s["number"] for s in late["skipped"]] == [2, 3]  # it was not there, and it warmed up
    assert {p["ray"]["actor_class"] for p in run_json(found.folder)["processes"][1:]} == {"Worker", "Async"}


@pytest.mark.xdist_group("ray")
def test_roles_and_ranks(tmp_path: Path) -> None:
    body = """
        workers = [ray.remote(Worker).remote(r, 2) for r in range(2)]
        for i in range(5):
            with tracetools.step():
                ray.get([w.train.remote() for w in workers])
    """
    from tracetools.collect.options import Choice

    found = record(tmp_path, job(body), 2, 4, profile="ray", choice=Choice(ranks=(1,), roles=("policy",)))

    assert markers(load_run(found.folder)) == {"policy 1": marks(2, 3)}
    left_out = run_json(found.folder)["not_recorded"]
    assert [(n["role"], n["rank"]) for n in left_out] == [("driver", None), ("policy", 0)]
    assert run_json(found.folder)["chosen"] == {"ranks": [1], "roles": ["policy"]}


@pytest.mark.xdist_group("ray")
def test_two_jobs_at_once_and_children_of_workers(tmp_path: Path) -> None:
    """Each worker follows its own driver, whose numbers differ; a worker's subprocess counts for itself."""
    child = """
        def train_in_child(self):
            import subprocess
            code = "import tracetools, torch\\nfor i in range(5):\\n    with tracetools.step(): torch.ones(3) + 1"
            environment = {**os.environ, "RANK": "7", "WORLD_SIZE": "1"}
            subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    """
    ray_job = """
        Worker.train_in_child = train_in_child
        worker = ray.remote(Worker).remote(int(os.environ["WHICH"]))
        for i in range(int(os.environ["STEPS"])):
            with tracetools.step(): pass
        for i in range(5):
            with tracetools.step():
                ray.get(worker.train.remote())
        if os.environ["WHICH"] == "0":
            ray.get(worker.train_in_child.remote())
    """
    body = f"""
        import subprocess
        if "WHICH" in os.environ:
            exec({dedent(RAY_INIT) + dedent(ACTOR) + dedent(child) + dedent(ray_job)!r})
        else:
            started = [
                subprocess.Popen([sys.executable, __file__], env={{**os.environ, "WHICH": str(w), "STEPS": str(w * 2)}})
                for w in (0, 1)
            ]
            sys.exit(max(p.wait() for p in started))
    """
    found = record(tmp_path, body, 3, 5, profile="ray")
    processes = run_json(found.folder)["processes"]

    assert found.exit_code == 0
    assert sorted(
        (p["role"], p["rank"], [s["number"] for s in p["steps"]]) for p in processes if p["rank"] is not None
    ) == [
        ("policy", 0, [3, 4]),
        ("policy", 1, [3, 4]),  # its driver had begun two steps before
        ("rank", 7, [3, 4]),
    ]
    assert [p["role"] for p in processes].count("driver") == 2
    assert len({p["ray"]["worker_id"] for p in processes if p["ray"]}) == 2


# ---------------------------------------------------------------- a cluster that was there before


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`ray start --head` without our environment; its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = tempfile.mkdtemp(prefix="ttray-", dir="/tmp")  # a short path: Ray puts sockets there
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = str(Path(sys.executable).parent / "ray")
    head = [
        ray,
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=4",
        "--include-dashboard=false",
        f"--temp-dir={folder}",
    ]
    process = subprocess.Popen(
        [*head, "--node-ip-address=127.0.0.1", "--disable-usage-stats"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()  # --block ends what it has started
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


HOOKED = """
    import ray

    def users_hook():
        import os
        os.environ["USERS_HOOK"] = "ran, after ours: " + str("tracetools_recorder" in __import__("sys").modules)

    for attempt in range(30):
        try:
            ray.init(address=os.environ["CLUSTER"], log_to_driver=False, logging_level="ERROR", runtime_env={
                "worker_process_setup_hook": users_hook, "env_vars": {"USERS": "variable"},
            })
            break
        except ConnectionError:
            time.sleep(0.5)
"""


@pytest.mark.xdist_group("ray")
def test_a_cluster_that_runs_already_and_a_hook_of_the_users(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "seen.txt"
    body = f"""
        worker = ray.remote(Worker).options(runtime_env={{"env_vars": {{"OWN": "of the actor"}}}}).remote(0)
        for i in range(5):
            with tracetools.step():
                ray.get(worker.train.remote())
        names = ("USERS_HOOK", "USERS", "OWN")
        open({str(out)!r}, "w").write("\\n".join(map(str, ray.get([worker.look.remote(n) for n in names]))))
    """
    monkeypatch.setenv("CLUSTER", cluster)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # the worker imports tracetools from where the test has it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    command = script(tmp_path, job(body, start=HOOKED))
    found = collect(command, tmp_path / "run", load_profile("ray"), 2, 4)

    assert found.exit_code == 0
    assert out.read_text().splitlines() == ["ran, after ours: True", "variable", "of the actor"]
    assert markers(load_run(found.folder)) == {"driver": marks(2, 3), "policy 0": marks(2, 3)}


@pytest.mark.xdist_group("ray")
def test_rays_timeline_is_saved_on_the_clock_of_the_traces(tmp_path: Path) -> None:
    import gzip
    import json

    body = """
        worker = ray.remote(Worker).remote(0)
        for i in range(5):
            with tracetools.step():
                ray.get(worker.train.remote())
        time.sleep(1)
    """
    found = record(tmp_path, job(body), 2, 4, profile="ray")
    (said,) = run_json(found.folder)["ray_timelines"]
    assert said["problem"] is None
    timeline = json.loads(gzip.decompress((found.folder / said["file"]).read_bytes()))
    driver, worker = run_json(found.folder)["processes"]

    assert timeline["schema"] == "tracetools.ray_timeline/1"
    assert (timeline["start_unix_ns"], timeline["end_unix_ns"]) == (
        driver["steps"][0]["start_unix_ns"],
        driver["steps"][-1]["end_unix_ns"],
    )
    runs = [e for e in timeline["traceEvents"] if e["name"] == "task:execute"]
    assert len(runs) == said["events"] - sum(e["name"] != "task:execute" for e in timeline["traceEvents"])
    # the execution of each call holds the worker's step, by the clock of both: one step of ours in each
    for step in worker["steps"]:
        inside = [
            e
            for e in runs
            if e["ts"] * 1000 <= step["start_unix_ns"] and step["end_unix_ns"] <= (e["ts"] + e["dur"]) * 1000
        ]
        assert len(inside) == 1
