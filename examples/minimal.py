"""Train a small network on handwritten digits for half a minute. Kill it with Ctrl-C or `kill -9`, and run it again.

The second run reports where it continues, and ends with the result of an uninterrupted run. Fault tolerance takes only
the import of `FaultTolerance` and the callback.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
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
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = Trainer(max_epochs=200, callbacks=[FaultTolerance()])
    trainer.fit(DigitNet(), DataLoader(digits, batch_size=32, shuffle=True))
