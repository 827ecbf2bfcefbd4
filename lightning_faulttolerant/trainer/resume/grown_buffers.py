"""Buffers of the ``state_dict`` that training created or gave another shape: a queue that is filled, a memory bank.

The module of a new process has them as they were at the start, and would not load them. Buffers outside the
``state_dict`` are in the state of each rank (`state.tensors.make_room`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_faulttolerant.state.tensors import LAZY, kinds_of_buffers, room_for

GROWN = "grown"

_NOTHING = "nothing"


@final
class GrownBuffers:
    """The persistent buffers of a module, compared with those that it had before a checkpoint was loaded.

    Args:
        module: The module of the fit.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._first = kinds_of_buffers(self._module, persistent=True)

    def state_dict(self) -> dict[str, str]:
        """Return what the changed buffers were at the start, by name."""
        now = kinds_of_buffers(self._module, persistent=True)
        names = {name for name in {*now, *self._first} if now.get(name) != self._first.get(name)}
        return {name: self._first.get(name, _NOTHING) for name in sorted(names)}

    def make_room(self, state: Mapping[str, str], weights: dict[str, Any], *, captured: Mapping[str, Any]) -> None:
        """Give the module buffers like those in `weights`, if they began as they do here.

        Args:
            state: The return value of `state_dict`.
            weights: The weights to load.
            captured: All buffers as they were at a capture, if a capture was saved.
        """
        modules = dict(self._module.named_modules())
        for name, began in state.items():
            prefix, _, own = name.rpartition(".")
            owner = modules.get(prefix)
            if owner is None or began == LAZY or self._first.get(name, _NOTHING) != began:
                continue
            if captured and name not in captured:  # training created it after the capture
                weights.pop(name, None)
            value = weights.get(name)
            if isinstance(value, Tensor) and (name in self._first or not hasattr(owner, own)):
                owner.register_buffer(own, room_for(value, owner, self._module))
            elif name in self._first and name not in weights:
                owner.register_buffer(own, None)
