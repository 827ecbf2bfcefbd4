"""Train on handwritten digits from a configuration file with LightningCLI. Kill it and run it again: same last line.

    pip install "jsonargparse[signatures]"
    python train.py fit --config config.yaml

The callback is in `config.yaml` only, not in this file. On the command line it would be
`--trainer.callbacks+=lightning_faulttolerant.FaultTolerance`.
"""

import hashlib

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        return DataLoader(digits, batch_size=self.batch_size, shuffle=True)


class DigitNet(LightningModule):
    def __init__(self, width: int = 128, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    cli = LightningCLI(DigitNet, Digits)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in cli.model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
