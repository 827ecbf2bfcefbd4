"""Generators on the data side that are made late, in a thread, or where nobody looks; and draws between batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Sampler

from tests.laws.data_sets import LocalDataset, NoisyDataset, TransformedDataset, closed_over_collate
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


MADE: dict[str, Callable[[int], Any]] = {
    "in a transform": lambda n: DataLoader(TransformedDataset(), 4, num_workers=n),
    "made in a thread": lambda n: DataLoader(LocalDataset(), 4, num_workers=n),
    "made late": lambda n: DataLoader(LateDataset(), 4, num_workers=n),
    "in a closure": lambda n: DataLoader(NoisyDataset(), 4, collate_fn=closed_over_collate(), num_workers=n),
    "in chunks of a sampler": lambda n: DataLoader(NoisyDataset(), 4, sampler=ChunkSampler(), num_workers=n),
}
for name, make in MADE.items():
    is_local = "thread" in name
    takes = "copies" if is_local else ()  # what is local to a thread can't be copied
    add(f"generator {name}", train=lambda make=make: make(0), takes=takes, apart="counts" if "late" in name else "")
    if is_local or "transform" in name:
        add(f"generator {name} of workers", train=lambda make=make: make(2), takes=takes)
add("global generators", part="rng", shows="content")


class Reloads(LightningDataModule):
    """Creates its loader, and with it a generator that starts over."""

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(24), 4, shuffle=True, generator=torch.Generator().manual_seed(3))

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(8), 4)


add("generator that a reload makes", data=Reloads, trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4})
