"""The Ray half: a driver on the CPU that prepares every step's data and has one actor per rank train on it, as NeMo-RL does.

In: `Options` from the command line. Out: training, and a log of its steps. The loop's parts and their names follow NeMo-RL's loop: process,
shard, put and submit, wait, gather metrics, log. Leaves no process and no temporary file behind.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray

import tracetools
from tracetools.demo.data import Batch, build, documents, encode, pack
from tracetools.demo.metrics import Line, MetricsLog, StepResult
from tracetools.demo.plant import LargeArgument, Plant, due, sleep_for
from tracetools.demo.settings import Options, Settings, read_options
from tracetools.demo.worker import PolicyWorker

OBJECT_STORE_BYTES = 128 << 20


def main() -> None:
    options = read_options()
    settings = Settings()
    with _cluster(options.ranks):
        # held until the cluster is gone: Ray ends an actor as soon as nobody holds it, whatever it still writes
        actors = _actors(options, settings)
        train(options, settings, actors)
        ray.get([actor.close.remote() for actor in actors])


def train(options: Options, settings: Settings, actors: list[Any]) -> None:
    """The driver's loop over the steps."""
    dataset = [documents(settings, number) for number in range(options.steps)]
    with MetricsLog(options.metrics) as log:
        for number in range(options.steps):
            plants = due(options.plants, number)
            with tracetools.step() as step:
                started = time.perf_counter_ns()
                with tracetools.region("data_processing"):
                    batch = _process(dataset[number], settings, options.ranks)
                    sleep_for("data_processing", plants)
                step.card(**batch.card())
                with tracetools.region("sharding"):
                    shards = [batch.shard(rank, options.ranks) for rank in range(options.ranks)]
                with tracetools.region("ray_submit"):
                    sleep_for("ray_submit", plants)
                    references = [ray.put(_argument(shard, i, plants)) for i, shard in enumerate(shards)]
                    futures = [actor.train.remote(shard) for actor, shard in zip(actors, references, strict=True)]
                with tracetools.region("ray_wait"):
                    results = ray.get(futures)
                with tracetools.region("metrics"):
                    result = _agreed(results, batch)
                with tracetools.region("logging"):
                    sleep_for("logging", plants)
                    took = time.perf_counter_ns() - started
                    log.write(Line(number, result.loss, result.tokens, result.grad_norm, took))


def _process(texts: list[str], settings: Settings, ranks: int) -> Batch:
    """The whole batch of a step, for all ranks."""
    encoded = [encode(text) for text in texts]
    bins = pack([len(document) - 1 for document in encoded], settings.bin_length, multiple=ranks)
    return build(encoded, bins, settings.bin_length)


def _argument(shard: Batch, actor: int, plants: tuple[Plant, ...]) -> Any:
    milliseconds = sum(plant.milliseconds for plant in plants if plant.cause == "ray_transport")
    return LargeArgument(shard, milliseconds) if milliseconds and actor == 0 else shard


def _agreed(results: list[StepResult], batch: Batch) -> StepResult:
    """Every rank reports the step over all ranks: they must agree with each other and with what was sent."""
    first = results[0]
    if any(result != first for result in results) or first.tokens != batch.card()["tokens"]:
        raise RuntimeError(f"the ranks disagree about a step: {results}")
    return first


@contextmanager
def _cluster(ranks: int) -> Iterator[None]:
    """A Ray of our own on this host, whatever RAY_ADDRESS says; gone afterwards."""
    # a short path: Ray puts sockets there, whose names may have 107 bytes
    folder = tempfile.mkdtemp(prefix="ttdemo-", dir="/tmp")
    try:
        ray.init(
            address="local",
            num_cpus=ranks,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _actors(options: Options, settings: Settings) -> list[Any]:
    ranks = options.ranks
    on_gpu = ray.cluster_resources().get("GPU", 0) >= ranks
    remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(PolicyWorker)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    actors = []
    for rank in range(ranks):
        own = {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        actors.append(remote.options(runtime_env={"env_vars": own}).remote(settings, options.plants))
    import_module("torch")  # NeMo-RL's driver has it too, and the profiler is part of it; meanwhile the actors start
    ray.get([actor.ready.remote() for actor in actors])
    return actors


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
