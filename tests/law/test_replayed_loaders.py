"""The law for what loaders that are followed by what they give keep beside their batches, or read elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.data_sets import NoisyDataset
from tests.runs import Cut, Net, assert_goes_on, each_cut


class CountsSamples(DataLoader[Any]):
    """Keeps a count that its batches don't follow from."""

    num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_samples += len(batch)
            yield batch


class ReadsCount(Net):
    """Weighs its loss with the count of its loader."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.train_dataloader.num_samples


class SeededByEpoch(DataLoader[Any]):
    """Counts its epochs, and seeds each with its number."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.epoch)
        for batch in super().__iter__():
            yield batch + torch.randn(batch.shape, generator=generator)


class Noisier(DataLoader[Any]):
    """Adds more noise to each batch, by a setting that a callback changes."""

    noise = 0.5

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            yield batch + self.noise * number


class SetsNoise(Callback):
    """Sets that."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        trainer.train_dataloader.noise = 0.5 * (1 + trainer.current_epoch)


@each_cut
@pytest.mark.parametrize(
    ("kind", "module", "users"),
    [(CountsSamples, ReadsCount, list), (SeededByEpoch, Net, list), (Noisier, Net, lambda: [SetsNoise()])],
)
def test_numbers_on_a_torch_loader(
    kind: Any, module: Callable[[], Net], users: Callable[[], list[Callback]], cut: Cut
) -> None:
    """Numbers in the attributes of a class of ``DataLoader`` are what they were."""

    def train() -> Any:
        return kind(NoisyDataset(), batch_size=4, shuffle=True)

    assert_goes_on(cut, train=train, module=module, users=users, max_epochs=3)
