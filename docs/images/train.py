"""The training for the pictures of the documentation: digits, in slow batches.

python docs/images/train.py EPOCHS STEPS (between autosaves) [--evaluate]
"""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_faulttolerant import FaultTolerance

SECONDS = 0.02  # of a batch: a training that is over before a fault comes shows nothing
SECONDS_OF_VALIDATION, SECONDS_OF_TEST = 0.6, 2.0
EPOCHS_PER_VALIDATION = 70


class DigitNet(LightningModule):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        time.sleep(SECONDS)
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss of a batch."""
        time.sleep(SECONDS_OF_VALIDATION)
        images, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(images), labels))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of a batch that is recognized correctly."""
        time.sleep(SECONDS_OF_TEST)
        images, labels = batch
        self.log("recognized", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    seed_everything(7)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    num_epochs, every_n_train_steps = (int(text) for text in sys.argv[1:3])
    evaluates = "--evaluate" in sys.argv
    trainer = Trainer(
        max_epochs=num_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        check_val_every_n_epoch=EPOCHS_PER_VALIDATION,
        num_sanity_val_steps=0,
        callbacks=[FaultTolerance(every_n_train_steps=every_n_train_steps)],
    )
    model, validated = DigitNet(), DataLoader(digits, batch_size=96)
    trainer.fit(model, DataLoader(digits, batch_size=96, shuffle=True), validated if evaluates else None)
    if evaluates:
        trainer.test(model, validated)
