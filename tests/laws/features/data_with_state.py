"""Attributes of data sets, samplers, and collate functions that training changes, and data that training makes."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.laws.data_sets import NoisyDataset, of_kind
from tests.laws.rows import Net, add, add_loader, rows_of


class Curriculum(NoisyDataset):
    """Its samples are as hard as its level, its negatives are drawn again on request, and it gets more rows."""

    def __init__(self) -> None:
        super().__init__(24)
        self.level = 0
        self.negatives = np.arange(24)
        self.labels = ["old"] * 24

    def rise(self) -> None:
        """Raise the level, draw the negatives, and add rows, as active learning does."""
        self.level += 1
        self.negatives = np.random.permutation(24)
        self.rows = torch.cat([self.rows, self.rows[-4:] + 5 + torch.rand(4, 4)])
        self.labels += ["new"] * 4

    def __getitem__(self, index: int) -> Tensor:
        index %= len(self.rows)  # in a start without its attributes, a sampler still asks for the new rows
        sample = super().__getitem__(index) - self.rows[self.negatives[index % 24]]
        return sample * (1 + self.level) * (10 if self.labels[index] == "new" else 1)


class Rises(Callback):
    """Raises the level of a data set at the end of each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        [dataset] = of_kind(trainer.train_dataloader, Curriculum)
        dataset.rise()


add_loader(
    "hard data set",
    lambda: DataLoader(Curriculum(), batch_size=4, shuffle=True),
    callbacks=Rises,
    apart="counts",
    ranks=False,
)


class SharedLevel(NoisyDataset):
    """Keeps its level in shared memory, where persistent workers see it: in a tensor, and in a value."""

    def __init__(self) -> None:
        super().__init__(24)
        self.shared = torch.zeros(()).share_memory_()
        self.value = multiprocessing.Value("d", 0.0)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * (1 + self.shared.clone() + self.value.value)


class RaisesShared(Callback):
    """Raises the level at the end of an epoch, when no worker reads it."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        [dataset] = of_kind(trainer.train_dataloader, SharedLevel)
        dataset.shared.fill_(float(dataset.shared) + 1)
        dataset.value.value += 2


add_loader(
    "shared memory",
    lambda: DataLoader(SharedLevel(), 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=1),
    callbacks=RaisesShared,
)


class CountsAndCaches(NoisyDataset):
    """Counts the samples that it has returned, and caches some with their noise."""

    def __init__(self) -> None:
        super().__init__(24)
        self.num_given = 0
        self.cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.num_given += 1
        if index % 2 == 0 and index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache.get(index, self.rows[index]) + self.num_given / 10


class CountingCollate:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.count += 1
        return torch.stack(samples) * (1 + self.count / 10)


add_loader(
    "counts and caches",
    lambda: DataLoader(CountsAndCaches(), 4, shuffle=True, collate_fn=CountingCollate()),
    apart="counts",
)
add_loader(
    "counts and caches in workers",
    lambda: DataLoader(CountsAndCaches(), 4, shuffle=True, num_workers=2, collate_fn=CountingCollate()),
)


class Leftovers(Sampler[int]):
    """Yields 20 of 24 indices, and keeps the others for the next epoch, when an epoch is over."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        pool = [*self.kept, *torch.randperm(24).tolist()]
        yield from pool[:20]
        self.kept = pool[20:]


add_loader("leftovers", lambda: rows_of(24, shuffle=False, sampler=Leftovers())(), ranks=False)


# Data that training makes.


class Generated(IterableDataset[Tensor]):
    """Yields generated samples."""

    def __init__(self, generate: Callable[[], Iterator[Tensor]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Tensor]:
        return self.generate()


class Explores(Net):
    """Walks with its own layers and samples of a buffer, to which each step adds; the next walk starts at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(4)
        self.seen: list[Tensor] = []
        self.experience = deque([torch.full((4,), i / 30) for i in range(30)], maxlen=40)
        self.length = 0.0

    def generate(self) -> Iterator[Tensor]:
        """Walk for 24 steps, and yield them."""
        for past in random.sample(list(self.experience), 24):
            with torch.no_grad():
                self.place = torch.tanh(self.layers[0](self.place)[:4]) + torch.randn(4) + past
            self.seen.append(self.place)
        yield from self.seen
        self.length = float(torch.stack(self.seen).norm())
        self.seen.clear()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.experience.append(torch.tanh(batch).mean() + torch.randn(4))
        self.log("length", self.length)
        return super().training_step(batch, batch_idx)


class FromModule(LightningDataModule):
    """Its samples come from the module."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Generated(self.trainer.lightning_module.generate), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return rows_of(8, shuffle=False)()


add("data that training makes", part="objects", shows="length", module=Explores, data=FromModule, apart="ahead")
