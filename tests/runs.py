"""Small data sets, models and fits that the tests of the law share: everything in them draws random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class NoisyDataset(Dataset[Tensor]):
    """Fixed rows, with noise from all three global generators, their cached Gaussians included."""

    def __init__(self, length: int = 32) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        noise = random.gauss(0, 1) + float(np.random.randn()) + float(torch.randn(()))
        return self.rows[index] + 0.1 * noise


class HoldingDataset(NoisyDataset):
    """Draws from generators of its own, too."""

    def __init__(self, length: int = 32) -> None:
        super().__init__(length)
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Tensor:
        own = self.python.gauss(0, 1) + self.numpy.normal() + self.legacy.randn()
        return super().__getitem__(index) + 0.1 * float(own) + 0.1 * torch.randn((), generator=self.torch)


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
    """Return a quiet CPU trainer that logs at every step; 2 epochs unless said otherwise."""
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
    **arguments: Any,
) -> Trainer:
    """Fit `Net`, or `module`, on shuffled noisy data, 8 batches an epoch, unless other loaders are given."""
    trainer = make_trainer(callbacks, directory, **arguments)
    train = DataLoader(NoisyDataset(), batch_size=4, shuffle=True) if train is None else train
    validation = DataLoader(NoisyDataset(8), batch_size=4) if validation is None else validation
    trainer.fit(Net() if module is None else module, train, validation)
    return trainer
