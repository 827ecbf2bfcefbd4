"""The law for Lightning's own callbacks: unfreezing, accumulation by epoch, stopping, monitors, time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    Timer,
    timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader
from torchmetrics import RunningMean

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from lightning_faulttolerant.trainer.adapters import compat as adapters
from lightning_faulttolerant.trainer.recorder import Recorder
from tests.callbacks import Clock, Unfreezing
from tests.data_sets import NoisyDataset
from tests.modules import Backbone, PlainNet
from tests.processes import run
from tests.runs import Net, RaiseAt, assert_exact, eight_batches, fit_eight, fit_net, make_trainer

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}
NUM_BATCHES = 5


# Unfreezing.


@pytest.mark.parametrize("kill", [3, 5, 7, 14])
def test_unfreezing(kill: int) -> None:
    """Killed before, in, or after the epochs that unfreeze, parameters keep their frozen state and their groups."""
    [cost] = assert_exact(lambda: [Unfreezing()], KillAt(kill), module=Backbone, max_epochs=4)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("kill", [5, 7])
def test_unfreezing_a_backbone(kill: int) -> None:
    """The same holds for BackboneFinetuning, which changes the learning rate of its group."""
    users = lambda: [BackboneFinetuning(1, lambda epoch: 1.5, train_bn=False)]  # noqa: E731
    [cost] = assert_exact(users, KillAt(kill), module=Backbone, max_epochs=4)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize(("hook", "continues_at"), [("on_train_epoch_start", (0, 4)), ("on_train_epoch_end", (1, 5))])
def test_exception_beside_an_unfreezing(hook: str, continues_at: tuple[int, int]) -> None:
    """A save never has groups that its moment did not have: after an unfreezing the last autosave stays."""
    users = lambda: [Unfreezing()]  # noqa: E731
    [cost] = assert_exact(users, RaiseAt(hook, 1), module=Backbone, max_epochs=3, options={**ALWAYS, **EVERY_STEP})
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, *continues_at)


def test_exception_after_an_unfreezing_is_told_as_what_it_is(tmp_path: Path) -> None:
    """A capture that has other groups by then is not a failed save: the last autosave stays, and the log says so."""

    def main() -> None:
        callbacks = [Unfreezing(), FaultTolerance(**ALWAYS), RaiseAt("on_train_epoch_start", 1)]
        fit_net(callbacks, tmp_path, module=Backbone(), max_epochs=3)

    ended = run(main)
    assert "ZeroDivisionError: the last autosave, " in ended.output
    assert "could not be saved" not in ended.output


# Accumulation by epoch, and stopping early.


@pytest.mark.parametrize("kill", [3, 5, 9, 12])
def test_accumulation_by_epoch(kill: int) -> None:
    """The accumulation factor is that of the epoch in which the run continues."""
    users = lambda: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]  # noqa: E731
    options = {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_exact(users, KillAt(kill), max_epochs=3, options=options)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("kill", [11, 13, 20])
@pytest.mark.parametrize("arguments", [{"min_epochs": 4}, {"min_steps": 29}], ids=["epochs", "steps"])
def test_early_stopping_within_an_epoch(arguments: dict[str, int], kill: int) -> None:
    """A stop that a validation run requested, and that has to wait, ends the run at the same place."""

    def users() -> list[Callback]:
        return [EarlyStopping("val_loss", patience=1, min_delta=100.0, check_on_train_epoch_end=False)]

    train = eight_batches()
    [cost] = assert_exact(users, KillAt(kill), train=train, val_check_interval=4, max_epochs=6, **arguments)
    assert (cost.epoch, cost.batch) == divmod(kill, len(train))


# Monitors and users' callbacks.


class TwoRates(PlainNet):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers[0].parameters()}, {"params": self.layers[2].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("kill", [5, 8])
def test_learning_rate_monitor_of_groups(kill: int) -> None:
    """Loggers get the same rates at the same steps, and the monitor's history is that of the whole run."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        # It comes after the recorder, which cuts where a batch begins.
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        trainer = fit_net([*callbacks, monitor], directory, module=TwoRates(), max_epochs=3, logger=RecordsNothing())
        [recorder] = (callback for callback in callbacks if isinstance(callback, Recorder))
        last = [monitor.last_momentum_values, monitor.last_weight_decay_values]
        recorder.write("history", rates=monitor.lrs, last=last)
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options=EVERY_STEP)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("kill", [5, 8])
def test_learning_rate_monitor_of_an_unfreezing(kill: int) -> None:
    """The same holds when groups are added, and the names of the rates change."""
    users = lambda: [Unfreezing(), LearningRateMonitor()]  # noqa: E731
    assert_exact(users, KillAt(kill), module=Backbone, max_epochs=4, logger=RecordsNothing())


class RecordsNothing(DummyLogger):
    """The learning rate monitor requires a logger from the start; the recorder's comes later."""


