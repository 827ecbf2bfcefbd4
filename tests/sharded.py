"""Models in shards, and strategies that spread them over ranks, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.rank_runs import RankNet
from tests.runs import Net


class ShardedNet(RankNet):
    """Its layers are in shards (FSDP2), each apart and all together; their batch norm's statistics are each rank's."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class PartlyShardedNet(RankNet):
    """Its last layer is forgotten: nobody averages its gradients."""

    def configure_model(self) -> None:
        fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])


class TensorParallelNet(Net):
    """Its linear layers are cut over the ranks, which all have the same batches, and draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


class TwoOptimizersNet(ShardedNet):
    """Has an optimizer that makes its first step in the fifth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 if self.current_epoch == 0 and batch_idx < 4 else 2]:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in (self.layers[0], self.layers[3])]


def fsdp2(num_ranks: int = 2, *, save_distributed_checkpoint: bool = True) -> ModelParallelStrategy:
    """Return the strategy of `ShardedNet`."""
    return ModelParallelStrategy(
        data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
    )


def tensor_parallel(num_ranks: int = 2) -> ModelParallelStrategy:
    """Return the strategy of `TensorParallelNet`."""
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=num_ranks)


class Fsdp1OnCpu(FSDPStrategy):
    """FSDP1 on the CPU, where torch runs it if it is told so; Lightning tells it nothing there."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(
            module=model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )
