"""The law for models: accumulation, manual optimization, metrics, logging, validation, flags, callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.callbacks import StopsAt
from tests.data_sets import NoisyDataset
from tests.modules import BufferNet, FreezingNet, MetricNet, TwoValidations
from tests.runs import (
    FIRST_EPOCH,
    Cut,
    Net,
    RaiseAt,
    assert_continues,
    assert_exact,
    each_short_cut,
    eight_batches,
    fit_eight,
    fit_net,
)


@each_short_cut
def test_dropout_batch_norm_adam_and_a_scheduler_per_step(cut: Cut) -> None:
    """Dropout masks, running statistics, moments, and learning rates continue."""
    assert_continues(cut)


# Accumulation and manual optimization.


@pytest.mark.parametrize(("kill", "continues_at"), [(2, (0, 2)), (3, (0, 3)), (4, (0, 4)), (6, (1, 1)), (7, (1, 2))])
def test_accumulation(kill: int, continues_at: tuple[int, int]) -> None:
    """Killed within a window of 3 batches, at its end, or in the short one at the epoch's end, gradients continue."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, accumulate_grad_batches=3, gradient_clip_val=0.1)

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options={"overhead_budget": 1.0})
    assert (cost.epoch, cost.batch, cost.num_batches_twice) == (*continues_at, 1)


class TwoOptimizers(LightningModule):
    """Steps one optimizer after each batch, and one after every third; the latter keeps its gradients in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3))
        self.second = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        loss = self.second(self.first(batch)).square().mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 3 == 2:
            self.clip_gradients(second, gradient_clip_val=0.5)
            second.step()
            second.zero_grad()
        self.lr_schedulers().step()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.second(self.first(batch)).square().mean())

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.first.parameters(), lr=0.01)
        second = torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


@pytest.mark.parametrize(("kill", "continues_at"), [(4, (0, 4)), (9, (1, 4))])
def test_manual_optimization(kill: int, continues_at: tuple[int, int]) -> None:
    """Two optimizers with manual steps continue, and so do gradients that are kept across batches."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=TwoOptimizers())

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options={"overhead_budget": 1.0})
    assert (cost.epoch, cost.batch) == continues_at


# Metrics and logging.


@each_short_cut
def test_metrics(cut: Cut) -> None:
    """At the end of the epoch, metrics cover the batches before and after the cut."""
    assert_continues(cut, module=MetricNet)


class LoggingNet(Net):
    """Logs with every reduction, per step, per epoch and both; also from a hook."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for reduce in ("mean", "sum", "min", "max"):
            value = batch.mean() * (batch_idx + 1)
            self.log(f"{reduce}_step", value, on_step=True, on_epoch=False, reduce_fx=reduce)
            self.log(f"{reduce}_epoch", value, on_step=False, on_epoch=True, reduce_fx=reduce)
            self.log(f"{reduce}_both", value, on_step=True, on_epoch=True, reduce_fx=reduce, batch_size=batch_idx + 1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_a_hook", float(batch_idx), on_step=False, on_epoch=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), on_step=True, on_epoch=True)
        self.log("val_max", batch.max(), reduce_fx="max")


@each_short_cut
def test_logging(cut: Cut) -> None:
    """Sums, means, and extremes over the epoch cover the whole epoch."""
    assert_continues(cut, module=LoggingNet)


@each_short_cut
def test_logging_at_every_third_step(cut: Cut) -> None:
    """Loggers get values at the same steps as in the uninterrupted run."""
    assert_continues(cut, module=LoggingNet, log_every_n_steps=3)


# Validation.


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
@pytest.mark.parametrize(
    ("kill", "continues_at"),
    [
        pytest.param(2, (0, 2), marks=pytest.mark.slow),
        (4, (0, 4)),
        pytest.param(6, (0, 6), marks=pytest.mark.slow),
        (8, (1, 0)),
        pytest.param(13, (1, 5), marks=pytest.mark.slow),
    ],
)
def test_two_validation_loaders_twice_an_epoch(kill: int, continues_at: tuple[int, int]) -> None:
    """With validation in the middle of the epoch, each validation runs once on each of its two loaders."""
    assert_continues(
        Cut(kill=kill, every=1, continues_at=continues_at),
        train=eight_batches,
        validation=lambda: [
            DataLoader(NoisyDataset(8), batch_size=4),
            DataLoader(NoisyDataset(12), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
        ],
        module=TwoValidations,
        val_check_interval=0.5,
    )


@pytest.mark.parametrize("kill", [3, 7])
def test_killed_in_validation(kill: int) -> None:
    """A run that is killed inside a validation run repeats that validation whole, from its start."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_eight(callbacks, directory, val_check_interval=0.5, module=LoggingNet())

    [cost] = assert_resumes_exactly(fit, [KillAt(kill, hook="validation")], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, kill)