class CountsHooks(Callback):
    """Counts the calls of each hook in its state; the counts scale the weights."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


def counting(hook: str) -> Callable[..., None]:
    """Return the hook `hook` of a `CountsHooks`."""

    def count(self: CountsHooks, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        self.counts[hook] = self.counts.get(hook, 0) + 1
        if hook == "on_train_batch_start":
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1 + 0.001 * sum(self.counts.values()))

    return count


for counted in (
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
):
    setattr(CountsHooks, counted, counting(counted))


@pytest.mark.parametrize(
    "fault",
    [
        *(KillAt(kill) for kill in (3, 4, 8, 13)),
        KillAt(3, hook="validation", signum=signal.SIGTERM),
        KillAt(7, hook="validation", signum=signal.SIGTERM),
        *(RaiseAt(hook, 1) for hook in ("on_train_epoch_start", "on_validation_end", "on_train_epoch_end")),
    ],
)
def test_callback_whose_state_changes_in_every_hook(fault: Any) -> None:
    """Each hook counts exactly its calls in an uninterrupted run."""
    options = {**ALWAYS, **EVERY_STEP}
    assert_exact(lambda: [CountsHooks()], fault, train=eight_batches(), val_check_interval=4, options=options)


class Follows(Callback):
    """Holds a metric, and writes its value into the weights."""

    def __init__(self) -> None:
        self.recent = RunningMean(4)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.recent.update(outputs["loss"])
        with torch.no_grad():
            next(pl_module.parameters()).add_(self.recent.compute(), alpha=0.01)


@pytest.mark.parametrize("kill", [3, 7])
def test_metric_that_a_callback_holds(kill: int) -> None:
    """A metric in an attribute of a callback continues like the module's metrics."""
    assert_exact(lambda: [Follows()], KillAt(kill))


def test_lambda_callback() -> None:
    """The functions of a LambdaCallback run as often as in an uninterrupted run."""

    def scale(trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            next(pl_module.parameters()).mul_(0.99)

    users = lambda: [LambdaCallback(on_train_epoch_start=scale, on_train_batch_end=scale)]  # noqa: E731
    assert_exact(users, KillAt(8))


def test_lambda_callback_that_saves_of_now() -> None:
    """A LambdaCallback that adds the current state to each checkpoint prevents captures from being saved."""

    def users() -> list[Callback]:
        seen: list[int] = []
        return [
            LambdaCallback(
                on_train_batch_start=lambda *_: seen.append(0),
                on_save_checkpoint=lambda trainer, module, checkpoint: checkpoint.update(seen=len(seen)),
                on_load_checkpoint=lambda trainer, module, checkpoint: seen.extend([0] * checkpoint["seen"]),
                on_train_epoch_end=lambda trainer, module: module.log("seen", float(len(seen))),
            )
        ]

    options = {**ALWAYS, "every_n_train_steps": 3}
    [cost] = assert_exact(users, RaiseAt("on_validation_end", 0), options=options)
    assert (cost.epoch, cost.batch) == (0, 3)


# Time.


class Noting(Timer):
    """Records its remaining time whenever a batch begins; a batch takes 0.125 s on its clock."""

    def __init__(self, duration: timedelta, notes: Path) -> None:
        super().__init__(duration)
        self.notes = notes
        self.clock = timer.time = adapters.time = Clock()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {trainer.global_step} {self.time_remaining()}\n")
        self.clock.pass_seconds(0.125)


def test_time_limit(tmp_path: Path) -> None:
    """A run that continues has the remaining time of that point, and ends when it is used up."""
    notes = tmp_path / "left.txt"

    def main(*faults: Callback) -> None:
        callbacks = [Noting(timedelta(seconds=1.5), notes), FaultTolerance(**EVERY_STEP), *faults]
        fit_net(callbacks, tmp_path, max_epochs=-1)

    assert run(lambda: main(KillAt(4))).exit_code == -signal.SIGKILL
    assert run(main).exit_code == 0
    lines = [line.split() for line in notes.read_text().splitlines()]
    killed, resumed = (
        [float(left) for process, _, left in lines if process == p] for p in {line[0]: 0 for line in lines}
    )
    assert [step for _, step, _ in lines].count("4") == 2
    assert resumed[0] == killed[-1] == 1.5 - 4 * 0.125
    assert resumed[-1] == 0.125


class FindsAtEpochs(LearningRateFinder):
    """Looks for a learning rate at the start of its epochs, as in Lightning's guide."""

    def __init__(self, *epochs: int) -> None:
        super().__init__(num_training_steps=20)
        self.epochs = epochs

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch in self.epochs:
            self.lr_find(trainer, pl_module)


class Sought(Net):
    """Has a learning rate that a finder sets, and no scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def test_a_learning_rate_finder_at_two_epochs(tmp_path: Path) -> None:
    """No autosave is taken while it trains: the scheduler and the callbacks are not the fit's then."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_eight([FindsAtEpochs(0, 1), *callbacks], directory, module=Sought(), max_epochs=3)

    [*costs] = assert_resumes_exactly(fit, [KillAt(8), KillAt(3)], options=EVERY_STEP)
    assert [(cost.epoch, cost.batch) for cost in costs] == [(1, 0), (1, 3)]


class FindsSizeAtEpochs(BatchSizeFinder):
    """Looks for a batch size at the start of its epochs, as in Lightning's guide."""

    def __init__(self, *epochs: int) -> None:
        super().__init__(mode="power", steps_per_trial=2, max_trials=2)
        self.epochs = epochs

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch in self.epochs:
            self.scale_batch_size(trainer, pl_module)


class Sized(Net):
    """Creates its loader with a batch size that a finder sets."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(64), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(16), batch_size=4)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize(
    ("finder", "reload_every"),
    [
        (lambda: BatchSizeFinder(mode="power", steps_per_trial=2, max_trials=2), 0),
        (lambda: FindsSizeAtEpochs(0, 2), 0),
        (lambda: FindsSizeAtEpochs(0, 2), 1),
    ],
    ids=["at the start", "at epochs", "at epochs, with reloads"],
)
def test_a_batch_size_finder(finder: Any, reload_every: int) -> None:
    """The loader is that of the size found, and the limits of the search are not those of the fit."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        limits = {"limit_train_batches": 5, "reload_dataloaders_every_n_epochs": reload_every}
        trainer = make_trainer([finder(), *callbacks], directory, max_epochs=3, **limits)
        trainer.fit(Sized())
        return trainer

    [*costs] = assert_resumes_exactly(fit, [KillAt(3), KillAt(4)], options=EVERY_STEP)
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 3), (1, 2)]
