"""A small training with shuffling, augmentation, and dropout, and a data set that may count its calls.

It may also validate, test, and predict.
"""

from __future__ import annotations

import argparse
import time
from contextvars import ContextVar

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_faulttolerant import FaultTolerance


class Noisy(Dataset[Tensor]):
    """Samples with noise; with a flaw, they grow with each call."""

    def __init__(self, length: int, *, has_flaw: bool = False) -> None:
        self.length = length
        self.has_flaw = has_flaw
        self.num_calls = ContextVar("num_calls", default=0)  # where no code looks for a state

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.num_calls.set(self.num_calls.get() + 1)
        sample = torch.randn(4) + index
        return sample * (1 + self.num_calls.get() / 100) if self.has_flaw else sample


class Net(LightningModule):
    """A layer with dropout."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.metric = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)  # a strike has to find it at work
        loss = self.layers(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = self.layers(batch).mean() + torch.rand(())
        self.metric.update(value)
        self.log("loss of a batch", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log("metric", self.metric)
        return value

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch) + torch.rand(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train with the given arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--flaw", action="store_true")
    parser.add_argument("--run-id")
    parser.add_argument("--functions", default="fit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(1, workers=True)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        default_root_dir=arguments.directory,
        callbacks=[FaultTolerance(every_n_train_steps=2, run_id=arguments.run_id)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        log_every_n_steps=1,
    )
    train = DataLoader(Noisy(64, has_flaw=arguments.flaw), batch_size=4, shuffle=True)
    module = Net(seconds=0.05)
    for function in arguments.functions.split(","):
        loaders = [DataLoader(Noisy(24), batch_size=4)]
        getattr(trainer, function)(module, *([train] if function == "fit" else []), *loaders)


if __name__ == "__main__":
    main()
