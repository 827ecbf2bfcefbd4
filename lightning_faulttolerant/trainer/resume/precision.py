"""The precision of weights when Lightning loads them, and the weights that would be rounded to fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn


def convert_module(trainer: Trainer) -> None:
    """Convert the weights to double before they are loaded, if the trainer converts them afterwards.

    Lightning loads a checkpoint before it sets up the strategy, and converts the module during that setup. With
    ``precision="64-true"``, weights of 64 bits would pass through 32 bits.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, DoublePrecision):
        plugin.convert_module(trainer.lightning_module)


def rounded(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Return the weights of a checkpoint that a load would round now, with both types.

    Args:
        module: The module that would load them.
        state_dict: The checkpoint's ``state_dict``.
    """
    found = ((name, own, state_dict.get(name)) for name, own in module.named_parameters())
    return [
        f"{name} is saved as {_name(saved)} and would be loaded as {_name(own)}"
        for name, own, saved in found
        if isinstance(saved, Tensor) and not _holds(own.dtype, saved.dtype)
    ]


def _holds(own: torch.dtype, saved: torch.dtype) -> bool:
    """Return whether the type `own` can represent each value of the type `saved`."""
    try:
        return torch.promote_types(saved, own) == own
    except RuntimeError:  # 8-bit and quantized types are not promoted
        return saved == own or saved.itemsize < own.itemsize


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
