"""The law for metrics and logged values: every kind of metric, every way to log it, wherever the run is cut."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, RunningMean, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    BinaryPrecision,
    MulticlassAccuracy,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MetricTracker, MinMaxMetric, Running

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.hook_saves import assert_continues_from, saver
from tests.processes import run
from tests.runs import Net, RaiseAt, assert_exact, eight_batches, fit_net

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}
NUM_BATCHES = 6


class Stage(nn.Module):
    """The metrics of one stage, one of every kind, as a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.both, self.total = MeanMetric(), MeanMetric(), SumMetric()
        self.extremes = nn.ModuleDict({"max": MaxMetric(), "min": MinMetric()})
        self.unlogged = CatMetric()
        self.on_cpu = CatMetric(compute_on_cpu=True)
        self.bytes = CatMetric()
        self.pearson = PearsonCorrCoef()
        binary = [BinaryAccuracy(), BinaryPrecision(), BinaryF1Score(), BinaryAUROC(), BinaryAveragePrecision()]
        self.collection = MetricCollection(binary, prefix="in_")
        self.forwarded = MetricCollection([BinaryAccuracy(0.4), BinaryF1Score(0.4)], prefix="forward_")
        self.min_max = MinMaxMetric(MeanSquaredError())
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.bootstrap = BootStrapper(MeanSquaredError(), num_bootstraps=3)
        self.window, self.running = RunningMean(3), Running(SumMetric(), 4)
        self.tracker = MetricTracker(MetricCollection([MeanSquaredError()]), maximize=False)

    def update(self, batch: Tensor, loss: Tensor) -> None:
        scores, labels = torch.sigmoid(batch[:, 0]), (batch[:, 1] > 0).long()
        self.unlogged.update(loss)
        self.on_cpu.update(batch.mean(1))
        self.bytes.update(labels.to(torch.uint8))
        self.pearson.update(batch[:, 0], batch[:, 1])
        self.collection.update(scores, labels)
        self.min_max.update(batch[:, 0], batch[:, 1])
        self.classwise.update(batch[:, :3], batch[:, :3].argmax(1))
        self.bootstrap.update(batch[:, 0], batch[:, 1])
        self.running.update(loss)
        self.tracker.update(batch[:, 0], batch[:, 1])

    def finish(self) -> dict[str, Tensor]:
        """Return the values of the metrics that were not logged, and reset them."""
        found = {
            "unlogged": self.unlogged.compute().sum(),
            "on_cpu": self.on_cpu.compute().std(),
            "bytes": self.bytes.compute().float().sum(),
            "pearson": self.pearson.compute(),
            "best": torch.tensor(self.tracker.best_metric()["MeanSquaredError"]),
            "running": self.running.compute(),
            **{f"min_max_{name}": value for name, value in self.min_max.compute().items()},
            **{f"bootstrap_{name}": value for name, value in self.bootstrap.compute().items()},
            **{f"classwise_{name}": value for name, value in self.classwise.compute().items()},
        }
        # MinMaxMetric and the tracker persist over the epochs.
        for metric in (self.unlogged, self.on_cpu, self.bytes, self.pearson, self.bootstrap, self.classwise):
            metric.reset()
        return found


