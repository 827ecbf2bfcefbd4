"""Loaders that have a ``state_dict``: torchdata's, and those of users."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.laws.data_sets import CountingDataset, HoldingDataset, NoisyDataset, StatefulStream
from tests.laws.rows import add, rows_of

# torchdata 0.11 calls a function that torch 2.13 has deprecated.
WARNS = ("'set_vital' is deprecated", "Your `IterableDataset` has `__len__` defined")
CARRIED: dict[str, Any] = {"part": "loaders", "shows": "content", "warns": WARNS, "apart": "counts"}
TWO: dict[str, Any] = {"num_workers": 2}


LOADERS: dict[str, Callable[[], Any]] = {
    "torchdata": lambda: StatefulDataLoader(HoldingDataset(), 4, shuffle=True),
    "torchdata with workers": lambda: StatefulDataLoader(
        HoldingDataset(), 4, shuffle=True, persistent_workers=True, snapshot_every_n_steps=3, **TWO
    ),
    "torchdata with two such data sets": lambda: StatefulDataLoader(CountingDataset(), 4, **TWO),
    "torchdata with a stream with a state": lambda: StatefulDataLoader(StatefulStream(), 4, **TWO),
}
for name, make in LOADERS.items():
    add(name, train=make, **CARRIED)


class KeepsLoader(LightningDataModule):
    """Saves and restores its loader's state, as torchdata's documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = StatefulDataLoader(NoisyDataset(), 4, shuffle=True, **TWO)

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return rows_of(8, shuffle=False)()

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict["loader"])


add("torchdata in a data module that keeps its state", data=KeepsLoader, ranks=False, **CARRIED)


class Prefetching:
    """A user's loader; its state is `ahead` batches ahead of those that it has yielded."""

    def __init__(self, *, ahead: int = 0) -> None:
        self.ahead, self.next, self.order = ahead, 0, list(range(6))

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        if self.next % 6 == 0:
            self.next = 0
            random.shuffle(self.order)
        while self.next < 6:
            number = self.order[self.next]
            self.next += 1
            yield torch.full((4, 4), number / 6) + random.gauss(0, 1) + torch.randn(4, 4)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next + self.ahead, "order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next, self.order = state_dict["next"], state_dict["order"]


add("own loader with a state", train=Prefetching, validation=Prefetching, **CARRIED)
