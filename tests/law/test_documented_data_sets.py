"""The data sets of Lightning 1.9's page on fault-tolerant training, copied verbatim: all continue exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.runs import Cut, Net, assert_continues, each_cut, each_num_workers, make_trainer

# ruff: noqa: UP037 - from here on the page's own code
# fmt: off


class RandomDataset(Dataset):

    def __init__(self, size: int, length: int):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


# does not support fault tolerance training!
class UnsupportedRandomIterableDataset(IterableDataset):

    def __init__(self, size: int, count: int):
        self.count = count
        self.size = size

    def __iter__(self):
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDataset(IterableDataset):

    def __init__(self, size: int, length: int):
        self.data = torch.randn(length, size)
        # expose the sampler as an attribute
        self.sampler = RandomSampler(range(length))

    def __iter__(self) -> "RandomIterableDataset":
        # expose the generator from the sampler as an attribute
        # the ``sampler_iter`` will be wrapped by Lightning to ensure
        # we can capture random seeds and iteration count for fast-forward samplers
        # while restarting.
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> torch.Tensor:
        # call next on the iterator and get the associated data.
        # the logic here can become more complex but the sampler
        # should be the central piece for fetching the next sample
        index = next(self.sampler_iter)
        return self.data[index]


class LitModel(Net):
    def train_dataloader(self):
        loader_a = torch.utils.data.DataLoader(range(8), batch_size=4)
        loader_b = torch.utils.data.DataLoader(range(16), batch_size=4)
        return {"loader_a": loader_a, "loader_b": loader_b}

    def training_step(self, batch, batch_idx):
        # access the data in the same format as the collection of dataloaders.
        # dict, list are supported.
        loader_a = batch["loader_a"]
        loader_b = batch["loader_b"]
        return super().training_step(torch.stack([loader_a, loader_b] * 2).float(), batch_idx)

# fmt: on


def built(make: Callable[[], Any]) -> Any:
    """Return a data set whose rows are the same in every process, as in a script that seeds first."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


# Each worker yields the whole of an iterable data set.
PAGE: dict[str, Callable[[int], Any]] = {
    "map-style": lambda num_workers: RandomDataset(4, 32),
    "iterable, not supported there": lambda num_workers: UnsupportedRandomIterableDataset(4, 32 // (num_workers or 1)),
    "iterable with the protocol": lambda num_workers: RandomIterableDataset(4, 32 // (num_workers or 1)),
}


@each_num_workers
@each_cut
@pytest.mark.parametrize("name", PAGE)
def test_data_set_of_the_page(name: str, cut: Cut, num_workers: int) -> None:
    """A data set of the page continues with the next sample, including the one that the page calls unsupported."""

    def train() -> DataLoader:
        data = built(lambda: PAGE[name](num_workers))
        return DataLoader(data, batch_size=4, shuffle=name == "map-style" or None, num_workers=num_workers)

    assert_continues(cut, train=train)


def test_loaders_of_the_page() -> None:
    """The two training loaders continue, although the page says that their random state is not restored."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(LitModel(), val_dataloaders=DataLoader(NoisyDataset(8), batch_size=4))
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(6)], options={"every_n_train_steps": 5})
    assert (cost.epoch, cost.batch) == (1, 1)