class EveryMetric(Net):
    """Logs in every way, from the step and from hooks, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"fit": Stage(), "val": Stage()})
        self.mean_by_attribute = MeanMetric()

    def log_all(self, name: str, batch: Tensor, loss: Tensor, batch_idx: int) -> None:
        stage = self.stages[name]
        stage.update(batch, loss)
        stage.mean.update(loss, weight=batch_idx + 1)
        self.log(f"{name}_mean", stage.mean, on_step=False, on_epoch=True)
        stage.both(batch.mean())
        self.log(f"{name}_both", stage.both, on_step=True, on_epoch=True, prog_bar=True)
        stage.total(batch.sum())
        self.log(f"{name}_total", stage.total, on_step=True, on_epoch=False)
        for kind, metric in stage.extremes.items():
            metric(batch.flatten())
            self.log(f"{name}_{kind}", metric, on_epoch=True)
        stage.window(loss)
        self.log(f"{name}_window", stage.window, on_step=True, on_epoch=True)
        self.log_dict(stage.collection, on_step=False, on_epoch=True)
        stage.forwarded(torch.sigmoid(batch[:, 2]), (batch[:, 3] > 0).long())
        self.log_dict(stage.forwarded, on_step=name == "fit", on_epoch=True)
        for reduce in ("mean", "sum", "min", "max", "avg"):
            for step, epoch in ((True, False), (False, True), (True, True)):
                key = f"{name}_{reduce}_{step}_{epoch}"
                value = loss.double() if reduce == "sum" else loss * (batch_idx - 2)
                self.log(key, value, on_step=step, on_epoch=epoch, reduce_fx=reduce, batch_size=batch_idx % 3 + 1)
        self.log_dict({f"{name}_int": batch_idx + 0.0, f"{name}_bar": loss}, prog_bar=True, logger=False, on_epoch=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log_all("fit", batch, loss.detach(), batch_idx)
        self.mean_by_attribute.update(loss.detach())
        self.log("by_attribute", self.mean_by_attribute, on_epoch=True, metric_attribute="mean_by_attribute")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.layers(batch).square().mean()
        if dataloader_idx == 0:
            self.log_all("val", batch, loss, batch_idx)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log(f"val_without_{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_train_epoch_start(self) -> None:
        self.stages["fit"].tracker.increment()
        self.log("at_epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("at_start", batch.mean(), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.layers.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_step=True, on_epoch=True, reduce_fx="max")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("shown", float(len(self.trainer.callback_metrics)), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"fit_{name}": value for name, value in self.stages["fit"].finish().items()})

    def on_validation_epoch_start(self) -> None:
        self.stages["val"].tracker.increment()

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val_{name}": value for name, value in self.stages["val"].finish().items()})
        self.log("mean_so_far", self.trainer.callback_metrics.get("fit_both", torch.zeros(())))


class LogsToo(Callback):
    """A callback that logs through the module."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("by_callback", float(trainer.global_step), on_step=True, on_epoch=True, reduce_fx="sum")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("by_callback_epoch", trainer.callback_metrics["by_attribute"] * 2)


def fit_every_metric(callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Fit 2 epochs of 6 batches, with validation on two loaders in the middle and at the end of each."""
    return fit_net(
        [LogsToo(), *callbacks],
        directory,
        train=DataLoader(NoisyDataset(4 * NUM_BATCHES), batch_size=4, shuffle=True),
        validation=[DataLoader(NoisyDataset(12), batch_size=4), DataLoader(NoisyDataset(8), batch_size=4)],
        module=EveryMetric(),
        val_check_interval=3,
        num_sanity_val_steps=0,
        **arguments,
    )


@pytest.mark.takes_long("four runs of a module with 59 metrics, each logged in each way")
@pytest.mark.parametrize("kill", [*(pytest.param(kill, marks=pytest.mark.slow) for kill in (2, 4)), 8])
def test_every_metric(kill: int) -> None:
    """Every kind of metric, logged in every way, has the uninterrupted run's values, step by step and at the end."""
    [cost] = assert_resumes_exactly(fit_every_metric, [KillAt(kill)], options=EVERY_STEP)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["start", "end"])
