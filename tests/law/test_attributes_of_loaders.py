"""The law for attributes that a subclass of ``DataLoader`` adds, and that it or other code changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import EVERY_STEP
from tests.object_states import assert_carried, each_cut
from tests.runs import each_num_workers, fit_net


class Collates(DataLoader[Tensor]):
    """Counts the batches that it collates, and makes each larger than the one before."""

    def __init__(self, num_workers: int) -> None:
        self.num_collated = 0
        super().__init__(
            NoisyDataset(20), batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=self.put_together
        )

    def put_together(self, samples: list[Tensor]) -> Tensor:
        """Collate."""
        self.num_collated += 1
        return torch.stack(samples) * (1 + 0.1 * self.num_collated)


@each_num_workers
@each_cut
def test_method_that_collates(fault: Callback, num_workers: int) -> None:
    """The count of a loader's own collate method continues, in the main process and in workers."""
    assert_carried(fault, train=lambda: Collates(num_workers))


class Draws(Collates):
    """Draws from its own generator."""

    def __init__(self, num_workers: int) -> None:
        self.generator_of_noise = random.Random(1)
        super().__init__(num_workers)

    def put_together(self, samples: list[Tensor]) -> Tensor:
        return super().put_together(samples) * self.generator_of_noise.random()


@each_num_workers
@each_cut
def test_generator(fault: Callback, num_workers: int) -> None:
    """A loader's own generator continues, in the main process and in workers."""
    assert_carried(fault, train=lambda: Draws(num_workers))


class Scaled(DataLoader[Tensor]):
    """Scales its batches by a factor that a callback sets."""

    scale = 1.0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch * self.scale


class Property(DataLoader[Tensor]):
    """Has its scale behind a property, and an attribute ``position``."""

    _scale = 1.0
    position = (0, 0)

    @property
    def scale(self) -> float:
        """The factor for a batch."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch * self._scale


class Scales(Callback):
    """Sets the scale of the loader that the script created."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.loader.scale = 1.0 + trainer.current_epoch

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.loader.scale += 0.01
        # Users see both as one object.
        assert trainer.train_dataloader.scale == self.loader.scale


class SetsOnTrainers(Scales):
    """Does the same to the trainer's loader."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.loader = trainer.train_dataloader
        super().on_train_epoch_start(trainer)


@pytest.mark.parametrize("by", [Scales, SetsOnTrainers])
@pytest.mark.parametrize("kind", [Scaled, Property])
@each_cut
def test_attribute_that_a_callback_sets(fault: Callback, kind: Any, by: Any) -> None:
    """An attribute that a callback sets takes effect as without the package, and a resume restores it."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = kind(NoisyDataset(20), batch_size=4, shuffle=True)
        return fit_net([by(loader), *callbacks], directory, train=loader)

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


def numbers() -> Iterator[float]:
    """Count up."""
    number = 0.0
    while True:
        number += 0.1
        yield number


class Stream:
    """An object that counts up."""

    def __init__(self) -> None:
        self.number = 0.0

    def __next__(self) -> float:
        self.number += 0.1
        return self.number


class Mixes(DataLoader[Tensor]):
    """Adds the next value of a stream to each batch, as loaders for semi-supervised training do."""

    stream: Any

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch + next(self.stream)


@pytest.mark.parametrize("make_stream", [numbers, Stream])
@each_cut
def test_stream_beside_the_batches(fault: Callback, make_stream: Callable[[], Any]) -> None:
    """A stream that a loader holds continues: its values are drawn again."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = Mixes(NoisyDataset(20), batch_size=4, shuffle=True)
        loader.stream = make_stream()
        return fit_net(callbacks, directory, train=loader)

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)
