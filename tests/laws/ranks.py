"""What laws of several ranks share: a module and data that need every rank's own state, and strategies."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torchmetrics import MaxMetric, MeanMetric

from tests.laws.rows import Net, Row, rows_of

# Lightning's and torch's advice: these laws are about values that differ from rank to rank, and about old strategies.
FOR_RANKS = [
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning"),
]


class Apart(Net):
    """Logs in all ways and keeps metrics and lists. The higher its rank, the more random numbers it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest, self.validated = MeanMetric(), MaxMetric(), MeanMetric()
        self.outputs: list[float] = []
        self.num_steps = 0
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(self.global_rank):
            random.gauss(0, 1), np.random.randn(), torch.randn(3)
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss), self.largest.update(loss)
        self.outputs.append(loss.item())
        self.num_steps += 2 - min(self.global_rank, 1)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("of_first", loss, on_step=True, on_epoch=True, rank_zero_only=True)
        self.log("steps", float(self.num_steps))
        self.log("last", self.last)
        factor = 1 + 0.01 * torch.randn(()) + 0.01 * self.num_steps + 0.1 * self.last
        self.last = loss.detach()  # DDP's forward passes don't synchronize it
        return loss * factor

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("largest", self.largest.compute())
        self.log("listed", sum(self.outputs))
        self.largest.reset(), self.outputs.clear()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        super().validation_step(batch, batch_idx)
        loss = self.loss(batch + 0.1 * torch.randn(()))
        self.validated.update(loss)
        self.log("validated", self.validated)
        self.log("synced_val_loss", loss, sync_dist=True)
        return loss


class InShards(Apart):
    """Shards each layer and then all together (FSDP2)."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers[1], self.layers[3], self.layers):
            fully_shard(layer, mesh=mesh)


def fsdp2(num_ranks: int = 2) -> ModelParallelStrategy:
    """Return a strategy that shards, by FSDP2."""
    return ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=True)


class Slowly(Callback):
    """Is slow, so that the ranks agree on a stop within the next batches."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)


def rank_here() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def batches(num_ranks: int = 2, num_workers: int = 0) -> Row:
    """Return a row with 6 batches a rank and epoch, and validation runs of 4."""
    return Row(
        name=f"{num_workers} workers",
        train=rows_of(24 * num_ranks, num_workers=num_workers),
        validation=rows_of(16 * num_ranks, shuffle=False),
    )
