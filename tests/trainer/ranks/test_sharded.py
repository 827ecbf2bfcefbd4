"""Several ranks write one directory of shards, or none; sharded tensors are saved and restored as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_faulttolerant.state.tensors import TensorMarks, gradients_state, load_gradients
from tests.ranks import on_ranks


def _gradients(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    module.weight.grad = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    module.bias.grad = DTensor.from_local(torch.full((2,), float(rank + 1)), mesh, [Partial()])
    state = gradients_state(module)
    module.weight.grad = module.bias.grad = None
    load_gradients(module, state)
    weight, bias = module.weight.grad, module.bias.grad
    assert weight is not None
    assert bias is not None
    return [
        torch.equal(weight.to_local(), torch.ones(1, 3)),
        repr(weight.placements),
        bias.to_local().tolist(),
        repr(bias.placements),
        all(type(value) in (torch.Tensor, list) for entry in state.values() for value in entry.values()),
    ]


def test_gradients_in_shards_come_back_as_they_were(tmp_path: Path) -> None:
    """A sharded gradient, and one that is a pending sum, must come back with each rank's part, unsummed."""
    first, second = on_ranks(_gradients, tmp_path)
    assert first == [True, "(Shard(dim=0),)", [1.0, 1.0], "(Partial(sum),)", True]
    assert second == [True, "(Shard(dim=0),)", [2.0, 2.0], "(Partial(sum),)", True]


def _marks(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)]))
    marks = TensorMarks([weight])
    before = marks.unmoved([weight])
    if rank == 1:
        weight.to_local().data[0, 0] += 1
    return [before, marks.unmoved([weight])]


def test_a_change_of_a_shard_is_seen_by_its_rank_alone(tmp_path: Path) -> None:
    """Each rank must report whether its own part of a sharded tensor has moved, without asking the others."""
    assert on_ranks(_marks, tmp_path) == [[True, True], [True, False]]
