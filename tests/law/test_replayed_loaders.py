"""The law for state that replayed loaders keep beside their batches, or read elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut, Net, assert_continues, each_cut, fit_net


class CountsSamples(DataLoader[Any]):
    """Keeps a count that does not follow from its batches."""

    num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_samples += len(batch)
            yield batch


class ReadsCount(Net):
    """Weights its loss with the count of its loader."""

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
    """Sets the noise."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        trainer.train_dataloader.noise = 0.5 * (2 + trainer.current_epoch)


@each_cut
@pytest.mark.parametrize(
    ("kind", "module", "users"),
    [(CountsSamples, ReadsCount, list), (SeededByEpoch, Net, list), (Noisier, Net, lambda: [SetsNoise()])],
)
def test_numbers_on_a_torch_loader(
    kind: Any, module: Callable[[], Net], users: Callable[[], list[Callback]], cut: Cut
) -> None:
    """Numbers in attributes of a ``DataLoader`` subclass are restored."""

    def train() -> Any:
        return kind(NoisyDataset(), batch_size=4, shuffle=True)

    assert_continues(cut, train=train, module=module, users=users, max_epochs=3)


class CountedSamples(NoisyDataset):
    """Counts the samples that it gives, and makes each larger than the one before."""

    num_given = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_given += 1
        return super().__getitem__(index) * (1 + 0.01 * self.num_given)


class HoldsLoader:
    """Yields the batches of a torch loader that it holds."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (batch + torch.randn(()) for batch in self.loader)


@each_cut
@pytest.mark.parametrize("kind", [HoldsLoader, None])
def test_data_set_that_counts(kind: Any, cut: Cut) -> None:
    """The count of a data set inside of a replayed loader is that of the start of the epoch, before it is replayed."""

    def train() -> Any:
        if kind is None:
            return SeededByEpoch(CountedSamples(), batch_size=4, shuffle=True)
        return kind(DataLoader(CountedSamples(), batch_size=4, shuffle=True))

    assert_continues(cut, train=train, max_epochs=3)


seed = 0


class SeededByGlobal:
    """Seeds each epoch with a global of its module."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(8):
            yield torch.randn(4, 4, generator=generator) + torch.randn(())


class SetsSeed(Callback):
    """Sets the global when an epoch starts, and again in its middle."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        global seed
        seed = 100 + trainer.current_epoch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        global seed
        if batch_idx == 1:
            seed = 0


@each_cut
def test_global_that_an_iteration_reads(cut: Cut) -> None:
    """An epoch is drawn again with the globals of its start, and training continues with the current ones."""
    assert_continues(cut, train=SeededByGlobal, users=lambda: [SetsSeed()], max_epochs=3)


class BeginsAtOnce:
    """Counts and draws when an iteration starts."""

    def __init__(self) -> None:
        self.num_begun = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        self.num_begun += 1
        shift = torch.randn(())
        return (torch.randn(4, 4) + shift + self.num_begun for _ in range(8))


@pytest.mark.parametrize("kind", [SeededByGlobal, BeginsAtOnce])
@pytest.mark.parametrize("cut", [FIRST_EPOCH, LATER_EPOCH, Cut(kill=16, every=1, continues_at=(2, 0))])
def test_one_loader_for_training_and_validation(kind: Any, cut: Cut) -> None:
    """One object continues although Lightning requests its validation iterator right after training began on it."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = kind()
        return fit_net(callbacks, directory, train=loader, validation=loader, num_sanity_val_steps=0, max_epochs=3)

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.epoch, cost.batch) == cut.continues_at


class Source:
    """Counts the batches that it has returned to all of its loaders, and keeps the last ones."""

    def __init__(self) -> None:
        self.num_given = 0
        self.last: list[Tensor] | None = None

    def give(self) -> Tensor:
        """Return a batch that depends on earlier ones."""
        self.num_given += 1
        self.last = [*(self.last or [torch.zeros(4, 4)])[-2:], torch.randn(4, 4)]
        return sum(self.last, start=torch.full((4, 4), self.num_given / 8))


class FromSource:
    """Yields batches from a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        return (self.source.give() for _ in range(8))


@each_cut
@pytest.mark.parametrize("is_one", [False, True])
def test_what_the_sanity_check_moves(is_one: bool, cut: Cut) -> None:
    """A resumed run has no sanity check, but starts with that check's changes to objects that training shares."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        train = FromSource(Source())
        validation = train if is_one else FromSource(train.source)
        return fit_net(callbacks, directory, train=train, validation=validation, max_epochs=3)

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.epoch, cost.batch) == cut.continues_at
