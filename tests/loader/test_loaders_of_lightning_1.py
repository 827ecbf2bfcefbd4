"""The acceptance tests of Lightning 1.9.5 for the positions of its loaders, as laws of `ResumableDataLoader`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from lightning_faulttolerant import ResumableDataLoader
from tests.data_sets import NoisyDataset
from tests.loader.resumed_loops import assert_resumes


class SampledRange(IterableDataset[Tensor]):
    """Is its own iterator, over a sampler that it creates in `__iter__`; workers share the range."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.data = range(self.length)[worker::num_workers]
        self.order = iter(RandomSampler(self.data))
        return self

    def __next__(self) -> Tensor:
        return torch.full((4,), float(self.data[next(self.order)]))


class Tasks(IterableDataset[Tensor]):
    """Draws classes for each epoch, seeds all generators by the epoch, and deals the samples to ranks and workers."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.labels = [number % 10 for number in range(60)]
        self.task = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        random.seed(42 + self.task)
        chosen = random.sample(range(10), 5)
        indices = [index for index, label in enumerate(self.labels) if label in chosen]
        torch.manual_seed(42 + self.task + worker + self.rank)
        place, num_places = self.rank * num_workers + worker, self.num_ranks * num_workers
        sampler = DistributedSampler(range(len(indices)), num_places, place, seed=42 + self.task)
        self.batches = iter(BatchSampler(sampler, 2, drop_last=True))
        self.indices = indices
        self.task += 1
        return self

    def __next__(self) -> Tensor:
        return torch.tensor([self.indices[index] + torch.rand(()).item() for index in next(self.batches)])


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"dataset": NoisyDataset(15), "batch_size": 3},
    "random, own generator": lambda: {
        "dataset": NoisyDataset(15),
        "batch_size": 3,
        "sampler": RandomSampler(range(15), generator=torch.Generator().manual_seed(42)),
    },
    "batch sampler": lambda: {
        "dataset": NoisyDataset(15),
        "batch_sampler": BatchSampler(SequentialSampler(range(15)), 3, drop_last=False),
    },
    "one sample": lambda: {"dataset": NoisyDataset(6), "sampler": RandomSampler(range(6)), "batch_size": 1},
    "sampler of an iterable": lambda: {"dataset": SampledRange(), "batch_size": 3},
    "tasks, first of two ranks": lambda: {"dataset": Tasks(0, 2), "batch_size": None},
    "tasks, second of two ranks": lambda: {"dataset": Tasks(1, 2), "batch_size": None},
}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_loader_continues_after_its_batches(kind: str, num_workers: int) -> None:
    """Its order and its data set's draws are those of the uninterrupted loop, in later epochs too."""

    def make() -> ResumableDataLoader[Any]:
        return ResumableDataLoader(**LOADERS[kind](), num_workers=num_workers)

    assert_resumes(make, num_epochs=2, every=3)
