"""The plain half: one process per rank, each with the whole loop, as Megatron-LM has it. Started by torchrun.

In: `Options` from the command line, rank and world size from the environment. Out: training, and on rank 0 a log of its steps.
Every rank reads the same documents and works out the same packing, as Megatron-LM's ranks share one dataset index; then it
builds the tensors of its own bins only. Knows nothing of Ray.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import tracetools
from tracetools.demo.data import Batch, build, documents, encode, pack
from tracetools.demo.metrics import Line, MetricsLog
from tracetools.demo.plant import due, sleep_for
from tracetools.demo.settings import Options, Settings, read_options


def main() -> None:
    options = read_options()
    train(options, Settings())


def train(options: Options, settings: Settings) -> None:
    from tracetools.demo.trainer import Trainer  # imports torch and megatron-core

    trainer = Trainer(settings, options.plants)
    dataset = [documents(settings, number) for number in range(options.steps)]
    with ExitStack() as opened:
        log = opened.enter_context(MetricsLog(options.metrics)) if trainer.rank == 0 else None
        for number in range(options.steps):
            plants = due(options.plants, number)
            with tracetools.step() as step:
                started = time.perf_counter_ns()
                with tracetools.region("data_processing"):
                    batch = _my_batch(dataset[number], settings, trainer.rank, trainer.ranks)
                    sleep_for("data_processing", plants)
                step.card(**batch.card())
                result = trainer.train_step(batch)
                with tracetools.region("logging"):
                    sleep_for("logging", plants)
                    if log is not None:
                        took = time.perf_counter_ns() - started
                        log.write(Line(number, result.loss, result.tokens, result.grad_norm, took))
    trainer.close()


def _my_batch(texts: list[str], settings: Settings, rank: int, ranks: int) -> Batch:
    encoded = [encode(text) for text in texts]
    bins = pack([len(document) - 1 for document in encoded], settings.bin_length, multiple=ranks)
    return build(encoded, bins[rank::ranks], settings.bin_length)


if __name__ == "__main__":
    main()
