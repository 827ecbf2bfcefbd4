"""A model and a data set, as small as possible, with all that makes a resume hard."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[Tensor]):
    """Rows with noise that is drawn again each time."""

    def __init__(self, num_rows: int = 24) -> None:
        self.rows = torch.linspace(-1, 1, num_rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + 0.1 * torch.randn(4)


def loader(batch_size: int = 4, num_rows: int = 24) -> DataLoader[Tensor]:
    """Return a loader with six batches an epoch."""
    return DataLoader(Noisy(num_rows), batch_size=batch_size, shuffle=True)


class Net(LightningModule):
    """Two layers and dropout."""

    def __init__(self, lr: float = 0.1, hidden: int = 8) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Dropout(0.3), nn.Linear(hidden, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = (self.layers(batch).squeeze(1) - batch.sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class SavingNet(Net):
    """The same model, with hyperparameters."""

    def __init__(self, lr: float = 0.1, hidden: int = 8, run_name: str = "") -> None:
        super().__init__(lr, hidden)
        self.save_hyperparameters()
