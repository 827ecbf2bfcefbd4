"""Generators that objects of the data side hold, and the global ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from tests.data_sets import (
    LazyDataset,
    LocalDataset,
    NoisyCollate,
    NoisyDataset,
    PythonShuffle,
    TransformedDataset,
    closed_over_collate,
)
from tests.laws.rows import add


class ChunkSampler(Sampler[int]):
    """Draws a permutation for each chunk, every third batch."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, 32, 12):
            yield from (begin + torch.randperm(min(12, 32 - begin))).tolist()


class LateDataset(NoisyDataset):
    """Creates a generator at its 18th sample, after thousands of annotations that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_fetched = 0
        self.annotations = [{"boxes": [[0.0] * 4 for _ in range(5)]} for _ in range(3000)]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_fetched += 1
        if self.num_fetched == 18:
            self.late = random.Random(5)
        return super().__getitem__(index) + (self.late.random() if hasattr(self, "late") else 0.0)


def loader(data: Dataset, **arguments: object) -> DataLoader:
    """Return a loader of 8 shuffled batches, unless it has a sampler."""
    return DataLoader(data, batch_size=4, shuffle="sampler" not in arguments, **arguments)


def weighted() -> WeightedRandomSampler:
    """Return a sampler of torch with its own generator."""
    return WeightedRandomSampler([1.0] * 32, 32, generator=torch.Generator().manual_seed(0))


MADE = {
    "in a transform": lambda n: loader(TransformedDataset(), num_workers=n),
    "made when used": lambda n: loader(LazyDataset(has_attribute=n > 0), num_workers=n),
    "made in a thread": lambda n: loader(LocalDataset(), num_workers=n),
    "made late": lambda n: loader(LateDataset(), num_workers=n),
    "in a sampler": lambda n: loader(NoisyDataset(), sampler=PythonShuffle(rng=random.Random(0)), num_workers=n),
    "in a sampler of torch": lambda n: loader(NoisyDataset(), sampler=weighted(), num_workers=n),
    "in chunks of a sampler": lambda n: loader(NoisyDataset(), sampler=ChunkSampler(), num_workers=n),
    "in a collate_fn": lambda n: loader(NoisyDataset(), collate_fn=NoisyCollate(), num_workers=n),
    "in a closure": lambda n: loader(NoisyDataset(), collate_fn=closed_over_collate(), num_workers=n),
}
for name, make in MADE.items():
    add(f"generator {name}", train=lambda make=make: make(0))
    add(f"generator {name} of workers", train=lambda make=make: make(2))
add("global generators of a training", part="rng", shows="content")
