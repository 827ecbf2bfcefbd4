"""Digests of what a run trains and what it leaves: equal if the values are equal, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.state.tensors import shard_of, with_tensors


def digest(value: object) -> str:
    """Return a digest of nested tensors and plain values; of a tensor in shards, that of this rank's part."""
    return f"{sample_digest(with_tensors(value, shard_of)):08x}"


def exact(value: Any) -> object:
    """Return a number as text that loses no bit, or anything else in a form that JSON can hold."""
    value = shard_of(value)
    if isinstance(value, torch.Tensor):
        return digest(value) if value.numel() != 1 else exact(value.item())
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (str, int)):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) == 1:
        value = value.item()
        return exact(value) if isinstance(value, (str, int, float)) else digest(value)
    return digest(value)


def loss_of(output: object) -> object:
    """Return the loss in what a training step returned; ``None`` if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else output


def exact_metrics(metrics: object) -> dict[str, object]:
    """Return metrics in a form that JSON can hold, including those that a user has passed to a custom logger."""
    if not isinstance(metrics, Mapping):
        return {} if metrics is None else {"": exact(metrics)}
    return {str(name): exact(value) for name, value in metrics.items()}


def learning_rates(trainer: Trainer) -> list[list[object]]:
    """Return the learning rate of each parameter group of each optimizer."""
    return [[exact(group.get("lr")) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def weights_digest(trainer: Trainer) -> str:
    """Return the digest of all parameters and buffers."""
    return digest(dict(trainer.lightning_module.state_dict()))


def optimizers_digest(trainer: Trainer) -> str:
    """Return the digest of the states of all optimizers."""
    return digest([_in_order(optimizer.state_dict()) for optimizer in trainer.optimizers])


def _in_order(state: dict[str, object]) -> dict[str, object]:
    """Return an optimizer's state with the values of each parameter in a fixed order: FSDP1 loads them in another."""
    found = state.get("state")
    if not isinstance(found, Mapping):  # a user's own optimizer may have any state
        return state
    return {**state, "state": {name: _sorted(values) for name, values in found.items()}}


def _sorted(values: object) -> object:
    return dict(sorted(values.items(), key=lambda item: str(item[0]))) if isinstance(values, Mapping) else values
