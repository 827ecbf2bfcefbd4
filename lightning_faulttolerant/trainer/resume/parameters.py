"""Parameters at a resume: their weights as Lightning has loaded them, and their groups in optimizers.

Each process calls ``configure_optimizers``, ``on_fit_start`` and ``on_train_start`` again, with the weights of the
checkpoint. A hook that loads pretrained weights, or passes a batch through a norm, would change the restored weights.
So they are protected. Weights that Lightning would round to fewer bits are loaded in the precision that they were saved
in.

An optimizer's state numbers its groups, so it can only be loaded into equal groups. If a hook changed the groups in an
epoch that is over, as gradual unfreezing does, it isn't called again. So this module restores them, before Lightning
loads the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state.tensors import buffers_of, sums_of_bits
from lightning_faulttolerant.trainer.adapters.state import OwnMasks


def convert_module(trainer: Trainer) -> None:
    """Convert the weights to double before they are loaded, if the trainer converts them afterwards.

    Lightning loads a checkpoint before it sets up the strategy, and converts the module during that setup. With
    ``precision="64-true"``, weights of 64 bits would pass through 32 bits.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, DoublePrecision):
        plugin.convert_module(trainer.lightning_module)


def rounded(module: torch.nn.Module, state_dict: Mapping[str, object]) -> list[str]:
    """Return the weights of a checkpoint that a load would round now, with both types.

    Args:
        module: The module that would load them.
        state_dict: The checkpoint's ``state_dict``.
    """
    found = ((name, own, state_dict.get(name)) for name, own in module.named_parameters())
    return [
        f"{name} is saved as {_name(saved)} and would be loaded as {_name(own)}"
        for name, own, saved in found
        if isinstance(saved, torch.Tensor) and not _holds(own.dtype, saved.dtype)
    ]


def _holds(own: torch.dtype, saved: torch.dtype) -> bool:
    """Return whether the type `own` can represent each value of the type `saved`."""
    try:
        return torch.promote_types(saved, own) == own
    except RuntimeError:  # 8-bit and quantized types are not promoted
        return saved == own or saved.itemsize < own.itemsize


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@final
class LoadedWeights:
    """Parameters and persistent buffers, as they were right after the load.

    Args:
        module: The module that holds them.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        found = self._now()
        self._dtypes = {name: tensor.dtype for name, tensor in found.items()}
        self._sums = sums_of_bits(found)

    @torch.no_grad()
    def put_back(self, read: Callable[[], Mapping[str, object]]) -> list[str]:
        """Restore the tensors that have changed since. Return a reason for each tensor that can't be restored.

        Args:
            read: Reads the weights of the checkpoint again.
        """
        # A tensor that was since converted to another type keeps its converted value.
        now = {name: tensor for name, tensor in self._now().items() if self._dtypes.get(name) == tensor.dtype}
        changed = [name for name, total in sums_of_bits(now).items() if total != self._sums[name]]
        saved = read() if changed else {}
        reasons = []
        for name in changed:
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and value.shape == now[name].shape:
                value = value.to(now[name].dtype)
                if sums_of_bits({name: value}) == {name: self._sums[name]}:
                    now[name].copy_(value)
                    continue
            reasons.append(
                f"a hook at the start, or configure_optimizers, has changed {name} after the load of the checkpoint,"
                " and its value is not in the file as it was loaded"
            )
        return reasons

    def _now(self) -> dict[str, torch.Tensor]:
        found = {**dict(self._module.named_parameters()), **buffers_of(self._module, persistent=True)}
        return {name: tensor for name, tensor in found.items() if not torch.nn.parameter.is_lazy(tensor)}


class RestoredWeights:
    """The weights of a resume, from Lightning's load until the state is restored.

    Args:
        trainer: The trainer that runs the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._own_masks: OwnMasks | None = None
        self._loaded: LoadedWeights | None = None

    def note_masks(self, state_dict: dict[str, object]) -> None:
        """Note the masks of pruned weights in a ``state_dict`` that Lightning loads next."""
        self._own_masks = OwnMasks(self._trainer, state_dict)

    def note_loaded(self) -> None:
        """Note the weights that Lightning has loaded. Only the first call has an effect."""
        if self._loaded is None:
            self._loaded = LoadedWeights(self._trainer.lightning_module)

    def prune(self) -> None:
        """Prune again what a user's hook had pruned."""
        if self._own_masks is not None:
            self._own_masks.apply()

    def put_back(self, read: Callable[[], Mapping[str, object]]) -> list[str]:
        """Restore weights that have changed since the load. Return a reason for each that can't be restored.

        Args:
            read: Reads the weights of the checkpoint again.
        """
        return [] if self._loaded is None else self._loaded.put_back(read)

    def load_masks(self) -> None:
        """Restore the masks."""
        if self._own_masks is not None:
            self._own_masks.load()


GROUPS: Final = "param_groups"

NamesOfGroups = list[list[list[str]]]
"""The names of the parameters in each group of each optimizer."""


@final
class ParamGroups:
    """The groups of a fit's optimizers, compared with the groups at its start.

    Args:
        trainer: The trainer that runs the fit. Its optimizers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = held_by_groups(trainer)

    def state_dict(self) -> NamesOfGroups | None:
        """Return the parameters of all groups, or ``None`` while the groups are as they were created."""
        if held_by_groups(self._trainer) == self._first:
            return None
        return self._names()

    def load_state_dict(self, state: NamesOfGroups | None) -> None:
        """Restore the optimizers' groups. Lightning loads the settings of each group.

        Raises:
            NotExactError: If a group had a tensor that is not a parameter of the module.
        """
        if state is None or len(state) != len(self._trainer.optimizers):
            return
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for number, (optimizer, groups, now) in enumerate(
            zip(self._trainer.optimizers, state, self._names(), strict=True)
        ):
            if groups == now:  # a callback has done it, as Lightning's BaseFinetuning does
                continue
            unknown = [name for group in groups for name in group if name not in parameters]
            if unknown:
                raise NotExactError(
                    f"Optimizer {number} ({type(optimizer).__name__}) can't be restored: while training, it was given "
                    f"{unknown[0] or 'a tensor'}, which is not a parameter of the module. Make it a parameter, or "
                    "give it to the optimizer in configure_optimizers."
                )
            del optimizer.param_groups[len(groups) :]
            for group, names in zip(optimizer.param_groups, groups, strict=False):
                group["params"] = [parameters[name] for name in names]
            for names in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})

    def _names(self) -> NamesOfGroups:
        names = {id(parameter): name for name, parameter in self._trainer.lightning_module.named_parameters()}
        held = held_by_groups(self._trainer)
        return [[[names.get(parameter, "") for parameter in group] for group in groups] for groups in held]


def held_by_groups(trainer: Trainer) -> list[list[list[int]]]:
    """Return the IDs of the parameters in each group of each optimizer."""
    groups = (optimizer.param_groups for optimizer in trainer.optimizers)
    return [[[id(parameter) for parameter in group["params"]] for group in of_one] for of_one in groups]
