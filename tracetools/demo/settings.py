"""What is trained, and the command line that both halves share.

In: the arguments of a half's process. Out: `Settings` and `Options`. Knows nothing of torch: it is read before anything heavy
is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracetools.demo.plant import Plant, parse_plant


@dataclass(frozen=True, slots=True)
class Settings:
    """The model and its batches: sized for a step of about 0.1 s on one core per rank."""

    seed: int = 1234
    vocabulary: int = 256  # one token per byte
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    bin_length: int = 256  # tokens of a packed bin; one bin is one microbatch
    bins: int = 8  # bins per step, over all ranks
    fill: float = 0.88  # share of the bins' tokens that a step's documents aim at
    learning_rate: float = 1e-3
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """One half's run: `steps` optimizer steps on `ranks` processes; one line per step goes to `metrics`."""

    steps: int
    ranks: int
    metrics: Path
    plants: tuple[Plant, ...] = ()

    def arguments(self) -> list[str]:
        """The command line that `read_options` reads back."""
        plants = [part for plant in self.plants for part in ("--plant", str(plant))]
        return ["--steps", str(self.steps), "--ranks", str(self.ranks), "--metrics", str(self.metrics), *plants]


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """From the command line of this process, or from `arguments`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--plant", type=parse_plant, action="append", default=[], dest="plants")
    given = parser.parse_args(arguments)
    return Options(given.steps, given.ranks, given.metrics, tuple(given.plants))
