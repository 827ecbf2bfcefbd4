"""Data sets that are split and shuffled at random before `fit`, and a fit on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

from tests.runs import Net, make_trainer

Loaders = tuple[Any, Any]
NUM_TRAIN, NUM_VALIDATION = 20, 8
NUM_SAMPLES = 36
"""Eight are left for a test set."""


class Names(Dataset[Tensor]):
    """Its samples derive from file names, which a subclass may put in any order."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        self.names = self.in_order([f"/data/part-{i // 12}/{i:03d}.png" for i in range(num)])
        self.labels = [self.number(i) % 5 for i in range(num)]

    def in_order(self, names: list[str]) -> Any:
        return names

    def number(self, index: int) -> int:
        return int(self.names[index][-7:-4])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        number = float(self.number(index))
        return torch.tensor([number, number**2, self.labels[index], 1.0]) + torch.randn(4)


def loaders_of(train: Any, validation: Any, **arguments: Any) -> Loaders:
    """Return loaders of 5 shuffled batches, and of 2."""
    return DataLoader(train, 4, shuffle=True, **arguments), DataLoader(validation, 4, **arguments)


def split_at_random() -> Loaders:
    """Return the first two parts of torch's own split; a variable keeps the test set."""
    train, validation, _test = random_split(Names(), [20, 8, 8])
    loaders = loaders_of(train, validation, num_workers=2)
    return *loaders, _test  # type: ignore[return-value]


class Shuffled(Names):
    """Shuffles the names; its labels are in the same order."""

    def in_order(self, names: list[str]) -> Any:
        random.shuffle(names)
        return names


def of(kind: Callable[[int], Any]) -> Callable[[], Loaders]:
    """Return a function that creates loaders of two such data sets."""

    def make() -> Loaders:
        return loaders_of(kind(NUM_TRAIN), kind(NUM_VALIDATION))

    make.__name__ = getattr(kind, "__name__", "kind")
    return make


def fit(make: Callable[[], Loaders], callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Fit `Net` on the loaders that `make` returns; the fit keeps its other results alive."""
    train, validation, *_held = make()
    trainer = make_trainer(callbacks, directory, **arguments)
    trainer.fit(Net(), train, validation)
    return trainer


"""The validation loader is set up after the training loader, in a resumed run after the resume."""
