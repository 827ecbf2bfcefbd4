"""What a script draws before ``fit``: each start draws something else, and the first start's draws stay."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, SubsetRandomSampler, random_split

from tests.laws.rows import add, row

NUM_SAMPLES = 40


class Names(Dataset[Tensor]):
    """Its samples derive from file names in a drawn order."""

    def __init__(self, num: int = NUM_SAMPLES, container: Any = None) -> None:
        names = [f"/data/part-{i // 12}/{i:03d}/volume.nii" for i in range(num)]
        if container is not None:
            random.shuffle(names)
        self.names = (container or list)(names)

    def number(self, index: int) -> int:
        """Return the number in a name."""
        return int(self.names[index].split("/")[3])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        number = float(self.number(index))
        return torch.tensor([number, number**2, number % 5, 1.0]) + torch.randn(4)


def cut(indices: Any) -> list[list[int]]:
    """Cut 40 indices into those of training, validation, and test."""
    indices = [int(index) for index in indices]
    return [indices[:24], indices[24:32], indices[32:]]


class Records(Names):
    """Keeps records, each a dict, as read from lines of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.records = [{"number": i, "boxes": [[i, i + 1]]} for i in range(24)]
        np.random.shuffle(self.records)  # type: ignore[arg-type]

    def number(self, index: int) -> int:
        return int(self.records[index]["number"])


class Ordered(Names):
    """Keeps the order of its samples in an array and in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = np.random.permutation(24), torch.randperm(24)

    def number(self, index: int) -> int:
        return int(self.first[int(self.second[index])])


class Vocabulary(Names):
    """Numbers its words in the order in which a set yields them."""

    def __init__(self) -> None:
        super().__init__()
        words = [f"word-{i}" for i in range(5)]
        random.shuffle(words)  # as the hashes of each process do
        self.numbers = {word: i for i, word in enumerate(words)}

    def number(self, index: int) -> int:
        return 10 * self.numbers[f"word-{index % 5}"]


@row("data")
class DrawnSplit(LightningDataModule):
    """A split is drawn in ``setup``, also for the samples of the validation."""

    def setup(self, stage: str) -> None:
        self.parts = random_split(Names(), [24, 8, 8])

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 4, shuffle=True, num_workers=2)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 4)


@row("data")
class SplitBySamplers(LightningDataModule):
    """Samplers select drawn parts of one data set."""

    def setup(self, stage: str) -> None:
        dataset = Names()
        parts = cut(np.random.permutation(NUM_SAMPLES))[:2]
        self.loaders = [DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)) for part in parts]

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]


@row("data", trainer={"num_sanity_val_steps": 0})
class SplitInsideConcatenation(LightningDataModule):
    """Drawn parts of several data sets are joined; the validation loader comes late, in a resumed run after it."""

    def setup(self, stage: str) -> None:
        (a, b), (c, d) = random_split(Names(24), [16, 8]), random_split(Names(12), [8, 4])
        self.parts = ConcatDataset([a, c]), ConcatDataset([b, d])

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 4)


@row("train")
def drawn_indices() -> DataLoader[Tensor]:
    """A part has the same samples in each start, in another order."""
    return DataLoader(Subset(Names(24), torch.randperm(24).tolist()), 4)


for name, made in {
    "drawn list": lambda: Names(24, list),
    "drawn tuple": lambda: Names(24, tuple),
    "drawn deque": lambda: Names(24, deque),
    "drawn records": Records,
    "drawn orders": Ordered,
    "drawn vocabulary": Vocabulary,
}.items():
    add(name, train=lambda made=made: DataLoader(Subset(made(), range(24)), 4, shuffle=True))
