"""The law for attributes of data sets, samplers, and collate functions that training changes."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, Subset

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import EVERY_STEP
from tests.object_states import (
    EDGE,
    FIRST_EPOCH,
    IN_VALIDATION,
    LATER_EPOCH,
    RAISED,
    RAISED_BEHIND,
    STOPPED,
    assert_carried,
    each_cut,
    each_fault,
    slowly,
)
from tests.runs import Net, each_num_workers, make_trainer
from tests.stateful_objects import CountingDataset, Curriculum, SetsEpoch

# Data sets, samplers, and collate functions.


class RaisesLevel(Callback):
    """Raises the level of the data set as training continues."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.level += 2


@pytest.mark.parametrize("by_callback", [False, True])
@each_num_workers
@each_cut
def test_level_of_a_data_set(fault: Callback, num_workers: int, by_callback: bool) -> None:
    """A level that a hook sets at the start of an epoch is restored in the middle of one."""
    assert_carried(
        fault,
        train=lambda: DataLoader(Curriculum(), batch_size=4, shuffle=True, num_workers=num_workers),
        module=Net if by_callback else SetsEpoch,
        users=lambda: [RaisesLevel()] if by_callback else [],
    )


class SharedLevel(Curriculum):
    """Keeps its level in shared memory, where persistent workers see it."""

    def __init__(self) -> None:
        super().__init__()
        del self.level
        self.shared = torch.zeros(()).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch + 1)

    def __getitem__(self, index: int) -> Tensor:
        return NoisyDataset.__getitem__(self, index) * (1 + self.shared.clone())


class SharedValue(SharedLevel):
    """Keeps its level in a value of ``multiprocessing``."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = multiprocessing.Value("d", 0.0)

    def __getitem__(self, index: int) -> Tensor:
        return NoisyDataset.__getitem__(self, index) * (1 + self.shared.value)


class RaisesSharedValue(Callback):
    """Raises the shared value."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.shared.value += 1


class RaisesSharedLevel(Callback):
    """Raises a level in shared memory at the end of an epoch, when no worker reads it."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        dataset = trainer.train_dataloader.dataset
        dataset.shared.fill_(float(dataset.shared) + 1)


@pytest.mark.parametrize(("dataset", "raises"), [(SharedLevel, RaisesSharedLevel), (SharedValue, RaisesSharedValue)])
@each_cut
def test_level_in_shared_memory(fault: Callback, dataset: type[SharedLevel], raises: type[Callback]) -> None:
    """A tensor or a value in shared memory continues in the memory that workers share."""
    assert_carried(
        fault,
        train=lambda: DataLoader(
            dataset(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=1
        ),
        users=lambda: [raises()],
    )


class Negatives(NoisyDataset):
    """Pairs each row with a negative; the negatives are drawn again on request."""

    def __init__(self) -> None:
        super().__init__(20)
        self.negatives = np.arange(20)

    def redraw(self) -> None:
        """Draw new negatives."""
        self.negatives = np.random.permutation(20)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) - self.rows[self.negatives[index]]


class Redraws(Net):
    """Requests new negatives at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        self.trainer.train_dataloader.dataset.redraw()


@each_num_workers
@each_cut
def test_negatives_of_a_data_set(fault: Callback, num_workers: int) -> None:
    """Negatives that were drawn at the end of an epoch remain for the next one."""
    assert_carried(
        fault,
        train=lambda: DataLoader(Negatives(), batch_size=4, shuffle=True, num_workers=num_workers),
        module=Redraws,
    )


class Growing(NoisyDataset):
    """Gets more rows."""

    def __init__(self) -> None:
        super().__init__(20)
        self.labels = ["old"] * 20

    def grow(self) -> None:
        """Add rows, as active learning does."""
        self.rows = torch.cat([self.rows, self.rows[-4:] + 5 + torch.rand(4, 4)])
        self.labels += ["new"] * 4

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * (10 if self.labels[index] == "new" else 1)


