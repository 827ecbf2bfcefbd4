"""Lightning 1.9.5's acceptance tests of its fault tolerance, as laws, including the cases that it marked as failing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset, counted
from tests.faults import ALWAYS, RaiseIn
from tests.runs import Net, fit_net, make_trainer

# A fit that fails at a step, with each kind of data.


class Listed(Net):
    """Trains on a dict of batches, or on a list of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) else [batch]
        rows = [part["data"] if isinstance(part, dict) else part for part in parts if part is not None]
        return super().training_step(torch.cat([row + 0.01 * torch.rand_like(row) for row in rows]), batch_idx)


class Rows(IterableDataset[Any]):
    """Is its own iterator over a sequential sampler."""

    def __init__(self, *, named: bool = False) -> None:
        self.named = named
        self.sampler = SequentialSampler(range(6))

    def __iter__(self) -> Iterator[Any]:
        self.order = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        row = torch.full((4,), float(next(self.order)))
        return {"data": row} if self.named else row


DATA: dict[str, Callable[[], list[Any]]] = {
    "random": lambda: [NoisyDataset(6)],
    "iterable": lambda: [Rows()],
    "iterable of dicts": lambda: [Rows(named=True)],
    "map and iterable": lambda: [NoisyDataset(6), Rows()],
    "two iterables": lambda: [Rows(), Rows()],
    "two random": lambda: [NoisyDataset(6), NoisyDataset(6)],  # 1.9: "TODO: support in the future"
}


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
@pytest.mark.parametrize("data", DATA)
def test_fit_that_failed_at_a_step_continues_there(data: str, mode: str) -> None:
    """A fit that fails in the second of three epochs continues with the uninterrupted fit's batches and weights."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loaders = [DataLoader(dataset, batch_size=2) for dataset in DATA[data]()]
        train = loaders[0] if len(loaders) == 1 else CombinedLoader(loaders, mode)
        return fit_net(callbacks, directory, train=train, module=Listed(), max_epochs=3)

    [cost] = assert_resumes_exactly(fit, [RaiseIn("on_train_batch_start", 4)], options=ALWAYS)
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, 1, 1)


# A fit that fails in validation.


class RaiseInValidation(Callback):
    """Raises at one batch of one validation loader, in one epoch."""

    def __init__(self, *, epoch: int, loader: int, batch: int) -> None:
        self.place = (epoch, loader, batch)

    def on_validation_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking and (trainer.current_epoch, dataloader_idx, batch_idx) == self.place:
            raise ZeroDivisionError("in validation")


class Counts(Callback):
    """Keeps the counters of Lightning's loops as they are at the end of training."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        state = trainer.fit_loop.state_dict()
        self.counters = {name: value for name, value in state.items() if name.endswith("progress")}


class ManyValidated(Listed):
    """Validates on several loaders."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("num_loaders", [1, 2, 3])
@pytest.mark.parametrize("interval", [0.5, 1.0])  # 1.9 with 0.5: a known failure
def test_fit_that_failed_in_validation_continues_there(interval: float, num_loaders: int, epoch: int) -> None:
    """No training batch repeats; training, validation, and the loops' counters are as without the failure."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        validation = [DataLoader(NoisyDataset(8), batch_size=2) for _ in range(num_loaders)]
        train = [DataLoader(NoisyDataset(8), batch_size=2)]
        trainer = make_trainer([Counts(), *callbacks], directory, val_check_interval=interval, num_sanity_val_steps=0)
        trainer.fit(ManyValidated(), train, validation)
        return trainer

    fault = RaiseInValidation(epoch=epoch, loader=num_loaders - 1, batch=1)
    [cost] = assert_resumes_exactly(fit, [fault], options=ALWAYS)
    assert (cost.exit_code, cost.epoch, cost.num_batches_twice) == (1, epoch, 0)
    assert cost.batch == 4 * interval


# A fit that a signal stops.


class SignalIn(Callback):
    """Sends SIGTERM to this process in a hook, and at a given batch if the hook is one of a batch."""

    def __init__(self, hook: str, batch: int) -> None:
        self.hook, self.batch = hook, batch

    def strike(self, hook: str, trainer: Trainer, batch: int | None = None) -> None:
        if hook == self.hook and batch in (None, self.batch) and trainer.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.strike("training step", trainer, batch_idx)

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.strike("validation step", trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.strike("end of training", trainer)

    def on_validation_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.strike("end of validation", trainer)


@pytest.mark.parametrize("interval", [0.5, 1.0])
@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("training step", 2),
        ("training step", 3),
        ("validation step", 2),
        ("validation step", 3),
        ("end of training", 0),
        ("end of validation", 0),
    ],
)
def test_fit_that_a_signal_stopped_continues(hook: str, batch: int, interval: float) -> None:
    """A fit that a signal stops, even after an epoch's end, finishes its batch and repeats none."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        train, validation = DataLoader(NoisyDataset(8), batch_size=2), DataLoader(NoisyDataset(8), batch_size=2)
        arguments = {"val_check_interval": interval, "num_sanity_val_steps": 0}
        return fit_net(callbacks, directory, train=train, validation=validation, module=Listed(), **arguments)

    [cost] = assert_resumes_exactly(fit, [SignalIn(hook, batch)], options=ALWAYS)
    assert (cost.exit_code, cost.num_batches_twice) == (143, 0)


# Loaders that 1.9 refused.


class NoSampler(IterableDataset[Tensor]):
    """A generator: has neither a sampler nor ``__next__``."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(32):
            yield torch.rand(4)


