"""Models in shards, and strategies that distribute them over ranks, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.rank_runs import RankNet
from tests.runs import Net


class ShardedNet(RankNet):
    """Shards each layer and then all together (FSDP2); each rank has its own batch norm statistics."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class LeavesOut(RankNet):
    """Has a teacher that its ``state_dict`` lacks, and half of a weight in it; a hook drops weights and states."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        found.update({name: one.detach() / 2 for name, one in found.items() if name.endswith("layers.3.weight")})
        return {name: value for name, value in found.items() if not name.startswith("teacher.")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if "layers.0" not in name}
        checkpoint["optimizer_states"] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for weight in self.teacher.parameters():
            weight.data.mul_(0.9)
        return super().training_step(batch, batch_idx) + self.teacher(torch.rand(4, 4)).square().mean()


class ShardedLeavesOut(LeavesOut, ShardedNet):
    """The same in shards of FSDP2."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.teacher, mesh=self.device_mesh["data_parallel"])


class Swaps(ShardedNet):
    """Saves other values under the names of its weights, and a base that stays as it is not at all."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        nn.init.eye_(self.base.weight)
        nn.init.zeros_(self.base.bias)

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.base, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.base(batch), batch_idx)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {
            name: value.detach() / 2 if "weight" in name else value
            for name, value in found.items()
            if name[:4] != "base"
        }


class PartlyShardedNet(RankNet):
    """Forgets to shard its last layer, so its gradients are not averaged."""

    def configure_model(self) -> None:
        fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])


class TensorParallelNet(Net):
    """Splits its linear layers over the ranks. All ranks have the same batches and draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


class TwoOptimizersNet(ShardedNet):
    """Has an optimizer that takes its first step in the fifth batch."""

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
    """FSDP1 on the CPU. Torch runs it there if it gets the device; Lightning does not pass one."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(
            module=model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


class Fsdp1WholeOnCpu(Fsdp1OnCpu):
    """FSDP1 on the CPU with ``state_dict_type="full"``.

    Lightning has torch copy the gathered weights to the CPU. There, torch takes them without a copy, and a segmentation
    fault follows when it has freed them. Without that copy, the same values are saved.
    """

    def __init__(self) -> None:
        super().__init__(state_dict_type="full")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with _without_a_copy():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        with _without_a_copy():
            return super().optimizer_state(optimizer)


@contextlib.contextmanager
def _without_a_copy() -> Iterator[None]:
    def context(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
        return FullyShardedDataParallel.state_dict_type(
            module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        )

    with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", context):
        yield
