"""What users leave out of a checkpoint: weights that a hook drops or rounds, or that a ``state_dict`` lacks.

Lightning loads the rest, and such a layer would start again. What training has changed is carried in our part of the
checkpoint. What it has not changed, such as a frozen base, is only compared: a new process makes it again. All else
that a hook drops stays in our autosaves.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor

from lightning_faulttolerant.state import tensors
from lightning_faulttolerant.state.objects.object_state import is_constant
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import without_masks
from lightning_faulttolerant.trainer.patches import Method
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.sharded import reshard
from lightning_faulttolerant.trainer.ranks.stored_shards import replaced
from lightning_faulttolerant.trainer.resume.loaded import IN_SHARDS, sums_of_shards

_WEIGHTS: Final = "state_dict"

LEFT_OUT: Final = "left_out"
"""The sums of the weights that a checkpoint leaves out and that training has not changed, in the state of a rank."""


@final
class LeftOut:
    """The weights of a module, compared with those at the start of the fit.

    Args:
        trainer: The trainer that runs the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._first: dict[str, int] | None = None
        self._dumped: dict[str, Any] = {}
        self._is_own = False

    def begin(self) -> None:
        """Note the weights that the fit begins with; without this call, all that is left out is carried."""
        if self._first is None:
            reshard(self._trainer)
            self._first = tensors.sums_of_bits(_readable(self._module))

    def found(self, weights: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
        """Return what some saved weights lack and training has changed, and sums of the rest for the state of a rank.

        Args:
            weights: The weights in a checkpoint.
        """
        if isinstance(self._trainer.strategy, FSDPStrategy):
            return {}, {IN_SHARDS: sums_of_shards(self._trainer)}  # it can't save without one of its weights
        if has_shards(self._trainer.strategy):  # this rank's parts: the checkpoint may have all of them, on rank 0
            weights = self._module.state_dict()
        own = _readable(self._module)
        named = without_masks(own)  # those of pruned weights are saved in another form
        left = {name: one for name, one in own.items() if name in named and not _is_saved(one, weights.get(name))}
        first = self._first or {}
        trained = {first.get(name) for name in named.keys() - left.keys()}
        copies = {name: one for name, one in left.items() if name in first and first[name] in trained}
        if not all(map(is_constant, copies.values())):
            self.carry(copies)  # code that copies weights at a start would copy later ones in a resumed run
        sums = {name: total for name, total in tensors.sums_of_bits(left).items() if first.get(name) == total}
        carried = {name: one.detach() for name, one in left.items() if name not in sums}
        in_shards = {name: one for name, one in sums_of_shards(self._trainer).items() if name not in carried}
        return carried, {**({LEFT_OUT: sums} if sums else {}), **({IN_SHARDS: in_shards} if in_shards else {})}

    def carry(self, names: Iterable[str]) -> None:
        """Carry these weights always: the checkpoint that the fit continues from carries them."""
        for name in names:
            (self._first or {}).pop(name, None)

    def note_dump(self, original: Method, checkpoint: dict[str, Any]) -> None:
        """Note what Lightning dumps. This replaces the last method that is called before the hooks of users."""
        original(checkpoint)
        self._dumped = tensors.with_tensors(checkpoint, lambda one: one)
        if self._is_own and "optimizer_states" in checkpoint:  # these dicts are the live ones: a hook may fill them
            checkpoint["optimizer_states"] = tensors.with_tensors(checkpoint["optimizer_states"], lambda one: one)

    def take_dumped(self) -> dict[str, Any]:
        """Return the last dump as it was before the hooks of users, and forget it."""
        dumped, self._dumped = self._dumped, {}
        return dumped

    def dump(self, *, has_hooks: bool) -> dict[str, Any]:
        """Return Lightning's checkpoint, with all but weights that hooks drop: states of optimizers and callbacks.

        What hooks add stays, and so does a tensor in another form, which their ``on_load_checkpoint`` translates. A
        strategy that shards loads weights before such a hook: they stay as they are.

        Args:
            has_hooks: Whether users have hooks that are called for the checkpoint.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, "_is_own", True))
            for one in self._module.modules() if isinstance(self._trainer.strategy, FSDPStrategy) else ():
                if type(one).state_dict is not torch.nn.Module.state_dict:
                    stack.enter_context(replaced(one, "state_dict", partial(_with_weights, one)))
            checkpoint: dict[str, Any] = compat.dump_checkpoint(self._trainer)
        first = self.take_dumped()
        if not has_hooks:
            return checkpoint
        kept = {name: _with_dropped(checkpoint.get(name), one) for name, one in first.items() if name != _WEIGHTS}
        if has_shards(self._trainer.strategy):
            kept[_WEIGHTS] = {**(checkpoint.get(_WEIGHTS) or {}), **first[_WEIGHTS]}
        return {**checkpoint, **kept}

    def others(self, sums: Mapping[str, int]) -> list[str]:
        """Return a line for each weight that training had not changed, and that is another one here.

        Args:
            sums: The part `LEFT_OUT` of a state.
        """
        now = tensors.sums_of_bits({name: one for name, one in _readable(self._module).items() if name in sums})
        others = [name for name, total in sums.items() if now.get(name) != total]
        return [
            f"{name}: the checkpoint leaves it out, and this process has created it with other values. Load or create "
            "it with the same values at each start, or save it"
            for name in others
        ]


def _with_weights(module: torch.nn.Module, **arguments: Any) -> object:
    """Call a ``state_dict`` of the user's, and put the weights back that it changes. FSDP gives it a destination."""
    type(module).state_dict(module, **arguments)
    return torch.nn.Module.state_dict(module, **arguments)


def _with_dropped(now: Any, first: Any) -> Any:
    """Return a value that hooks have left, with what was in it before: a tensor of the same form is a rounded one."""
    if isinstance(now, dict) and isinstance(first, dict):
        kept = {key: _with_dropped(now.get(key), one) for key, one in first.items()}
        is_same = all(key in now and now[key] is one for key, one in kept.items())
        return now if is_same else {**kept, **{key: one for key, one in now.items() if key not in kept}}
    if isinstance(now, list) and isinstance(first, list) and len(now) == len(first):
        items = list(map(_with_dropped, now, first))
        return now if all(map(operator.is_, items, now)) else items
    if isinstance(now, Tensor):
        has_form = isinstance(first, Tensor) and (now.dtype, now.shape) == (first.dtype, first.shape)
        return first if has_form else now
    is_translated = isinstance(first, (dict, list)) and not isinstance(now, (dict, list, type(None)))
    return now if is_translated else first


def load_left_out(trainer: Trainer, state: Mapping[str, Tensor]) -> None:
    """Restore carried weights as soon as Lightning has loaded the others: hooks at the start see them."""
    names = tensors.weights_of(trainer.lightning_module).keys() & state.keys()
    tensors.load_buffers(trainer.lightning_module, {name: state[name] for name in names})


def _readable(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights, each rank's part of those in shards."""
    return {name: tensors.shard_of(one) for name, one in tensors.weights_of(module).items() if tensors.is_readable(one)}


def _is_saved(tensor: Tensor, value: object) -> bool:
    value = tensors.shard_of(value)
    if not isinstance(value, Tensor) or (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
        return False
    return value.data_ptr() == tensor.data_ptr() or torch.equal(value.to(tensor.device), tensor)
