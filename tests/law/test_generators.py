"""The law for generators that objects hold: they continue like the global ones, wherever they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.data_sets import (
    HoldingDataset,
    LazyDataset,
    LocalDataset,
    NoisyCollate,
    NoisyDataset,
    PythonShuffle,
    TransformedDataset,
    closed_over_collate,
)
from tests.modules import HoldingNet
from tests.runs import (
    FIRST_EPOCH,
    LATER_EPOCH,
    LATER_SHORT_EPOCH,
    Cut,
    Net,
    assert_continues,
    each_cut,
    each_num_workers,
    each_short_cut,
)


@each_num_workers
@each_cut
def test_held_by_the_data_set(cut: Cut, num_workers: int) -> None:
    """Generators of each kind in a data set continue, in this process and in each worker's copy."""
    assert_continues(
        cut, train=lambda: DataLoader(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
    )


def test_held_by_the_data_set_in_workers_that_live_on() -> None:
    """In persistent workers, each copy's generators continue from epoch to epoch, in validation too."""

    def loader(length: int) -> DataLoader:
        return DataLoader(HoldingDataset(length), batch_size=4, num_workers=2, persistent_workers=True)

    assert_continues(LATER_EPOCH, train=lambda: loader(32), validation=lambda: loader(12), max_epochs=3)


@each_num_workers
@each_cut
def test_held_by_a_transform(cut: Cut, num_workers: int) -> None:
    """Generators in a nested transform of the data set continue."""
    assert_continues(
        cut, train=lambda: DataLoader(TransformedDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
    )


@each_num_workers
@pytest.mark.parametrize(
    "make_dataset", [lambda: LazyDataset(has_attribute=True), lambda: LazyDataset(has_attribute=False), LocalDataset]
)
def test_made_when_first_used(num_workers: int, make_dataset: Callable[[], NoisyDataset]) -> None:
    """A generator that a data set creates on first use continues, though the new process does not have one yet."""
    assert_continues(
        FIRST_EPOCH,
        train=lambda: DataLoader(make_dataset(), batch_size=4, shuffle=True, num_workers=num_workers),
    )


@each_num_workers
@each_cut
def test_held_by_a_sampler(cut: Cut, num_workers: int) -> None:
    """A sampler's own generator continues, for users' samplers and torch's."""

    def train() -> DataLoader:
        sampler = PythonShuffle(rng=random.Random(0))
        return DataLoader(NoisyDataset(), batch_size=4, sampler=sampler, num_workers=num_workers)

    def validation() -> DataLoader:
        sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(NoisyDataset(8), batch_size=4, sampler=sampler, num_workers=num_workers)

    assert_continues(cut, train=train, validation=validation)


@each_num_workers
@pytest.mark.parametrize("make_collate", [NoisyCollate, closed_over_collate])
def test_held_by_a_collate_fn(num_workers: int, make_collate: Any) -> None:
    """A generator of a ``collate_fn`` continues, in an attribute or a closure."""
    assert_continues(
        LATER_EPOCH,
        train=lambda: DataLoader(
            NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=make_collate()
        ),
    )


@each_short_cut
def test_held_by_the_module(cut: Cut) -> None:
    """Generators of the module that its step uses continue."""
    assert_continues(cut, module=HoldingNet)


class NoisySGD(torch.optim.SGD):
    """Adds noise to the weights from its own generator."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.rng = torch.Generator().manual_seed(0)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += 0.01 * torch.randn(parameter.shape, generator=self.rng)
        return loss


class NoisyRates(Net):
    """Its optimizer has a generator, and so does its scheduler's function."""

    def configure_optimizers(self) -> Any:
        optimizer, rng = NoisySGD(self.parameters()), random.Random(0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: rng.random())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.slow
def test_held_by_optimizer_and_scheduler() -> None:
    """Generators of an optimizer and of a scheduler's function continue."""
    assert_continues(LATER_SHORT_EPOCH, module=NoisyRates)
