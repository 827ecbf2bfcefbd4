"""The numbers that hooks at the start of a fit set on the user's objects.

They may follow from the weights, from a draw, or from a batch, which are others in a later process. So the first
process' values are the run's. A reading of a clock belongs to its process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.walk import Rules, attributes_of
from lightning_faulttolerant.state.reachable import names_in_code
from lightning_faulttolerant.state.tensors import is_readable

_CLOCKS = (time.time, time.monotonic, time.perf_counter)  # those of the processor are near small numbers
_MAX_BYTES = 1 << 20  # it is written with each save
_MAX_ITEMS = 1_000
_HOOKS = ("setup", "on_fit_start", "on_sanity_check_start", "on_train_start")
_NAMES_OF_CLOCKS = frozenset(clock.__name__ for clock in _CLOCKS)


@final
class StartValues:
    """Notes the attributes of some objects before these hooks.

    Args:
        owners: The objects whose hooks they are, by path.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        for path in ("module", "datamodule"):
            getattr(owners[path], "hparams", None)  # they are created on first access
        self._owners = owners
        self._began = [clock() for clock in _CLOCKS]
        own = {path: kinds.attributes(owner).items() for path, owner in owners.items()}
        self._before = {path: {name: _mark_of(one) for name, one in of} for path, of in own.items()}

    def carry(self, state: ObjectState, rules: Rules) -> dict[str, set[str]]:
        """Let a state carry the numbers that have been set since. Return them in the form of its `changed`.

        Args:
            state: The state of these objects and others.
            rules: What it leaves out.
        """
        known, parts = {*state.paths}, dict[str, set[str]]()
        for path, owner in self._owners.items():
            is_number = self._is_number(owner)
            own = attributes_of(owner, rules) if path in known else None
            found = [(n, one) for n, one in (own or {}).items() if self._before[path].get(n) != _mark_of(one)]
            numbers = {n: one for n, one in found if is_number(one) or _has_numbers(one, is_number)}
            parts |= state.contents_at(numbers.values())  # other objects may hold them, too
            parts[path] = parts.get(path, set()) | numbers.keys()
        state.carry(parts)
        self._owners = self._before = {}
        return {path: names for path, names in parts.items() if names}

    def _is_number(self, owner: object) -> Callable[[object], bool]:
        """Return what says whether a value is a number, and no reading of a clock, nor one to wait for."""
        between = [(began, clock()) for began, clock in zip(self._began, _CLOCKS, strict=True)]
        hooks = [getattr(type(owner), name, None) for name in _HOOKS]
        limit = min(self._began) if names_in_code(hooks) & _NAMES_OF_CLOCKS else math.inf

        def is_number(value: object) -> bool:
            return type(value) is float and value < limit and not any(a <= value <= b for a, b in between)

        return is_number


def _mark_of(value: Any) -> object:
    """Return what differs if an attribute is set to another value, or a short container to other numbers."""
    if type(value) is float:
        return id(value), value
    items = [*value, *value.values()] if type(value) is dict else value if type(value) is list else ()
    return id(value), type(value), [*map(id, items)] if len(items) <= _MAX_ITEMS else None


def _has_numbers(value: Any, is_number: Any) -> bool:
    """Return whether a value is a short container of numbers, or a small tensor or array of them."""
    if isinstance(value, Tensor):
        is_own = is_readable(value) and not isinstance(value, torch.nn.Parameter)
        return is_own and value.is_floating_point() and value.nbytes <= _MAX_BYTES
    if kinds.is_numpy(value, "ndarray"):
        return bool(value.dtype.kind == "f") and value.nbytes <= _MAX_BYTES
    if type(value) not in (list, tuple, dict) or not 0 < len(value) <= _MAX_ITEMS:
        return False
    return all(map(is_number, value.values() if isinstance(value, dict) else value))