class OwnRandomSampler(RandomSampler):
    """Not one of torch's own samplers."""


class RandomRows(Rows):
    """Has a random sampler as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = OwnRandomSampler(range(32))


def loader(**arguments: Any) -> DataLoader[Any]:
    """Return a loader of 8 batches."""
    return DataLoader(**{"dataset": NoisyDataset(32), "batch_size": 4, **arguments})


REFUSED: dict[str, Callable[[], Any]] = {
    "two loaders": lambda: [loader(), loader()],
    "two in a dict of lists": lambda: {"a": [loader(), loader(dataset=NoSampler())], "b": loader()},
    "two that cycle": lambda: CombinedLoader([loader(), loader()], "max_size_cycle"),
    "distributed, shuffled": lambda: loader(sampler=DistributedSampler(NoisyDataset(32), 1, 0, shuffle=True)),
    "two distributed": lambda: [loader(sampler=DistributedSampler(NoisyDataset(32), 1, 0)) for _ in range(2)],
    "random": lambda: [loader(shuffle=True), loader()],
    "own random": lambda: loader(sampler=OwnRandomSampler(NoisyDataset(32))),
    "iterable without a sampler": lambda: loader(dataset=NoSampler()),
    "iterable with a random sampler": lambda: loader(dataset=RandomRows()),
}


class Nested(Listed):
    """Trains on any collection of batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = [*batch["a"], batch["b"]]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", REFUSED)
def test_loader_that_was_refused_continues(kind: str) -> None:
    """A loader that 1.9 refused resumes like any other when killed in its second epoch."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=REFUSED[kind](), module=Nested())

    [cost] = assert_resumes_exactly(fit, [KillAt(10)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (1, 2)


# User objects that keep their state.


@pytest.mark.parametrize("num_workers", [0, 2])  # 1.9 with 2: a known failure
def test_stateful_sampler_and_data_set_continue(num_workers: int) -> None:
    """The counters of both are right, including each worker's."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        plain = counted()
        train = DataLoader(plain.dataset, batch_size=4, sampler=plain.sampler, num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    [cost] = assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, 3)


def test_manual_mode_continues_with_two_loaders() -> None:
    """Each loader continues where its sampler and data set say; the failure follows the first of two validations."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        if any(isinstance(callback, FaultTolerance) for callback in callbacks):
            os.environ[VARIABLE] = "manual"
        arguments = {"max_epochs": 1, "val_check_interval": 0.5}
        return fit_net(callbacks, directory, train=[counted(), counted()], module=Listed(), **arguments)

    [cost] = assert_resumes_exactly(fit, [RaiseIn("on_train_batch_start", 6)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, 0, 6)


# The loops' counters, and the workers.


class ManyOptimizers(Listed):
    """Steps several optimizers manually, and the scheduler of the first."""

    def __init__(self, num_optimizers: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_optimizers = num_optimizers

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            if number == 0:
                self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(self.parameters(), lr=0.1) for _ in range(self.num_optimizers)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=1)]


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize(
    ("module", "accumulates"),
    [(Listed, 1), (Listed, 2), (Listed, 3), (lambda: ManyOptimizers(3), 1), (lambda: ManyOptimizers(5), 1)],
    ids=["every batch", "two batches", "three batches", "3 optimizers", "5 optimizers"],
)
def test_counters_after_a_failure(module: Callable[[], Net], accumulates: int, batch: int) -> None:
    """Batches and steps of optimizers and schedulers are counted as in the uninterrupted fit of three epochs."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        arguments = {"max_epochs": 3, "limit_train_batches": 3, "accumulate_grad_batches": accumulates}
        return fit_net([Counts(), *callbacks], directory, module=module(), **arguments)

    [cost] = assert_resumes_exactly(fit, [RaiseIn("on_train_batch_start", batch)], options=ALWAYS)
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, 1, batch - 3)


class RaiseInSecondEpoch(Callback):
    """Raises at the end of the second epoch."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise ZeroDivisionError("at the end of the epoch")


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_workers_end_with_the_fit(fails: bool, is_persistent: bool, tmp_path: Path) -> None:
    """Workers and the objects that iterate over them end with the fit, even while the trainer and its error exist."""
    loaders = [loader(num_workers=1, persistent_workers=is_persistent) for _ in range(2)]
    callbacks = [FaultTolerance(), *([RaiseInSecondEpoch()] if fails else [])]
    trainer = make_trainer(callbacks, tmp_path, limit_train_batches=2, limit_val_batches=2)
    error = None
    try:
        trainer.fit(Net(), *loaders)
    except ZeroDivisionError as raised:
        error = raised
    assert (error is not None) == fails
    assert multiprocessing.active_children() == []
    assert [one._iterator for one in loaders] == [None, None]
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, _MultiProcessingDataLoaderIter)] == []
