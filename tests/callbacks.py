"""Callbacks that the tests of the law share, and a clock for those that measure time."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging


class StopsAt(Callback):
    """Requests a stop of the trainer at a batch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.should_stop = True


class Unfreezing(BaseFinetuning):
    """Freezes the whole backbone, including its norm; unfreezes it in two steps, each with its own arguments."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[3], optimizer, lr=0.005)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[:3], optimizer)
            optimizer.param_groups[-1]["weight_decay"] = 0.3


def swa(strategy: str = "cos") -> list[Callback]:
    """Return an averaging from the second epoch on."""
    return [StochasticWeightAveraging([0.05], swa_epoch_start=2, annealing_epochs=3, annealing_strategy=strategy)]


class Clock:
    """Replaces ``time``: a batch takes 1 second, the start of a training 100, a validation batch 10."""

    def __init__(self) -> None:
        # The package does not look for state here: another process's time is not state.
        self.now = ContextVar("now", default=0.0)
        self.monotonic = self.now.get

    def pass_seconds(self, seconds: float) -> None:
        self.now.set(self.now.get() + seconds)
