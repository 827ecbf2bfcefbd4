"""SpikeDetection: Lightning makes it save a state that it can't load again.

The best and last files of ModelCheckpoints, which forget them if their directory has changed.

Pruned weights: of ModelPruning, which does not save its masks and first weights, or of a user's hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, SpikeDetection
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.compat import first_parameters, pruned_parameters
from lightning_faulttolerant.trainer.compat import callbacks

_BEST = ("best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


def restore_best_models(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Let each ModelCheckpoint know its best and last files again, even in another directory.

    The default logger takes a new version directory at each start. ModelCheckpoint drops what it knew if its
    ``dirpath`` has changed: it would take the first result after a resume for the best of all.

    Args:
        trainer: The trainer of the callbacks.
        states: The callbacks' states in the checkpoint, by state key.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state and state.get("dirpath") != callback.dirpath:
            for name in _BEST:
                if name in state:
                    setattr(callback, name, state[name])


@contextmanager
def spikes_restored(trainer: Trainer) -> Iterator[None]:
    """Within the block, let each SpikeDetection load its saved state, on the device where it continues.

    Its ``load_state_dict`` looks for ``running``, but the name is ``running_mean``: every restore would fail.
    The values of that metric are not in this state; they continue with the callbacks' other metrics, after the block.
    """
    found = [callback for callback in callbacks(trainer) if isinstance(callback, SpikeDetection)]
    lacking = [callback for callback in found if not hasattr(callback, "running")]
    for callback in lacking:
        callback.running = callback.running_mean  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for callback in lacking:
            del callback.running  # type: ignore[attr-defined]
    for callback in found:  # by itself it moves there at the first batch of an epoch, which may be over
        callback.running_mean.to(trainer.strategy.root_device)


_MASK, _HIDDEN = "_mask", "_orig"  # torch's names for the tensors that replace a pruned parameter


class Pruning:
    """The adapter for ModelPruning."""

    def state_dict(self, trainer: Trainer, callback: ModelPruning) -> dict[str, Any]:
        """Return the masks, the weights under them, and the weights from before the fit."""
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
        """Prune the same weights with the same masks; the optimizers keep their parameters."""
        parameters, first = pruned_parameters(callback), first_parameters(callback)
        for number, values in state["pruned"].items():
            module, name = parameters[int(number)]
            mask = values["mask"].to(getattr(module, name).device)
            prune.custom_from_mask(module, name, mask)  # type: ignore[no-untyped-call]
            getattr(module, name + _HIDDEN).data.copy_(values["hidden"])
        for number, weight in first.items():
            module, name = parameters[number]
            if number in state["shared"]:
                # On the CPU, Lightning goes back without a copy: from then on the first weights are trained too.
                weight.data = getattr(module, name + _HIDDEN, getattr(module, name)).data
            else:
                weight.data.copy_(state["first"][str(number)])


class OwnMasks:
    """The masks of weights that a user's hook pruned: the hook isn't called again. ModelPruning's masks are left out.

    Args:
        trainer: The trainer of the fit that continues.
        weights: The weights of the checkpoint.
    """

    def __init__(self, trainer: Trainer, weights: Mapping[str, Any]) -> None:
        modules = dict(trainer.lightning_module.named_modules())
        pruning = (callback for callback in compat.callbacks(trainer) if isinstance(callback, ModelPruning))
        others = {(id(module), name) for callback in pruning for module, name in pruned_parameters(callback)}
        self._masks: list[tuple[nn.Module, str, Tensor]] = []
        for key in _pruned(weights):
            prefix, _, name = key.rpartition(".")
            module = modules.get(prefix)
            if module is not None and (id(module), name) not in others:
                self._masks.append((module, name, weights[key + _MASK]))

    def apply(self) -> None:
        """Prune with the masks, after the optimizers are loaded; these keep their parameters."""
        for module, name, mask in self._masks:
            if not hasattr(module, name + _MASK):
                prune.custom_from_mask(module, name, mask.to(getattr(module, name).device))  # type: ignore[no-untyped-call]

    def load(self) -> None:
        """Restore the masks if a hook at the start has drawn others."""
        for module, name, mask in self._masks:
            if hasattr(module, name + _MASK):
                getattr(module, name + _MASK).copy_(mask)


def shown_state(module: nn.Module) -> dict[str, Tensor]:
    """Return each pruned weight as the last pass saw it: the next pruning chooses by these values."""
    masks = {name: mask for name, mask in module.named_buffers() if name.endswith(_MASK)}
    if not masks:
        return {}
    places = {key: key.rpartition(".") for key in _pruned({**masks, **dict(module.named_parameters())})}
    return {key: _copy(getattr(module.get_submodule(prefix), name)) for key, (prefix, _, name) in places.items()}


def load_shown(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Show the pruned weights as they were."""
    modules = dict(module.named_modules())
    for key, value in state.items():
        prefix, _, name = key.rpartition(".")
        mask = getattr(modules.get(prefix), name + _MASK, None)
        if mask is not None:
            setattr(modules[prefix], name, value.to(mask.device))


def without_masks(weights: Mapping[str, object], *, here: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return `weights` under the names that they have before any pruning.

    Args:
        weights: The weights by name.
        here: The weights of a module: parameters that are pruned there keep their names.
    """
    pruned = _pruned(weights) - _pruned(here or {})
    masks, hidden = {name + _MASK for name in pruned}, {name + _HIDDEN: name for name in pruned}
    return {hidden.get(name, name): value for name, value in weights.items() if name not in masks}


def _pruned(weights: Mapping[str, object]) -> set[str]:
    pruned = {name.removesuffix(_MASK) for name in weights if name.endswith(_MASK)}
    return {name for name in pruned if name + _HIDDEN in weights}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
