"""Optimizers that have no state yet, under FSDP2: torch makes them take a step to get a state to save or load.

A step with zero gradients and no learning rate still counts. It changes Adam's bias correction, and the momentum of a
decayed weight, so a run that only saves would differ from one that doesn't. torch leaves an optimizer alone if one of
its parameters has a gradient (``_init_optim_state``), so one of them gets a gradient for that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_faulttolerant.trainer.ranks.compat import saves_shards

WITHOUT_STATE = "optimizers_without_state"
"""The numbers of these optimizers, in our part of a checkpoint."""


def without_state(trainer: Trainer) -> list[int]:
    """Return which optimizers have no state; none if the strategy leaves them alone anyway."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return []
    return [i for i, optimizer in enumerate(trainer.optimizers) if not optimizer.state]


@contextlib.contextmanager
def left_alone(trainer: Trainer, numbers: Sequence[int]) -> Iterator[None]:
    """Within the block, keep torch from giving a state to the optimizers with these numbers."""
    held = [parameter for i in numbers for parameter in _one_without_gradient(trainer.optimizers[i])]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in held:
            parameter.grad = None


@contextlib.contextmanager
def loadable(trainer: Trainer, numbers: Sequence[int]) -> Iterator[None]:
    """Within the block, let a strategy load a checkpoint in which the optimizers with these numbers have no state.

    The other optimizers get a state first, while the parameters are not yet the checkpoint's. A step that should change
    nothing may turn a weight of -0.0 into 0.0, and a user's own optimizer may do more.
    """
    model = trainer.strategy.model
    if not isinstance(trainer.strategy, ModelParallelStrategy) or model is None:
        yield
        return
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415, RUF100 - takes a second to import
        get_optimizer_state_dict,
    )

    strategy, own = trainer.strategy, list(trainer.optimizers)
    stand_ins = {} if saves_shards(strategy) else {i: _stand_in(own[i]) for i in numbers}
    strategy.optimizers = [stand_ins.get(i, optimizer) for i, optimizer in enumerate(own)]
    try:
        with left_alone(trainer, [i for i in numbers if i not in stand_ins]):
            for i, optimizer in enumerate(strategy.optimizers):
                if i not in numbers or i in stand_ins:
                    get_optimizer_state_dict(model, optimizer)
            yield
    finally:
        strategy.optimizers = own
    for i, stand_in in stand_ins.items():
        for group, loaded in zip(own[i].param_groups, stand_in.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name in group and name != "params"})


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same parameters that has a state: torch can't load a file into one without."""
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def make_loadable(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Give optimizers without a state an empty one for each parameter: otherwise the file would not load again."""
    if isinstance(trainer.strategy, ModelParallelStrategy) and not saves_shards(trainer.strategy):
        for state in checkpoint["optimizer_states"]:
            if state.get("state") == {}:
                state["state"] = {name: {} for group in state["param_groups"] for name in group["params"]}


def _one_without_gradient(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return []
    return [parameter for parameter in parameters if parameter.requires_grad][:1]
