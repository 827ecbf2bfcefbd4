"""Callbacks and loggers of users: what they count, keep, and change elsewhere."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.laws.rows import Net, add, row


@row("callbacks", part="objects", shows="averaged", takes="layers")
class AveragesWeights(Callback):
    """Validates with averaged weights, which are in a dict."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shadow = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, value in pl_module.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)
        pl_module.log("averaged", self.shadow["layers.0.weight"].sum(), batch_size=4)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        self.put(pl_module, self.shadow)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.put(pl_module, self.kept)
        self.kept = {}

    @staticmethod
    def put(pl_module: LightningModule, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                parameter.copy_(values[name])


@row("callbacks", part="objects", shows=("best_of_patience", "mean_so_far"), takes="optimizer")
class Patience(Callback):
    """Keeps the best loss and all others, and lowers the rate if there is no better one for a while."""

    def __init__(self) -> None:
        self.best, self.waited, self.history = math.inf, 0, {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = float(outputs["loss"])
        self.history[trainer.global_step] = loss
        self.best, self.waited = (loss, 0) if loss < self.best else (self.best, self.waited + 1)
        if self.waited >= 2:
            self.waited = 0
            trainer.optimizers[0].param_groups[0]["weight_decay"] += 0.1
        pl_module.log("best_of_patience", self.best, batch_size=4)
        pl_module.log("mean_so_far", statistics.fmean(self.history.values()), batch_size=4)


@row(
    "callbacks",
    takes="layers",
    trainer={"gradient_clip_val": 5.0, "max_epochs": 3},
)
class ChangesTrainer(Callback):
    """Clips gradients, lowers the dropout, and ends the training earlier, once it has seen some of it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.layers[2].p = max(0.0, pl_module.layers[2].p - 0.02)
        if trainer.global_step == 2:
            trainer.gradient_clip_val = 0.01

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.fit_loop.max_epochs = 2


class Scales(Callback):
    """Multiplies a value in each batch."""

    def __init__(self, by: float) -> None:
        self.by, self.value = by, 1.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.value *= self.by
        pl_module.log(f"value_{self.by}", self.value, batch_size=4)


add(
    "two of one class", part="objects", shows=("value_0.9", "value_1.1"),
    callbacks=lambda: [Scales(0.9), Scales(1.1)],
)  # fmt: skip


class Watches(Callback):
    """Refers to the module, and to a list in it, in which it keeps losses."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module, self.history = pl_module, pl_module.watched_history

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.history.append(float(outputs["loss"]))
        same = float(self.module is pl_module) + float(self.history is pl_module.watched_history)
        pl_module.log("watched", same + self.module.layers[0].weight.sum().item(), batch_size=4)
        pl_module.log("sum_of_watched", sum(self.history), batch_size=4)


class Watched(Net):
    """Has a list that a callback appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.watched_history: list[float] = [1.0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * math.tanh(statistics.fmean(self.watched_history))


add(
    "list of module and callback",
    part="objects",
    shows="sum_of_watched",
    module=Watched,
    callbacks=Watches,
    takes="layers",
)