def test_validation_every_second_epoch_and_none_at_the_start() -> None:
    """Epochs without validation, and no sanity check, change nothing."""
    assert_continues(
        Cut(kill=7, every=1, continues_at=(1, 2)),
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        max_epochs=4,
    )


# State that no state_dict contains.


@each_short_cut
def test_buffers_outside_the_state_dict(cut: Cut) -> None:
    """A buffer that is not persistent continues."""
    assert_continues(cut, module=BufferNet)


class TableNet(Net):
    """Its loss depends on a table that it creates in its first step, and on rows that it collects; neither is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("rows", torch.zeros(0, 4), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.table is None:
            self.table = torch.randn(4)
        self.rows = torch.cat([self.rows, batch])[-10:]
        return super().training_step(batch + self.table - self.rows.mean(0), batch_idx)


@pytest.mark.slow
def test_buffers_that_training_makes_and_grows() -> None:
    """Buffers outside the ``state_dict`` continue even if the new process lacks them or has another shape."""
    assert_continues(FIRST_EPOCH, module=TableNet)


class QueueNet(Net):
    """Its loss depends on a queue that it creates in its first step and on a growing memory, both in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", None)
        self.register_buffer("memory", torch.zeros(0, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.queue = batch if self.queue is None else torch.cat([self.queue, batch])[-12:]
        self.memory = torch.cat([self.memory, batch[:1]])
        return super().training_step(batch + self.queue.mean() + self.memory.mean(), batch_idx)


@pytest.mark.parametrize("fault", [KillAt(3), RaiseAt("on_train_epoch_start", 1)], ids=["kill", "exception"])
def test_buffers_of_the_state_dict_that_training_makes_and_grows(fault: Callback) -> None:
    """Buffers in the ``state_dict`` continue even if the new process could not load them."""
    assert_exact(list, fault, module=QueueNet, options={"overhead_budget": 1.0})


@each_short_cut
def test_frozen_parameters_and_modules_in_evaluation_mode(cut: Cut) -> None:
    """Parameters that training froze and modules that it switched to evaluation mode stay so."""
    assert_continues(cut, module=FreezingNet)


class Counter(Callback):
    """Counts batches in its state, and the count changes the training."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.count += 1
        with torch.no_grad():
            next(pl_module.parameters()).add_(0.01 * self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@each_short_cut
def test_callback_with_a_state(cut: Cut) -> None:
    """A callback with a ``state_dict`` continues from it."""
    assert_continues(cut, users=lambda: [Counter()])


class EpochSchedulerNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@each_short_cut
def test_scheduler_per_epoch(cut: Cut) -> None:
    """A scheduler that steps once an epoch still does."""
    assert_continues(cut, module=EpochSchedulerNet, max_epochs=3)


class PlateauNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@each_short_cut
def test_scheduler_on_a_plateau(cut: Cut) -> None:
    """A scheduler that depends on a validation result steps as often, on the same values."""
    assert_continues(cut, module=PlateauNet, max_epochs=3)


@pytest.mark.parametrize("kill", [4, 6])
def test_stop_that_waits_for_min_epochs(kill: int) -> None:
    """A stop that was requested before the cut and waits for ``min_epochs`` ends the run at the same place."""
    assert_continues(
        Cut(kill=kill, every=1, continues_at=divmod(kill, 5)),
        users=lambda: [StopsAt()],
        min_epochs=2,
        max_epochs=4,
    )


@each_short_cut
def test_early_stopping(cut: Cut) -> None:
    """EarlyStopping, waiting for ``min_epochs``, ends the run after the same epoch."""
    assert_continues(
        cut,
        users=lambda: [EarlyStopping("val_loss", patience=1, min_delta=100.0)],
        min_epochs=3,
        max_epochs=6,
    )
