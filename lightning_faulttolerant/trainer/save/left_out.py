"""What users leave out of a checkpoint: weights that a hook drops or rounds, or that a ``state_dict`` lacks.

Lightning loads the rest, and such a layer would start again. What training has changed is carried in our part of the
checkpoint. What it has not changed, such as a frozen base, is only compared: a new process makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.state.tensors import is_readable, load_buffers, sums_of_bits, weights_of
from lightning_faulttolerant.trainer.adapters.state import without_masks
from lightning_faulttolerant.trainer.ranks.compat import has_shards

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

    def begin(self) -> None:
        """Note the weights that the fit begins with; without this call, all that is left out is carried."""
        if self._first is None:
            self._first = sums_of_bits(_readable(self._module))

    def found(self, weights: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return what some saved weights lack: what has changed, and sums of the rest, by name.

        Args:
            weights: The weights in a checkpoint.
        """
        if has_shards(self._trainer.strategy):
            return {}, {}  # each rank has only a part of them
        own = _readable(self._module)
        named = without_masks(own)  # those of pruned weights are saved in another form
        left = {name: one for name, one in own.items() if name in named and not _is_saved(one, weights.get(name))}
        first = self._first or {}
        sums = {name: total for name, total in sums_of_bits(left).items() if first.get(name) == total}
        return {name: one.detach() for name, one in left.items() if name not in sums}, sums

    def carry(self, names: Iterable[str]) -> None:
        """Carry these weights always: the checkpoint that the fit continues from carries them."""
        for name in names:
            (self._first or {}).pop(name, None)

    def others(self, state: Mapping[str, Any]) -> list[str]:
        """Return a line for each weight that training had not changed, and that is another one here.

        Args:
            state: The state of a rank.
        """
        sums: Mapping[str, int] = state.get(LEFT_OUT, {})
        now = sums_of_bits({name: one for name, one in _readable(self._module).items() if name in sums})
        others = [name for name, total in sums.items() if now.get(name) != total]
        return [
            f"{name}: the checkpoint leaves it out, and this process has created it with other values. Load or create "
            "it with the same values at each start, or save it"
            for name in others
        ]


def load_left_out(trainer: Trainer, state: Mapping[str, Tensor]) -> None:
    """Restore carried weights as soon as Lightning has loaded the others: hooks at the start see them."""
    names = weights_of(trainer.lightning_module).keys() & state.keys()
    load_buffers(trainer.lightning_module, {name: state[name] for name in names})


def _readable(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in weights_of(module).items() if is_readable(one)}


def _is_saved(tensor: Tensor, value: object) -> bool:
    if not isinstance(value, Tensor) or (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
        return False
    return value.data_ptr() == tensor.data_ptr() or torch.equal(value.to(tensor.device), tensor)
