"""The fit of a small model, which draws random numbers, and what tests do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Net


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
    """Fit `Net` on 5 shuffled noisy batches an epoch, or on the arguments."""
    trainer = make_trainer(callbacks, directory, **arguments)
    train = DataLoader(NoisyDataset(20), batch_size=4, shuffle=True) if train is None else train
    validation = DataLoader(NoisyDataset(8), batch_size=4) if validation is None else validation
    trainer.fit(Net() if module is None else module, train, validation, ckpt_path=ckpt_path)
    return trainer


class SavesAfter(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
