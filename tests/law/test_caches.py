"""The law for caches that a data set fills by itself, in workers, larger than what a worker's state may carry."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.data_sets import NoisyDataset
from tests.object_states import EDGE, LATER_EPOCH, assert_carried, slowly


class CachesSamples(NoisyDataset):
    """Decodes a sample once, in 16 kB, and adds noise each time, as `InMemoryDataset` and `CacheDataset` do."""

    def __init__(self) -> None:
        super().__init__(20)
        self.cache: Any = None
        self.num_loaded = self.turn = 0

    def decode(self, index: int) -> Tensor:
        """Return what is cached."""
        return self.rows[index].repeat(1_000)

    def __getitem__(self, index: int) -> Tensor:
        self.num_loaded += 1
        self.turn = (self.turn + 1) % 8  # as at the start when the cache is too large to be carried
        if self.cache is None:
            self.cache = [None] * len(self)
        if self.cache[index] is None:
            self.cache[index] = self.decode(index)
        return self.cache[index][:4] + random.random() + self.num_loaded / 100 + self.turn


class CachesInDict(CachesSamples):
    """Keeps the samples in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = self.decode(index)
        return self.cache[index][:4] + torch.rand(4)


class CachesNoise(CachesSamples):
    """Caches samples with their noise: a new worker would draw other noise."""

    def decode(self, index: int) -> Tensor:
        return super().decode(index) + torch.rand(())


def loader(dataset: NoisyDataset) -> DataLoader[Tensor]:
    """Return a loader whose workers keep their caches."""
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("dataset", [CachesSamples, slowly(CachesInDict)])
@pytest.mark.parametrize("fault", [LATER_EPOCH, slowly(EDGE)])
def test_cache_is_filled_again(fault: Callback, dataset: type[CachesSamples]) -> None:
    """A cache whose entries depend on nothing but the index is no lost state; counts next to it continue."""
    assert_carried(fault, train=lambda: loader(dataset()))


class Filled(CachesNoise):
    """Has all samples in the cache before the fit."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.cache = [row.repeat(1_000) + torch.rand((), generator=draws) for row in self.rows]


def test_cache_of_random_samples_is_refused() -> None:
    """A cache whose entries are drawn is state: a resume without it is refused. The remedies of the message help."""
    remedies = "fill it before fit, let its values depend only on the index of a sample, or pass num_workers=0"
    with pytest.raises(NotTheSame, match=rf"cache of a worker: more than 64 kB have changed; {remedies}"):
        assert_carried(KillAt(8), train=lambda: loader(CachesNoise()))
    assert_carried(KillAt(8), KillAt(1), train=lambda: loader(Filled()))
    assert_carried(KillAt(8), KillAt(1), train=lambda: DataLoader(CachesNoise(), batch_size=4, shuffle=True))
