"""A module with frozen tensors."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class FrozenNet(LightningModule):
    """A frozen backbone and a trained head, with tensors that share memory, and some that change unnoticed."""

    def __init__(self, *, changes: bool = True) -> None:
        super().__init__()
        self.changes = changes
        self.backbone = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 8))
        self.tied = nn.Linear(256, 8)
        self.tied.weight = self.backbone[2].weight
        for module in (self.backbone, self.tied):
            module.requires_grad_(False)
        self.head = nn.Linear(8, 1)
        self.through_data = nn.Parameter(torch.ones(600), requires_grad=False)
        self.through_numpy = nn.Parameter(torch.ones(600), requires_grad=False)
        whole = torch.ones(20, 40)
        self.register_buffer("whole", whole)
        self.register_buffer("transposed", whole.t()[3:])
        self.register_buffer("narrow", torch.ones(1000, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))
        self.dropout = nn.Dropout(0.3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.changes and batch_idx == 2:
            self.through_data.data[3] *= 1.5
            unseen = self.through_numpy.detach()
            (torch.from_dlpack(unseen) if unseen.is_cuda else unseen.numpy())[-1] += 0.25
        scale = (
            self.through_data.mean() + self.through_numpy.mean() + self.transposed.sum() + self.narrow.float().mean()
        )
        loss = (self.head(self.dropout(self.backbone(batch))) * scale).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.backbone(batch)).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)
