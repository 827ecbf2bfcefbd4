"""What a script draws before ``fit``: each start draws something else, and the first start's draws stay."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, SubsetRandomSampler, random_split

from tests.laws.rows import row


class Names(Dataset[Tensor]):
    """Its samples derive from file names."""

    def __init__(self, num: int) -> None:
        self.names = [f"/data/part-{i // 12}/{i:03d}/volume.nii" for i in range(num)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        number = number_in(self.names[index])
        return torch.tensor([number, number**2, number % 5, 1.0]) + torch.randn(4)


def number_in(name: str) -> float:
    """Return the number in a file name."""
    return float(name.split("/")[3])


def shuffled(values: Iterable[Any]) -> list[Any]:
    """Return values in a drawn order."""
    values = list(values)
    random.shuffle(values)
    return values


@row("data", takes="first autosave", trainer={"num_sanity_val_steps": 0})
class SplitInsideConcatenation(LightningDataModule):
    """Drawn parts of several data sets are joined; the validation loader comes late, in a resumed run after it."""

    def setup(self, stage: str) -> None:
        (a, b), (c, d) = random_split(Names(24), [16, 8]), random_split(Names(12), [8, 4])
        self.parts = ConcatDataset([a, c]), ConcatDataset([b, d])

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 4, shuffle=True, num_workers=2)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 4)


@row("data", takes="first autosave", ranks=False)
class SplitBySamplers(LightningDataModule):
    """Samplers select drawn parts of one data set."""

    def setup(self, stage: str) -> None:
        dataset, order = Names(32), np.random.permutation(32).tolist()
        self.loaders = [DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)) for part in (order[:24], order[24:])]

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]


@row("train", takes="first autosave")
def drawn_orders() -> DataLoader[Tensor]:
    """A data set keeps what it draws in each kind of container."""
    return DataLoader(Drawn(), 4, shuffle=True)


class Drawn(Names):
    """Shuffles names, records, and numbers; a vocabulary has the order in which a set yields its words."""

    def __init__(self) -> None:
        super().__init__(24)
        self.names = shuffled(self.names)
        self.fixed, self.rotating = tuple(shuffled(self.names)), deque(shuffled(self.names))
        self.records = shuffled({"number": i, "boxes": [[i, i + 1]]} for i in range(24))
        self.first, self.second = np.random.permutation(24), torch.randperm(24)
        self.numbers = {f"word-{i}": number for number, i in enumerate(shuffled(range(5)))}

    def __getitem__(self, index: int) -> Tensor:
        names = sum(number_in(each[index]) * 24**place for place, each in enumerate((self.fixed, self.rotating)))
        chosen, record = int(self.first[int(self.second[index])]), self.records[index]["number"]
        word = self.numbers[f"word-{index % 5}"]
        return super().__getitem__(index) + torch.tensor([names, float(chosen), float(record), float(word)])
