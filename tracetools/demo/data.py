"""Documents of uneven length, and how a step's documents become packed bins.

In: settings and a step's number. Out: documents (text), then a `Batch` of bins in which several documents share one row.
Both stacks call the same functions: what differs is who calls them and how often. Knows nothing of torch, ranks or Ray.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracetools.demo.settings import Settings

END_OF_DOCUMENT = 0  # a byte that no document contains
PADDING_SEGMENT = -1

_TEXT = """
a the one two some every kernel gradient token batch layer stream step rank driver actor waits runs sends reads packs computes
reduces gathers quickly slowly again before after while with for from into over under and or but then
"""
_WORDS = _TEXT.split()

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed bins. Arrays have the shape [bins, bin length]; `lengths` has each bin's documents, in tokens."""

    tokens: Tokens
    labels: Tokens
    positions: Tokens  # restart with every document
    segments: Tokens  # which document of the bin; PADDING_SEGMENT where there is none
    lengths: tuple[tuple[int, ...], ...]

    def card(self) -> dict[str, int]:
        """What a step on this batch works on, as `tracetools.step` takes it."""
        lengths = [length for of_bin in self.lengths for length in of_bin]
        return {
            "tokens": sum(lengths),
            "padded_tokens": int(self.tokens.size),
            "sequences": len(lengths),
            "microbatches": len(self.tokens),
            "sum_squared_lengths": sum(length * length for length in lengths),
        }

    def shard(self, rank: int, ranks: int) -> Batch:
        """The bins of one rank: they are dealt in turn."""
        mine = slice(rank, None, ranks)
        return Batch(
            tokens=np.ascontiguousarray(self.tokens[mine]),
            labels=np.ascontiguousarray(self.labels[mine]),
            positions=np.ascontiguousarray(self.positions[mine]),
            segments=np.ascontiguousarray(self.segments[mine]),
            lengths=self.lengths[mine],
        )


def documents(settings: Settings, step: int) -> list[str]:
    """The documents of one step: as many as fill the wanted share of its bins. The same for the same seed and step."""
    source = random.Random(settings.seed * 1_000_003 + step)
    budget = int(settings.fill * settings.bins * settings.bin_length)
    found: list[str] = []
    while budget > 0:
        # mostly short, some as long as a bin: packing has something to do
        length = min(int(16 + source.expovariate(1 / 60)), settings.bin_length, budget)
        found.append(_text(source, length))
        budget -= length
    return found


def _text(source: random.Random, length: int) -> str:
    words: list[str] = []
    size = 0
    while size < length:
        words.append(source.choice(_WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)[:length].ljust(length, ".")


def encode(text: str) -> Tokens:
    """One token per byte, then the end of the document."""
    return np.frombuffer(text.encode() + bytes([END_OF_DOCUMENT]), dtype=np.uint8).astype(np.int64)


def pack(lengths: Sequence[int], capacity: int, multiple: int = 1) -> list[list[int]]:
    """First fit, longest first: bins of document numbers, none over `capacity` tokens.

    The number of bins is a multiple of `multiple`, so that every rank gets as many. Raises ValueError for a document longer than
    a bin, and where there are too few documents for so many bins.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        if not 0 < length <= capacity:
            raise ValueError(f"document {number} has {length} tokens; a bin holds 1 to {capacity}")
        at = next((i for i, free in enumerate(room) if free >= length), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(number)
        room[at] -= length
    while len(bins) % multiple:
        fullest = max(bins, key=len)
        if len(fullest) < 2:
            raise ValueError(f"{len(lengths)} documents cannot fill a multiple of {multiple} bins")
        bins.append([fullest.pop()])
    return bins


def build(encoded: Sequence[Tokens], bins: Sequence[Sequence[int]], bin_length: int) -> Batch:
    """The bins' rows. A document of n + 1 tokens gives n inputs and, one further, n labels."""
    shape = len(bins), bin_length
    batch = Batch(
        tokens=np.zeros(shape, np.int64),
        labels=np.zeros(shape, np.int64),
        positions=np.zeros(shape, np.int64),
        segments=np.full(shape, PADDING_SEGMENT, np.int64),
        lengths=tuple(tuple(len(encoded[number]) - 1 for number in numbers) for numbers in bins),
    )
    for row, numbers in enumerate(bins):
        start = 0
        for segment, number in enumerate(numbers):
            document = encoded[number]
            stop = start + len(document) - 1
            batch.tokens[row, start:stop] = document[:-1]
            batch.labels[row, start:stop] = document[1:]
            batch.positions[row, start:stop] = np.arange(stop - start)
            batch.segments[row, start:stop] = segment
            start = stop
    return batch
