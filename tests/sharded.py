"""Models in shards, and runs of several ranks that save directories, held to the law."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.rank_runs import RankNet


class ShardedNet(RankNet):
    """Its layers are in shards (FSDP2), each apart and all together; their batch norm's statistics are each rank's."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


def fsdp2(num_ranks: int = 2, *, save_distributed_checkpoint: bool = True) -> ModelParallelStrategy:
    """Return the strategy of `ShardedNet`."""
    return ModelParallelStrategy(
        data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
    )
