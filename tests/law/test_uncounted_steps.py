"""If Lightning does not count optimizer steps, ``every_n_train_steps`` counts finished batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import Net, fit_net


class ByHand(Net):
    """Steps its optimizer manually: the raw one, or the one that Lightning counts."""

    raw = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.layers(batch).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.step(optimizer, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)

    def step(self, optimizer: Any, batch_idx: int) -> None:
        optimizer.optimizer.step()


class OptimizersWithoutLightning(ByHand):
    """Gets the raw optimizer, as in Lightning's documentation."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.layers(batch).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)


class Counted(ByHand):
    """Steps the optimizer that Lightning counts."""

    def step(self, optimizer: Any, batch_idx: int) -> None:
        optimizer.step()


class CountedLater(ByHand):
    """Steps the raw optimizer in the first epoch, Lightning's in the second."""

    def step(self, optimizer: Any, batch_idx: int) -> None:
        (optimizer if self.current_epoch else optimizer.optimizer).step()


class Inference(LightningModule):
    """Pyro's stochastic variational inference, as in its documentation: Lightning has no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        pyro.clear_param_store()
        self.svi = SVI(self.model, self.guide, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())

    def model(self, rows: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(rows)):
            pyro.sample("observed", dist.Normal(mean, 1.0), obs=rows.mean(1))

    def guide(self, rows: Tensor) -> None:
        place = pyro.param("place", torch.tensor(0.0))
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        pyro.sample("mean", dist.Normal(place, scale))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("elbo", self.svi.step(batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_elbo", self.svi.evaluate_loss(batch))

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`:UserWarning")
@pytest.mark.parametrize("module", [ByHand, OptimizersWithoutLightning, Inference])
def test_finished_batches_are_counted(module: type[LightningModule]) -> None:
    """Killed in each epoch, the run resumes from a save every two batches, and equals the uninterrupted run."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=module(), limit_val_batches=0)

    options = {"every_n_train_steps": 2}
    first, second = assert_resumes_exactly(fit, [KillAt(3), KillAt(5)], options=options)
    assert (first.epoch, first.batch) == (0, 2)
    assert (second.epoch, second.batch) == (1, 1)


class Saves(Callback):
    """Records the batches that found a new autosave."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: list[int] = []
        self.names: set[str] = set()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        names = {path.name for path in self.directory.rglob("autosave-*.ckpt")}
        if names - self.names:
            self.found.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1)
        self.names |= names


def saves_of(module: LightningModule, directory: Path, every: int, **arguments: Any) -> list[int]:
    """Return the number of finished batches at each autosave."""
    saves = Saves(directory)
    ours = FaultTolerance(directory, run_id="steps", every_n_train_steps=every)
    fit_net([ours, saves], directory, module=module, limit_val_batches=0, **arguments)
    return saves.found


@pytest.mark.parametrize(
    ("make", "arguments", "expected"),
    [
        (ByHand, {}, [0, 3, 6, 9]),
        (Counted, {}, [0, 3, 6, 9]),
        (CountedLater, {}, [0, 3, 8]),
        (Net, {}, [0, 3, 6, 9]),
        (Net, {"accumulate_grad_batches": 5}, [0]),
    ],
)
def test_steps_count_where_there_are_any(
    make: Callable[[], LightningModule], arguments: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    """With one step since the last save, or with automatic optimization, only steps count."""
    assert saves_of(make(), tmp_path, 3, **arguments) == expected


def test_that_batches_are_counted_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The meaning of the number in this fit is logged once."""
    with caplog.at_level("INFO"):
        saves_of(ByHand(), tmp_path, 3)
    assert caplog.text.count("every_n_train_steps=3 counts finished batches in this fit") == 1
