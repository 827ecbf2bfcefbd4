"""A small training with shuffling, noise, dropout, and metrics, for drills and replays."""

from __future__ import annotations

import argparse
import json
import os
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_faulttolerant import FaultTolerance, FlightRecorder

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--run-id")
parser.add_argument("--fits", type=int, default=1)
parser.add_argument("--functions", default="", help="run these with nothing but an autosave every second step")
parser.add_argument("--bare", action="store_true", help="train without our callbacks")
parser.add_argument("--raises-at", type=int, help="raise at this step")
parser.add_argument("--spoilt", action="store_true", help="let the sample 13 be NaN")
parser.add_argument("--counts", action="store_true", help="let samples grow with each call")


class Noisy(Dataset[Tensor]):
    """Samples with noise; one may be NaN, and all may depend on a counter where no code looks for a state."""

    def __init__(self, length: int, *, is_spoilt: bool = False, counts: bool = False) -> None:
        self.length, self.is_spoilt, self.counts = length, is_spoilt, counts
        self.num_calls = ContextVar("num_calls", default=0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.num_calls.set(self.num_calls.get() + 1)
        sample = torch.randn(4) + index / 10
        sample = sample * (1 + self.num_calls.get() / 100) if self.counts else sample
        return sample * torch.nan if self.is_spoilt and index == 13 else sample


class Net(LightningModule):
    """A layer with dropout, which may raise."""

    def __init__(self, raises_at: int | None) -> None:
        super().__init__()
        self.raises_at = raises_at
        self.factor = float(os.environ.get("FACTOR", "1"))  # no autosave knows of it: replays must notice another one
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.metric = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).pow(2).mean() * self.factor
        if self.global_step == self.raises_at and not os.environ.get("IS_CALM"):
            raise ValueError(f"planted at step {self.global_step}")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = self.layers(batch).mean() + torch.rand(())
        self.metric.update(value)
        self.log("value", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log("metric", self.metric)
        return value

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch) + torch.rand(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Notes(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with open(os.path.join(trainer.default_root_dir, "note"), "a") as file:
            file.write(f"{trainer.global_step}\n")


class OwnLogger(Logger):
    """A logger of the user's own, with a file that it replaces."""

    name, version = "own", 0

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.rows: list[Any] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write all rows again."""
        self.rows.append([step, metrics])
        with open(self.path, "w") as file:
            json.dump(self.rows, file)


def main() -> None:
    """Train with the given arguments."""
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(1, workers=True)
    here, checkpoints = options.directory, os.path.join(options.directory, "checkpoints")
    for number in range(1, 1 + options.fits):
        if options.functions:
            callbacks: list[Callback] = [FaultTolerance(every_n_train_steps=2, run_id=options.run_id)]
            more: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        else:
            if not options.bare:
                os.environ["PL_FAULT_TOLERANT_LEDGER"] = f"{here}/ledger.jsonl"
            ours = (
                []
                if options.bare
                else [FaultTolerance(keep_last=1), FlightRecorder(os.environ.get("RULE"), keep_every=3)]
            )
            saving = [ModelCheckpoint(f"{checkpoints}/{number}", save_last="link"), OnExceptionCheckpoint(checkpoints)]
            callbacks = [*ours, *saving, Notes()]
            more = {"logger": [CSVLogger(here, name="csv", version=number), OwnLogger(f"{here}/own-{number}.json")]}
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=options.devices,
            strategy="ddp" if options.devices > 1 else "auto",
            default_root_dir=here,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **more,
        )
        data = Noisy(32, is_spoilt=options.spoilt, counts=options.counts)
        train = DataLoader(data, batch_size=4, shuffle=True, num_workers=options.workers)
        module = Net(options.raises_at)
        for function in (options.functions or "fit").split(","):
            loaders = [DataLoader(Noisy(24), batch_size=4)]
            getattr(trainer, function)(module, *([train] if function == "fit" else []), *loaders)
    with open(os.path.join(here, "ended"), "a") as file:
        file.write("ended\n")


if __name__ == "__main__":
    main()
