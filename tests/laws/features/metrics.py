"""Metrics of every kind, and values that are logged in every way."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, RunningMean, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import BootStrapper, MetricTracker, MinMaxMetric, Running

from tests.laws.rows import Net, add, row, rows_of


@row(
    "module",
    part="metrics",
    shows=("metric_of_epoch", "metric_by_attribute"),
    warns=("No (negative|positive) samples in targets", "Encountered `nan` values"),
)
class LoggedMetrics(Net):
    """Metrics and collections that are logged as objects, by name or by attribute, per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.of_epoch, self.of_both, self.by_attribute = MeanMetric(), SumMetric(), MeanMetric()
        self.highest = nn.ModuleDict({"max": MaxMetric()})
        self.collection = MetricCollection([BinaryAccuracy(), BinaryF1Score(), BinaryAUROC()], prefix="collected_")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.of_epoch.update(loss.detach(), weight=batch_idx + 1)
        self.log("metric_of_epoch", self.of_epoch, on_step=False, on_epoch=True)
        self.of_both(batch.sum())
        self.log("metric_of_both", self.of_both, on_step=True, on_epoch=True, prog_bar=True)
        self.highest["max"](batch.flatten() / (1 + batch_idx))
        self.log("metric_best", self.highest["max"], on_step=False, on_epoch=True)
        self.collection.update(torch.sigmoid(batch[:, 0]), (batch[:, 1] > 0).long())
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        self.by_attribute.update(loss.detach())
        self.log("metric_by_attribute", self.by_attribute, on_epoch=True, metric_attribute="by_attribute")
        return loss


@row("module", part="metrics", shows=("metric_unlogged", "metric_on_cpu"))
class UnloggedMetrics(Net):
    """Metrics and wrappers that a step only updates, one of them on the CPU; a hook logs what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.unlogged, self.on_cpu = CatMetric(), CatMetric(compute_on_cpu=True)
        self.min_max = MinMaxMetric(MeanSquaredError())
        self.bootstrap = BootStrapper(MeanSquaredError(), num_bootstraps=3)
        self.window, self.running_sum = RunningMean(3), Running(SumMetric(), 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.unlogged.update(loss.detach())
        self.on_cpu.update((batch.mean(1) > 0).to(torch.uint8))
        self.min_max.update(batch[:, 0], batch[:, 1])
        self.min_max.compute()
        self.bootstrap.update(batch[:, 0], batch[:, 1])
        self.window.update(loss.detach())
        self.running_sum.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        found = {
            "unlogged": self.unlogged.compute().sum(),
            "on_cpu": self.on_cpu.compute().float().sum(),
            "running": self.window.compute() + self.running_sum.compute(),
            **{f"extreme_{name}": value for name, value in self.min_max.compute().items()},
            **{f"bootstrap_{name}": value for name, value in self.bootstrap.compute().items()},
        }
        self.log_dict({f"metric_{name}": value for name, value in found.items()})
        for metric in (self.unlogged, self.on_cpu, self.bootstrap):
            metric.reset()


@row("module", part="results", shows=("logged_sum_of_epoch", "logged_max_of_both_epoch", "logged_in_hook"))
class Logging(Net):
    """Logs with every reduction, per step, per epoch, and both, in steps and hooks of training and validation."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for reduce in ("mean", "sum", "min", "max"):
            value, name = batch.mean() * (batch_idx - 2), f"logged_{reduce}_of"
            self.log(f"{name}_step", value, on_step=True, on_epoch=False, reduce_fx=reduce)
            self.log(f"{name}_epoch", value, on_step=False, on_epoch=True, reduce_fx=reduce)
            self.log(f"{name}_both", value, on_step=True, on_epoch=True, reduce_fx=reduce, batch_size=batch_idx + 1)
        self.log("logged_for_bar", batch_idx + 0.0, prog_bar=True, logger=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.log("logged_in_hook", float(arguments[-1]), on_step=False, on_epoch=True)
        self.log("logged_shown", float(len(self.trainer.callback_metrics)), on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        norms = [parameter.grad.norm() for parameter in self.layers.parameters() if parameter.grad is not None]
        self.log("logged_norm", torch.stack(norms).norm(), on_step=True, on_epoch=True, reduce_fx="max")

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("logged_in_validation", batch.max(), on_step=True, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("logged_so_far", self.trainer.callback_metrics.get("logged_mean_of_both", torch.zeros(())))


add("log_every_n_steps in windows", trainer={"log_every_n_steps": 2, "accumulate_grad_batches": 2}, repeats=2)
add(
    "two validations",
    validation=lambda: [
        rows_of(8, shuffle=False)(),
        rows_of(12, shuffle=False, num_workers=2, persistent_workers=True)(),
    ],
    trainer={"val_check_interval": 3},
    warns="Your `val_dataloader`'s sampler has shuffling enabled",
)
add("no sanity check", trainer={"check_val_every_n_epoch": 1, "num_sanity_val_steps": 0})


@row("module", trainer={"max_epochs": 3})
class PersistentTracker(Net):
    """A tracker whose metrics are in the ``state_dict``, and grow in number."""

    def __init__(self) -> None:
        super().__init__()
        mean = MeanMetric()
        mean.persistent(True)
        self.tracker = MetricTracker(mean, maximize=True)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.tracker.increment()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tracker.update(batch.mean())
        self.log("best_persistent", float(self.tracker.n_steps) + float(self.tracker.compute()))
        return super().training_step(batch, batch_idx)


@row("module", part="buffers", shows=("masked", "sum_of_rows"), takes="copies")
class Buffers(Net):
    """Buffers in no ``state_dict``: one that its first step makes, one that grows, and one of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("kept_rows", torch.zeros(0, 4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.uint8), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.table is None:
            self.table = torch.randn(4)
        self.kept_rows = torch.cat([self.kept_rows, batch])[-90:]
        self.mask[int(torch.randint(4, ()))] ^= 1
        self.log_dict({"masked": (self.mask * torch.arange(4.0)).sum(), "sum_of_rows": self.kept_rows.sum()})
        return super().training_step(batch * self.mask + self.table - self.kept_rows.mean(0), batch_idx)


@row("module", takes="copies")  # an average has one size
class SavedBuffers(Net):
    """Buffers in the ``state_dict`` that the first step makes, and that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("latest", None)
        self.register_buffer("memory", torch.zeros(0, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.latest = batch if self.latest is None else torch.cat([self.latest, batch])[-12:]
        self.memory = torch.cat([self.memory, batch[:1]])
        return super().training_step(batch + self.latest.mean() + self.memory.mean(), batch_idx)


@row("callbacks", part="callbacks", shows="metric_of_callback")
class HoldsMetric(Callback):
    """Holds a metric, and writes its value into the weights."""

    def __init__(self) -> None:
        self.recent = RunningMean(4)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.recent.update(outputs["loss"])
        pl_module.log("metric_of_callback", self.recent.compute(), batch_size=4)
        with torch.no_grad():
            next(pl_module.parameters()).add_(self.recent.compute().tanh(), alpha=0.01)
