"""The Ray actor of one rank: it waits for a shard and trains on it.

In: shards, by method call. Out: the result of each step. Trains with the same `Trainer` as the plain half and does nothing else.
Knows nothing of documents or packing.
"""

from __future__ import annotations

import tracetools
from tracetools.demo.data import Batch
from tracetools.demo.metrics import StepResult
from tracetools.demo.plant import Plant
from tracetools.demo.settings import Settings


class PolicyWorker:
    """Made by Ray in a process of its own, whose environment names its rank."""

    def __init__(self, settings: Settings, plants: tuple[Plant, ...] = ()) -> None:
        from tracetools.demo.trainer import Trainer  # here: the driver sees this class too, and needs no torch

        self._trainer = Trainer(settings, plants)

    def ready(self) -> int:
        """The rank: answered once the model is built."""
        return int(self._trainer.rank)

    def train(self, shard: Batch) -> StepResult:
        with tracetools.step(**shard.card()):
            return self._trainer.train_step(shard)

    def close(self) -> None:
        self._trainer.close()
