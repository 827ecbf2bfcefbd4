"""Features of modules that Lightning or a part of their own carries."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from tests.laws.rows import Net, row


@row("module", part="objects", shows=("epoch_mean", "epoch_count"))
class Outputs(Net):
    """Keeps outputs with their graphs and clears them, as Lightning's migration guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("epoch_mean", torch.stack(self.training_step_outputs).mean())
        self.log("epoch_count", float(len(self.training_step_outputs)))
        self.training_step_outputs.clear()


@row("module", part="held", shows=("own", "drawn"))
class Holding(Net):
    """Draws in its step from its own generators, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.python = random.Random(0)
        self.others = {"numpy": np.random.default_rng(0), "legacy": [np.random.RandomState(0)]}
        self.torch = torch.Generator().manual_seed(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        own = self.python.gauss(0, 1) + self.others["numpy"].normal() + self.others["legacy"][0].randn()
        drawn = torch.randn((), generator=self.torch)
        self.log_dict({"own": float(own), "drawn": drawn})
        return super().training_step(batch + float(own) + drawn, batch_idx)


@row("module", part="buffers", shows="shift")
class Buffer(Net):
    """Its loss depends on a buffer that training changes and that is in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.shift.mul_(0.9).add_(batch.mean())
        self.log("shift", self.shift)
        return super().training_step(batch + self.shift, batch_idx)
