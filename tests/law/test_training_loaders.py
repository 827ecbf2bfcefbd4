"""Several training loaders, loaders without a length, and steps that fetch their batches resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.data_sets import DrawingSampler, HoldingDataset, NoisyDataset, Unsized
from tests.runs import (
    Cut,
    Fetches,
    Net,
    TwoLoaders,
    assert_continues,
    assert_loader_continues,
    each_cut,
    each_num_workers,
    each_short_cut,
)

# The long one has 8 batches, the short one 3; at the cuts it is in its second and third cycle.


def pair(num_workers: int, **arguments: Any) -> dict[str, DataLoader[Any]]:
    """Return a long and a short loader, both shuffled."""
    return {
        "long": DataLoader(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers, **arguments),
        "short": DataLoader(NoisyDataset(12), batch_size=4, shuffle=True, num_workers=num_workers, **arguments),
    }


@each_cut
@each_num_workers
def test_dict_of_loaders(num_workers: int, cut: Cut) -> None:
    """With a dict of loaders, the short one cycled, the resumed run is the rest of the uninterrupted one."""
    assert_continues(cut, train=lambda: pair(num_workers), module=TwoLoaders)


@pytest.mark.filterwarnings("ignore:Trying to infer the .batch_size.")
@each_num_workers
@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_mode_of_a_combined_loader(mode: str, num_workers: int) -> None:
    """A run resumes in a later epoch, with the short loader exhausted or in its second cycle."""
    cut = Cut(kill=14, every=13, continues_at=(1, 5))
    assert_continues(cut, train=lambda: CombinedLoader(pair(num_workers), mode), module=TwoLoaders)


@each_num_workers
def test_shortest_loader_ends_the_epoch(num_workers: int) -> None:
    """With ``min_size`` an epoch has 3 batches; the long loader is left midway each time."""
    cut = Cut(kill=5, every=4, continues_at=(1, 1))
    assert_continues(cut, train=lambda: CombinedLoader(pair(num_workers), "min_size"), module=TwoLoaders, max_epochs=3)


def test_persistent_workers_of_several_loaders() -> None:
    """Persistent workers continue over cycles and epochs with their random states."""
    cut = Cut(kill=21, every=20, continues_at=(2, 4))
    assert_continues(cut, train=lambda: pair(2, persistent_workers=True), module=TwoLoaders, max_epochs=3)


class Nested(Net):
    """Trains on a list that contains a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, others = batch
        return super().training_step(first + others["a"] + others["b"], batch_idx)


@each_short_cut
def test_nested_loaders(cut: Cut) -> None:
    """A list that contains a dict of loaders resumes like one loader."""

    def loader() -> DataLoader[Any]:
        return DataLoader(NoisyDataset(20), batch_size=4, shuffle=True)

    assert_continues(cut, train=lambda: [loader(), {"a": loader(), "b": loader()}], module=Nested)


UNSIZED: dict[str, Callable[[int, int], Any]] = {
    "one": lambda rows, workers: Unsized(HoldingDataset(rows), batch_size=4, shuffle=True, num_workers=workers),
    "drawing sampler": lambda rows, workers: Unsized(
        NoisyDataset(rows), batch_size=4, sampler=DrawingSampler(rows), num_workers=workers
    ),
}


@each_cut
@each_num_workers
@pytest.mark.parametrize("name", UNSIZED)
def test_loader_without_a_length(name: str, num_workers: int, cut: Cut) -> None:
    """The batch that Lightning fetches ahead is fetched again under the random states of its first fetch."""
    assert_loader_continues(cut, num_workers, train=lambda num_rows: UNSIZED[name](num_rows, num_workers))


@pytest.mark.parametrize(("kill", "batch"), [(11, 2), (12, 3), (13, 4)])
@each_num_workers
def test_loader_without_a_length_beside_a_cycled_one(num_workers: int, kill: int, batch: int) -> None:
    """The run resumes exactly even if the batch fetched ahead has started the short loader's next cycle."""

    def loaders() -> dict[str, Any]:
        return {**pair(num_workers), "long": Unsized(HoldingDataset(), batch_size=4, num_workers=num_workers)}

    cut = Cut(kill=kill, every=kill - 1, continues_at=(1, batch))
    assert_continues(cut, train=loaders, module=TwoLoaders)


@each_cut
@each_num_workers
def test_limited_batches_of_a_loader_without_a_length(num_workers: int, cut: Cut) -> None:
    """A run resumes if ``limit_train_batches`` ends the epoch in the middle of the data."""

    def train(num_rows: int) -> Any:
        return Unsized(HoldingDataset(2 * num_rows), batch_size=4, shuffle=True, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=train, limit_train_batches=8 if num_workers else 5)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@each_cut
@each_num_workers
def test_step_that_fetches_by_itself(num_workers: int, cut: Cut) -> None:
    """With ``training_step(self, dataloader_iter)``, the position counts fetches of finished steps."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(
            HoldingDataset(num_rows), batch_size=4, shuffle=True, num_workers=num_workers
        ),
        module=Fetches,
    )


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@each_num_workers
def test_two_fetches_a_step(num_workers: int) -> None:
    """A step may fetch twice: an epoch of 8 batches has 4 steps."""
    cut = Cut(kill=6, every=5, continues_at=(1, 1))
    assert_continues(
        cut,
        train=lambda: DataLoader(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers),
        module=lambda: Fetches(2),
        max_epochs=3,
    )
