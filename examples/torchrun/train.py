"""Train a small network on handwritten digits in several processes. Kill one of them: torchrun restarts them all.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train.py --kill-rank 1

The processes agree on the newest autosave that verifies, and resume. The last line is a digest of the trained weights.
It equals that of a run without ``--kill-rank``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_faulttolerant import FaultTolerance


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        images = images + 0.1 * torch.randn_like(images)  # uses each rank's own generator
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class KillOnce(Callback):
    """Kills one rank in the middle of the run, as the out-of-memory killer would. It spares restarted processes."""

    def __init__(self, *, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_start and trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-rank", type=int, help="the rank that is killed, once")
    parser.add_argument("--kill-step", type=int, default=65)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    callbacks: list[Callback] = [FaultTolerance(every_n_train_steps=10)]
    if options.kill_rank is not None:
        callbacks.append(KillOnce(rank=options.kill_rank, step=options.kill_step))
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the number that torchrun started
    trainer = Trainer(
        max_epochs=options.epochs, accelerator="cpu", strategy="ddp", devices=devices, callbacks=callbacks
    )
    model = DigitNet()
    trainer.fit(model, DataLoader(digits, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
