"""ModelPruning: its masks, the weights that they hide and the first weights, to which it goes back, are not saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor
from torch.nn.utils import prune

from lightning_faulttolerant.trainer.adapters.compat import first_parameters, pruned_parameters

_MASK, _HIDDEN = "_mask", "_orig"  # torch's names for what stands in the place of a pruned parameter


class Pruning:
    """Adapter of ModelPruning."""

    def state_dict(self, trainer: Trainer, callback: ModelPruning) -> dict[str, Any]:
        """Return the masks and what they hide, and the weights from before the fit."""
        first = first_parameters(callback)
        pruned, shared = {}, []
        for number, (module, name) in enumerate(pruned_parameters(callback)):
            weight = getattr(module, name + _HIDDEN, getattr(module, name))
            if number in first and first[number].data_ptr() == weight.data_ptr():
                shared.append(number)
            if hasattr(module, name + _MASK):
                pruned[str(number)] = {"mask": _copy(getattr(module, name + _MASK)), "hidden": _copy(weight)}
        kept = {str(number): _copy(weight) for number, weight in first.items() if number not in shared}
        return {"pruned": pruned, "first": kept, "shared": shared}

    def load_state_dict(self, trainer: Trainer, callback: ModelPruning, state: Mapping[str, Any]) -> None:
        """Prune what was pruned by the same masks; the optimizers keep the parameters that they have."""
        parameters, first = pruned_parameters(callback), first_parameters(callback)
        for number, values in state["pruned"].items():
            module, name = parameters[int(number)]
            mask = values["mask"].to(getattr(module, name).device)
            prune.custom_from_mask(module, name, mask)  # type: ignore[no-untyped-call]
            getattr(module, name + _HIDDEN).data.copy_(values["hidden"])
        for number, weight in first.items():
            module, name = parameters[number]
            if number in state["shared"]:
                # On the CPU Lightning goes back without a copy: from then on the first weights are trained too.
                weight.data = getattr(module, name + _HIDDEN, getattr(module, name)).data
            else:
                weight.data.copy_(state["first"][str(number)])


def without_masks(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights` under the names that they have where nothing is pruned yet."""
    pruned = {name.removesuffix(_MASK) for name in weights if name.endswith(_MASK)}
    pruned = {name for name in pruned if name + _HIDDEN in weights}
    masks, hidden = {name + _MASK for name in pruned}, {name + _HIDDEN: name for name in pruned}
    return {hidden.get(name, name): value for name, value in weights.items() if name not in masks}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
