"""Callbacks and loggers of users: what they count, keep, and change elsewhere."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor

from tests.laws.rows import Factor, Net, add, row


@row("callbacks", part="objects", shows=("best_of_patience", "mean_so_far"), ranks=False)  # by its own losses
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
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        pl_module.log("best_of_patience", self.best, batch_size=4)
        pl_module.log("mean_so_far", statistics.fmean(self.history.values()), batch_size=4)


@row("callbacks", trainer={"gradient_clip_val": 5.0, "max_epochs": 3})
class ChangesTrainer(Callback):
    """Clips gradients, and ends the training earlier, once it has seen some of it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.gradient_clip_val = 0.01

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.fit_loop.max_epochs = 2


class Scales(Callback):
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


@row("callbacks", part="held", shows="drawn_by_callback")
class Draws(Callback):
    """Draws from its own generator in each batch."""

    def __init__(self) -> None:
        self.generator = random.Random(7)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        drawn = self.generator.random()
        pl_module.log("drawn_by_callback", drawn, batch_size=4)
        with torch.no_grad():
            next(pl_module.parameters()).mul_(1 + 0.01 * drawn)


HOOKS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end",
)  # fmt: skip


class CountsHooks(Callback):
    """Counts the calls of each hook in its state; the counts scale the weights."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)

    def count(self, hook: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.counts[hook] = self.counts.get(hook, 0) + 1
        if hook == "on_train_batch_start":
            pl_module.log("hooks", float(sum(self.counts.values())), batch_size=4)
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1 + 0.001 * sum(self.counts.values()))


for name in HOOKS:
    setattr(CountsHooks, name, lambda self, trainer, module, *_, hook=name: self.count(hook, trainer, module))
add("CountsHooks", callbacks=CountsHooks, trainer={"val_check_interval": 3})


@row("callbacks", part="objects", shows=("in_changed_table", "in_new_table", "same_table"))
class Tables(Callback):
    """Keeps losses in two tables of pandas: one that is new each time, with two holders, and one that changes."""

    def __init__(self) -> None:
        self.changed = pd.DataFrame({"loss": [0.0] * 10})
        self.replaced = self.same = pd.DataFrame({"loss": [], "name": []})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.changed.loc[batch_idx, "loss"] += outputs["loss"].item()
        same = float(self.same is self.replaced)
        losses = [*self.replaced["loss"].tolist(), outputs["loss"].item()]
        self.replaced = self.same = pd.DataFrame({"loss": losses, "name": "a batch"})
        values = {"in_changed_table": float(self.changed["loss"].sum()), "in_new_table": sum(losses)}
        pl_module.log_dict({**values, "same_table": same + len(losses)}, batch_size=4)


@row("callbacks", part="objects", shows="expected")
class Fits(Callback):
    """Fits a tree of scikit-learn to the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tree = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        if batch_idx % 2 == 0 or self.tree is None:
            numbers = np.arange(len(self.losses))[:, None]
            self.tree = DecisionTreeRegressor(random_state=1).fit(numbers, self.losses)
        expected = float(self.tree.predict([[len(self.losses) / 2]])[0])
        pl_module.log("expected", expected, batch_size=4)


@row("callbacks", takes=("copies", "data", "layers", "optimizer"))
class ReturnsItsAttributes(Callback):
    """Returns all of its attributes as its state, as some do; Lightning has set ``log`` among them."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1
        self.log("counted_attributes", float(self.num_batches), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


@row("callbacks", part="trainer", shows="epoch", trainer={"min_epochs": 2, "max_epochs": 4})
class StopsAt(Callback):
    """Requests a stop that waits for ``min_epochs``."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.should_stop = True


class MemoryLogger(Logger):
    """Keeps everything that is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append((step, dict(metrics)))


class LooksBack(Factor):
    """Reads the values in its logger."""

    def factor(self, loss: Tensor) -> float:
        losses = [metrics["loss_step"] for _, metrics in self.logger.history if "loss_step" in metrics]
        return 1 + math.tanh(statistics.fmean(losses or [0.0])) + len(losses) / 10


add(
    "logger in memory",
    module=LooksBack,
    part="objects",
    shows="factor of LooksBack",
    trainer={"logger": MemoryLogger},
)
