"""A small training with shuffling, noise, dropout, workers, loggers, and checkpoints, for replays."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import FaultTolerance, FlightRecorder

SPOILT = 13
"""The sample that is NaN, if one is."""


class Noisy(Dataset[Tensor]):
    """Samples with noise; one may be NaN."""

    def __init__(self, length: int, *, is_spoilt: bool = False) -> None:
        self.length = length
        self.is_spoilt = is_spoilt

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.randn(4) + index / 10
        return sample * torch.nan if self.is_spoilt and index == SPOILT else sample


class Net(LightningModule):
    """A layer with dropout, which may raise."""

    def __init__(self, raises_at: int | None, factor: float) -> None:
        super().__init__()
        self.raises_at = raises_at
        self.factor = factor
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).pow(2).mean() * self.factor
        if self.global_step == self.raises_at and not os.environ.get("IS_CALM"):
            raise ValueError(f"planted at step {self.global_step}")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.layers(batch).mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Notes(Callback):
    """Writes a note below the root directory."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with open(os.path.join(trainer.default_root_dir, "note"), "a") as file:
            file.write(f"{trainer.global_step}\n")


class OwnLogger(Logger):
    """A logger of the user's own, with a file that it replaces."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.rows: list[Any] = []

    @property
    def name(self) -> str:
        """The name."""
        return "own"

    @property
    def version(self) -> int:
        """The version."""
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write all rows again."""
        self.rows.append([step, metrics])
        with open(self.path, "w") as file:
            json.dump(self.rows, file)


def main() -> None:
    """Train with the given arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--raises-at", type=int)
    parser.add_argument("--spoilt", action="store_true")
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--bare", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(1, workers=True)
    here = arguments.directory
    for number in range(1, 1 + arguments.fits):
        checkpoints = os.path.join(here, "checkpoints", str(number))
        if not arguments.bare:
            os.environ["PL_FAULT_TOLERANT_LEDGER"] = f"{here}/ledger.jsonl"
        own = [FaultTolerance(keep_last=1), FlightRecorder(None, keep_every=3)]
        callbacks = [
            *([] if arguments.bare else own),
            ModelCheckpoint(checkpoints, save_last="link"),
            OnExceptionCheckpoint(checkpoints),
            Notes(),
        ]
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=arguments.devices,
            strategy="ddp" if arguments.devices > 1 else "auto",
            default_root_dir=here,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=[CSVLogger(here, name="csv", version=number), OwnLogger(f"{here}/own-{number}.json")],
            log_every_n_steps=1,
        )
        train = DataLoader(
            Noisy(32, is_spoilt=arguments.spoilt), batch_size=4, shuffle=True, num_workers=arguments.workers
        )
        # A difference that no autosave knows of, for replays that must notice it.
        module = Net(arguments.raises_at, float(os.environ.get("FACTOR", "1")))
        trainer.fit(module, train, DataLoader(Noisy(8), batch_size=4))
    with open(os.path.join(here, "ended"), "a") as file:
        file.write("ended\n")


if __name__ == "__main__":
    main()