class Grows(Net):
    """Makes its data set grow at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        self.trainer.train_dataloader.dataset.grow()


@pytest.mark.parametrize("is_reloaded", [False, True])
@each_num_workers
@each_cut
def test_data_set_that_grows(fault: Callback, num_workers: int, is_reloaded: bool) -> None:
    """Rows that training has added exist in the next process."""
    assert_carried(
        fault,
        train=lambda: DataLoader(Growing(), batch_size=4, shuffle=True, num_workers=num_workers),
        module=Grows,
        reload_dataloaders_every_n_epochs=int(is_reloaded),
    )


class Leftovers(Sampler[int]):
    """Yields 20 of 24 indices, and keeps the others for the next epoch."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        pool = [*self.kept, *torch.randperm(24).tolist()]
        self.kept = pool[20:]
        yield from pool[:20]


class LateLeftovers(Leftovers):
    """Stores the leftovers when an epoch is over."""

    def __iter__(self) -> Iterator[int]:
        pool = [*self.kept, *torch.randperm(24).tolist()]
        yield from pool[:20]
        self.kept = pool[20:]


class InPlaceShuffle(Sampler[int]):
    """Shuffles its array in place."""

    def __init__(self) -> None:
        self.order = np.arange(20)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class OwnEpoch(Sampler[int]):
    """Seeds itself with its own count of epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(order)


@pytest.mark.parametrize("sampler", [Leftovers, LateLeftovers, InPlaceShuffle, OwnEpoch])
@each_num_workers
@each_cut
def test_sampler_with_a_state(fault: Callback, num_workers: int, sampler: type[Sampler[int]]) -> None:
    """A sampler's state from epoch to epoch continues."""
    assert_carried(
        fault,
        train=lambda: DataLoader(NoisyDataset(24), batch_size=4, sampler=sampler(), num_workers=num_workers),
        max_epochs=3,
    )


class Buckets:
    """A batch sampler that weights its batches by losses from the module."""

    def __init__(self) -> None:
        self.losses = np.ones(20)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        chances = self.losses / self.losses.sum()
        for _ in range(5):
            yield np.random.choice(20, size=4, replace=False, p=chances).tolist()


class Reports(Net):
    """Reports its losses to the batch sampler, at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        sampler = self.trainer.train_dataloader.batch_sampler
        sampler.losses[int(self.global_step) :] += 10 * float(self.layers[3].bias.detach().abs().sum())


@each_num_workers
@each_cut
def test_batch_sampler_that_gets_losses(fault: Callback, num_workers: int) -> None:
    """Losses that a module has reported to a batch sampler continue."""
    assert_carried(
        fault,
        train=lambda: DataLoader(NoisyDataset(20), batch_sampler=Buckets(), num_workers=num_workers),
        module=Reports,
    )


class Shifted(BatchSampler):
    """Yields each index plus `shift`."""

    shift = 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield [(index + self.shift) % 20 for index in batch]


class SetsShift(Net):
    """Sets an attribute of its batch sampler at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        sampler = self.trainer.train_dataloader.batch_sampler
        assert type(sampler) is Shifted
        sampler.shift += 3


@each_num_workers
@each_cut
def test_batch_sampler_whose_attribute_is_set(fault: Callback, num_workers: int) -> None:
    """A module that sets an attribute of the trainer's batch sampler changes the order, as it does in Lightning."""
    assert_carried(
        fault,
        train=lambda: DataLoader(
            NoisyDataset(20), batch_sampler=Shifted(RandomSampler(range(20)), 4, False), num_workers=num_workers
        ),
        module=SetsShift,
    )


class CountingCollate:
    """Counts its batches."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.count += 1
        return torch.stack(samples) * (1 + self.count / 10)


@each_cut
def test_collate_fn_that_counts(fault: Callback) -> None:
    """A ``collate_fn``'s count in this process continues."""
    assert_carried(
        fault, train=lambda: DataLoader(NoisyDataset(20), batch_size=4, shuffle=True, collate_fn=CountingCollate())
    )


@each_fault
def test_data_set_that_counts(fault: Callback) -> None:
    """A data set's count and cache in this process continue."""
    assert_carried(fault, train=lambda: DataLoader(CountingDataset(), batch_size=4, shuffle=True))


