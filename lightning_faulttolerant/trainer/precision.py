"""The precision of weights when Lightning loads them: what would round them to fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn


def convert_module(trainer: Trainer) -> None:
    """Make the weights double before they are loaded, where the trainer makes them so after that.

    Lightning loads a checkpoint before the strategy is set up, and converts the module when it is: with
    ``precision="64-true"`` weights of 64 bits would go through 32.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, DoublePrecision):
        plugin.convert_module(trainer.lightning_module)


def rounded(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Return which weights of a checkpoint would be rounded if they were loaded now, with both types.

    Args:
        module: What they would be loaded into.
        state_dict: The checkpoint's.
    """
    found = ((name, own, state_dict.get(name)) for name, own in module.named_parameters())
    return [
        f"{name} is saved as {_name(saved)} and would be loaded as {_name(own)}"
        for name, own, saved in found
        if isinstance(saved, Tensor) and not _holds(own.dtype, saved.dtype)
    ]


def _holds(own: torch.dtype, saved: torch.dtype) -> bool:
    """Return whether each value of the type `saved` is one of the type `own`, too."""
    try:
        return torch.promote_types(saved, own) == own
    except RuntimeError:  # types of 8 bits and quantized ones are not promoted
        return saved == own or saved.itemsize < own.itemsize


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
