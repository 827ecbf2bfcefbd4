"""The training that the pictures of the documentation are of: digits, in batches that take their time.

python docs/images/train.py EPOCHS STEPS (between autosaves)
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    seed_everything(7)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    num_epochs, every_n_train_steps = (int(text) for text in sys.argv[1:])
    trainer = Trainer(
        max_epochs=num_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[FaultTolerance(every_n_train_steps=every_n_train_steps)],
    )
    trainer.fit(DigitNet(), DataLoader(digits, batch_size=96, shuffle=True))