@pytest.mark.parametrize("persistent_workers", [False, True])
@each_cut
def test_data_set_that_counts_in_workers(fault: Callback, persistent_workers: bool) -> None:
    """The count and cache of each worker's copy of a data set continue."""
    assert_carried(
        fault,
        train=lambda: DataLoader(
            CountingDataset(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent_workers
        ),
    )


class LevelData(LightningDataModule):
    """Creates a harder data set for each of its loaders, depending on the epochs reported to it."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader:
        """Return a loader on a new data set."""
        dataset = NoisyDataset(20)
        dataset.rows = dataset.rows * (1 + self.level) + sum(self.losses)
        return DataLoader(dataset, batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return a loader."""
        return DataLoader(NoisyDataset(8), batch_size=4)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        """Count it."""
        if self.trainer.training:
            self.losses.append(float(batch.mean()) / 10)
        return batch


class RaisesDataLevel(Net):
    """Reports the end of an epoch to the data module."""

    def on_train_epoch_end(self) -> None:
        self.trainer.datamodule.level += 1


@pytest.mark.parametrize("fault", [FIRST_EPOCH, LATER_EPOCH, EDGE, IN_VALIDATION])
def test_data_module(fault: Callback) -> None:
    """A data module's state continues, and its loaders are those of the epoch."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, reload_dataloaders_every_n_epochs=1, max_epochs=3)
        trainer.fit(RaisesDataLevel(), datamodule=LevelData())
        return trainer

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


# Data that training generates.


class Generated(IterableDataset[Tensor]):
    """Yields generated samples."""

    def __init__(self, generate: Callable[[], Iterator[Tensor]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Tensor]:
        return self.generate()


class OnPolicy(Net):
    """Walks with its own layers, then trains on the walk; the next walk starts at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(4)
        self.seen: list[Tensor] = []
        self.length = 0.0

    def generate(self) -> Iterator[Tensor]:
        """Walk for 20 steps, and yield them."""
        for _ in range(20):
            with torch.no_grad():
                self.place = torch.tanh(self.layers[0](self.place)[:4]) + torch.randn(4)
            self.seen.append(self.place)
        yield from self.seen
        self.length = float(torch.stack(self.seen).norm())
        self.seen.clear()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("length", self.length)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        """Return a loader of its walk."""
        return DataLoader(Generated(self.generate), batch_size=4)


class OffPolicy(OnPolicy):
    """Trains on samples from a buffer, to which each step adds."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = deque([torch.randn(4) for _ in range(30)], maxlen=40)

    def generate(self) -> Iterator[Tensor]:
        """Draw 20 samples together."""
        yield from random.sample(list(self.buffer), 20)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.buffer.append(torch.tanh(self.layers(batch)).mean() + torch.randn(4))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [OnPolicy, OffPolicy])
@pytest.mark.parametrize(
    "fault", [FIRST_EPOCH, LATER_EPOCH, EDGE, slowly(STOPPED), slowly(RAISED), slowly(RAISED_BEHIND)]
)
def test_data_that_training_makes(fault: Callback, module: type[OnPolicy]) -> None:
    """Samples that depend on the weights are drawn again under the earlier weights."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, max_epochs=3)
        torch.manual_seed(1)
        trainer.fit(module(), val_dataloaders=DataLoader(NoisyDataset(4), batch_size=4))
        return trainer

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


class Worn(NoisyDataset):
    """Its samples change with the number of samples it has returned."""

    def __init__(self) -> None:
        super().__init__(20)
        self.num_given = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_given += 1
        return super().__getitem__(index) + self.num_given / 10


class Reloaded(LightningDataModule):
    """Creates a loader for each epoch, of one data set or of a new one."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.whole = Worn()
        self.is_shared = is_shared

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Subset(self.whole if self.is_shared else Worn(), list(range(20))), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(NoisyDataset(8), batch_size=4)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("every", [4, 3])
def test_loader_for_each_epoch(every: int, is_shared: bool) -> None:
    """A loader that is created for an epoch has its baseline from then on; shared objects keep their own."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, reload_dataloaders_every_n_epochs=1, max_epochs=3)
        trainer.fit(Net(), datamodule=Reloaded(is_shared=is_shared))
        return trainer

    assert_resumes_exactly(fit, [KillAt(9)], options={"every_n_train_steps": every})