@pytest.mark.parametrize("kill", range(2 * NUM_BATCHES))
def test_every_metric_at_every_batch(kill: int, hook: str) -> None:
    """The same holds wherever the run is cut."""
    arguments = {"may_start_over": kill == 0}
    [cost] = assert_resumes_exactly(fit_every_metric, [KillAt(kill, hook=hook)], options=EVERY_STEP, **arguments)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize(
    ("kill", "signum"),
    [(2, signal.SIGKILL), *(pytest.param(kill, signal.SIGTERM, marks=pytest.mark.slow) for kill in (5, 8))],
)
def test_every_metric_cut_between_validation_batches(signum: int, kill: int) -> None:
    """Killed or stopped inside either validation run of an epoch, the run repeats that validation whole."""
    fault = SecondValidationBatch(kill, hook="validation", signum=signum)
    [cost] = assert_resumes_exactly(fit_every_metric, [fault], options={**ALWAYS, **EVERY_STEP})
    stopped = signum == signal.SIGTERM
    assert (cost.epoch, cost.batch) == (kill // NUM_BATCHES, kill % NUM_BATCHES + stopped)


class SecondValidationBatch(KillAt):
    """Strikes in the third batch of the validation run, not in its first."""

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 2:
            super().on_validation_batch_start(trainer)


@pytest.mark.slow
def test_logging_under_accumulation() -> None:
    """With accumulated gradients, loggers get values at the same steps as in the uninterrupted run."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_every_metric(callbacks, directory, accumulate_grad_batches=2, log_every_n_steps=2)

    [cost] = assert_resumes_exactly(fit, [KillAt(9)], options=ALWAYS)
    assert (cost.epoch, cost.batch) == divmod(9, NUM_BATCHES)


@pytest.mark.parametrize(
    ("hook", "at"), [("on_validation_end", 2), pytest.param("on_train_epoch_end", 0, marks=pytest.mark.slow)]
)
def test_every_metric_after_a_save_in_a_hook(hook: str, at: int) -> None:
    """A checkpoint that other code saves in a hook contains the metrics, too."""
    assert_continues_from(
        hook,
        users=lambda: [LogsToo(), saver(hook, at)],
        module=EveryMetric,
        train=eight_batches,
        validation=lambda: [DataLoader(NoisyDataset(length), batch_size=4) for length in (12, 8)],
        val_check_interval=4,
        num_sanity_val_steps=0,
    )


@pytest.mark.parametrize("hook", ["on_validation_end", pytest.param("on_train_epoch_start", marks=pytest.mark.slow)])
def test_metrics_after_an_exception(hook: str) -> None:
    """A capture that is saved after an exception has the metrics and logged values of its moment."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_every_metric(callbacks, directory)

    [cost] = assert_resumes_exactly(fit, [RaiseAt(hook, 1)], options={**ALWAYS, "every_n_train_steps": 100})
    assert cost.exit_code == 1


class Persistent(Net):
    """Has a tracker with metrics in the ``state_dict`` that grow in number."""

    def __init__(self) -> None:
        super().__init__()
        mean = MeanMetric()
        mean.persistent(True)
        self.tracker = MetricTracker(mean, maximize=True)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tracker.update(batch.mean())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("best", self.tracker.best_metric())


@pytest.mark.parametrize("kill", [3, 8])
def test_tracker_in_the_state_dict(kill: int) -> None:
    """Metrics that a tracker created, and that are in the ``state_dict``, exist before it is loaded."""
    assert_exact(list, KillAt(kill), module=Persistent)


class Mask(Net):
    """Masks its inputs by a byte buffer outside the ``state_dict``, which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, dtype=torch.uint8), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mask[int(torch.randint(4, ()))] ^= 1
        return super().training_step(batch * self.mask, batch_idx)


def test_buffer_of_bytes() -> None:
    """A buffer of bytes outside the ``state_dict`` continues."""
    assert_exact(list, KillAt(8), module=Mask)


class Late(Metric):
    """Creates its states at its first batch."""

    def update(self, values: Tensor) -> None:
        if not hasattr(self, "total"):
            self.add_state("total", torch.zeros(values.shape[1:]), dist_reduce_fx="sum")
        self.total = self.total + values.sum(0)

    def compute(self) -> Tensor:
        return self.total.sum()


class LateNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.late = Late()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.late.update(batch)
        return super().training_step(batch, batch_idx)


def test_metric_that_makes_its_states_late_is_refused(tmp_path: Path) -> None:
    """State that a fresh metric can't hold is named, and the resume is refused as not exact."""

    def main(*faults: Callback) -> None:
        fit_net([FaultTolerance(**EVERY_STEP), *faults], tmp_path, module=LateNet())

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main)
    assert ended.exit_code == 1
    assert "metrics: nothing to restore 'late.total' into" in ended.output
