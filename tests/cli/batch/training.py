"""A training whose samples are their own indices; it records which of them each batch had."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_faulttolerant import FaultTolerance

warnings.simplefilter("ignore")


class Indices(Dataset[Tensor]):
    """Its samples are their indices. It notes that it was read."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Tensor:
        self._note.touch()
        return torch.tensor([float(index), float(torch.rand(()) * 0)])


class Stream(IterableDataset[Tensor]):
    """Has no indices."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(i), 0.0]) for i in range(8)])


class Noisy(LightningModule):
    """Draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(nn.functional.dropout(batch, 0.5)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Seen(Callback):
    """Records the samples of each batch, and raises if it is told to."""

    def __init__(self, directory: Path, raises_at: int | None) -> None:
        self._directory, self._raises_at = directory, raises_at

    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: Tensor, batch_idx: int) -> None:
        with open(self._directory / f"seen-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([trainer.current_epoch, batch_idx, [int(index) for index in batch[:, 0]]]) + "\n")
        if trainer.global_step == self._raises_at:
            raise ValueError("stopped here")


def main() -> None:
    """Train three epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--raises-at", type=int)
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3) if options.own else None
    data: Any = Stream() if options.stream else Indices(options.directory / "read")
    loader = DataLoader(
        data, batch_size=4, shuffle=not options.stream, num_workers=options.workers, generator=generator
    )
    (options.directory / "process").write_text(str(os.getpid()))
    raises_at = options.raises_at if not (options.directory / "again").exists() else None
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.directory,
        callbacks=[FaultTolerance(every_n_train_steps=1), Seen(options.directory, raises_at)],
    )
    trainer.fit(Noisy(), loader)


if __name__ == "__main__":
    main()
