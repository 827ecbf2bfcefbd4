"""The law for random numbers that a script draws before `fit`: each start draws others, and the first ones stay.

Each process of these laws is seeded differently before it builds its data.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, random_split

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.drawn_data_sets import LATE, NUM_SAMPLES, Loaders, Names, Shuffled, fit, loaders_of, of, split_at_random
from tests.faults import EVERY_STEP
from tests.object_states import EDGE, FIRST_EPOCH, LATER_EPOCH, slowly
from tests.rank_runs import for_ranks
from tests.runs import Net, make_trainer


def cut(indices: list[int]) -> list[list[int]]:
    """Cut 36 indices into those of training, validation, and test."""
    return [indices[:20], indices[20:28], indices[28:]]


# Each way to split.


def split_twice() -> Loaders:
    """Return parts of two data sets of one kind: one may have an augmentation."""
    train, validation, test = cut(torch.randperm(NUM_SAMPLES).tolist())
    parts = Subset(Names(), train), Subset(Names(), validation), Subset(Names(), test)
    return *loaders_of(*parts[:2]), parts  # type: ignore[return-value]


def split_by_samplers() -> Loaders:
    """Return loaders of one data set, with samplers that select the parts."""
    train, validation = cut(np.random.permutation(28).tolist())[:2]
    dataset = Names(28)
    loaders = [DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)) for part in (train, validation)]
    return loaders[0], loaders[1]


def split_inside_a_concatenation() -> Loaders:
    """Return parts of several data sets."""
    first, second = Names(24), Names(12)
    (a, b), (c, d) = random_split(first, [14, 10]), random_split(second, [6, 6])
    return loaders_of(ConcatDataset([a, c]), ConcatDataset([b, d]))


def shuffled_indices() -> Loaders:
    """Return a part that has the same samples in each start, in another order."""
    indices = list(range(20))
    random.shuffle(indices)
    return loaders_of(Subset(Names(), indices), Names(8))


def split_into_arrays() -> Loaders:
    """Return parts with NumPy indices."""
    train, validation, _ = (np.array(part) for part in cut(np.random.permutation(NUM_SAMPLES).tolist()))
    dataset = Names()
    parts = Subset(dataset, train), Subset(dataset, validation), Subset(dataset, _)  # type: ignore[arg-type]
    return *loaders_of(*parts[:2]), parts  # type: ignore[return-value]


# Each way to shuffle.


class InTuple(Shuffled):
    """Keeps the names in a tuple."""

    def in_order(self, names: list[str]) -> Any:
        return tuple(super().in_order(names))


class InDeque(Shuffled):
    """Keeps the names in a deque."""

    def in_order(self, names: list[str]) -> Any:
        return deque(super().in_order(names))


class Records(Names):
    """Keeps records, each a dict, as read from lines of JSON."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.records = [{"name": name, "boxes": [[i, i + 1]]} for i, name in enumerate(self.names)]
        np.random.shuffle(self.records)  # type: ignore[arg-type]

    def number(self, index: int) -> int:
        return int(self.records[index]["name"][-7:-4]) if hasattr(self, "records") else super().number(index)


class Cases(Shuffled):
    """Has files of the same name in many directories."""

    def in_order(self, names: list[str]) -> Any:
        return super().in_order([f"/data/{name[-7:-4]}/volume.nii" for name in names])

    def number(self, index: int) -> int:
        return int(self.names[index].split("/")[2])


class Ordered(Names):
    """Keeps the order of its samples in an array."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.order = np.random.permutation(num)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(int(self.order[index]))


class OrderedByTensor(Ordered):
    """Keeps the order of its samples in a tensor."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.order = torch.randperm(num)  # type: ignore[assignment]


class Vocabulary(Names):
    """Numbers its words in the order in which a set yields them."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        words = [f"word-{i}" for i in range(5)]
        random.shuffle(words)  # as the hashes of each process do
        self.numbers = {word: i for i, word in enumerate(words)}

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.numbers[f"word-{self.labels[index]}"]


class Words(Vocabulary):
    """Has the words in a list."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.words = list(self.numbers)
        self.numbers = {}

    def __getitem__(self, index: int) -> Tensor:
        return Names.__getitem__(self, index) + self.words.index(f"word-{self.labels[index]}")


SPLITS: list[Callable[[], Loaders]] = [
    split_at_random,
    split_twice,
    split_by_samplers,
    split_inside_a_concatenation,
    shuffled_indices,
    split_into_arrays,
]
ORDERS = [
    of(kind) for kind in (Shuffled, InTuple, InDeque, Records, Cases, Ordered, OrderedByTensor, Vocabulary, Words)
]
FAST = ("split_at_random", "Shuffled", "Vocabulary")


@pytest.mark.parametrize(
    "make", [m if m.__name__ in FAST else slowly(m) for m in (*SPLITS, *ORDERS)], ids=lambda m: m.__name__
)
def test_first_start_stands(make: Callable[[], Loaders]) -> None:
    """Whatever a start draws, the run continues with the first start's draws."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(make, callbacks, directory), [KillAt(3), KillAt(4)], options=EVERY_STEP
    )


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE)])
def test_split_of_a_data_module(fault: Callback) -> None:
    """A split that a data module draws in its ``setup`` also continues as first drawn."""

    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.validation, self.test = random_split(Names(), [20, 8, 8])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, 4, shuffle=True, num_workers=2)

        def val_dataloader(self) -> Any:
            return DataLoader(self.validation, 4)

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Net(), datamodule=Data())
        return trainer

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


@pytest.mark.parametrize("make", [of(Shuffled), slowly(split_at_random)], ids=lambda m: m.__name__)
def test_loader_that_comes_late(make: Callable[[], Loaders]) -> None:
    """A validation loader that is set up after the resume also gets the first start's draws."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(make, callbacks, directory, **LATE), [KillAt(12)], options=EVERY_STEP
    )


@for_ranks[0]
@for_ranks[1]
@pytest.mark.slow
@pytest.mark.parametrize("make", [split_at_random, of(Shuffled)], ids=lambda m: m.__name__)
def test_each_rank_has_its_own(make: Callable[[], Loaders]) -> None:
    """Ranks that drew different numbers continue with them."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(make, callbacks, directory, devices=2, strategy="ddp"),
        [KillAt(3, rank=1)],
        options=EVERY_STEP,
        num_ranks=2,
    )
