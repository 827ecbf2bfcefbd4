"""Small data sets, models, and fits that the tests of the law share. All of them draw random numbers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset


class Net(LightningModule):
    """Dropout, batch norm, Adam, a scheduler per step; logs its loss per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Return a quiet CPU trainer that logs at every step; 2 epochs by default."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    return Trainer(callbacks=callbacks, **{**defaults, **arguments})


def fit_net(
    callbacks: list[Callback],
    directory: Path,
    *,
    train: Any = None,
    validation: Any = None,
    module: LightningModule | None = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> Trainer:
    """Fit `Net` on 5 shuffled noisy batches an epoch, or on the arguments; a `module` gets a data module."""
    trainer = make_trainer(callbacks, directory, **arguments)
    train = DataLoader(NoisyDataset(20), batch_size=4, shuffle=True) if train is None else train
    validation = DataLoader(NoisyDataset(8), batch_size=4) if validation is None else validation
    if module is None or _changes_batches(type(module)):
        trainer.fit(Net() if module is None else module, train, validation, ckpt_path=ckpt_path)
    else:
        trainer.fit(module, datamodule=bare_data_module(train, validation), ckpt_path=ckpt_path)
    return trainer


def _changes_batches(module: type[LightningModule]) -> bool:
    """Return whether it has a hook that a data module could have too: Lightning warns about both."""
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    return any(getattr(module, hook) is not getattr(LightningModule, hook) for hook in hooks)


def bare_data_module(train: Any, validation: Any) -> LightningDataModule:
    """Return a data module that has these loaders, and nothing else."""

    class Bare(LightningDataModule):
        def train_dataloader(self) -> Any:
            return train

        def val_dataloader(self) -> Any:
            return validation

        def __reduce__(self) -> Any:  # for spawned ranks: a class in a function does not pickle
            return bare_data_module, (train, validation)

    return Bare()


def eight_batches() -> DataLoader:
    """Return a loader of 8 batches an epoch, for fits that validate in the middle of an epoch."""
    return DataLoader(NoisyDataset(32), batch_size=4, shuffle=True)


def fit_eight(callbacks: list[Callback], directory: Path, *, train: Any = None, **arguments: Any) -> Trainer:
    """Fit as `fit_net` does, on 8 batches an epoch unless another loader is passed."""
    return fit_net(callbacks, directory, train=eight_batches() if train is None else train, **arguments)


class TwoLoaders(Net):
    """Trains on a long and a short loader together."""

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        return super().training_step(torch.cat([part for part in batch.values() if part is not None]), batch_idx)


class Fetches(Net):
    """Takes its batches from the iterator itself, `num_fetches` a step."""

    def __init__(self, num_fetches: int = 1) -> None:
        super().__init__()
        self.num_fetches = num_fetches

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        fetched = [next(dataloader_iter) for _ in range(self.num_fetches)]
        loss = torch.stack([self.layers(batch).square().mean() for batch, _, _ in fetched]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("index", float(fetched[-1][1]), batch_size=4)
        return loss


# Where runs are cut. The loaders that tests create have 8 batches an epoch unless stated otherwise. The default
# loader has 5 (`fit_net`).


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A kill at the start of batch `kill` (counted over all epochs) of a run that saves every `every` steps."""

    kill: int
    every: int
    continues_at: tuple[int, int]


FIRST_EPOCH = Cut(kill=3, every=1, continues_at=(0, 3))
LATER_EPOCH = Cut(kill=14, every=13, continues_at=(1, 5))

LATER_SHORT_EPOCH = Cut(kill=9, every=8, continues_at=(1, 3))


def assert_continues(
    cut: Cut,
    *,
    train: Callable[[], Any] | None = None,
    validation: Callable[[], Any] | None = None,
    module: Callable[[], LightningModule] = Net,
    users: Callable[[], list[Callback]] = list,
    **arguments: Any,
) -> None:
    """Check that a fit of what the callables return obeys the law if killed at `cut`; `arguments` are the Trainer's."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*users(), *callbacks],
            directory,
            train=train and train(),
            validation=validation and validation(),
            module=None if module is Net else module(),
            **arguments,
        )

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *cut.continues_at)
