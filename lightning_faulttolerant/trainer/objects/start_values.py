"""The numbers that hooks at the start of a fit set on the user's objects.

They may follow from the weights, from a draw, or from a batch, which are others in a later process. So the first
process' values are the run's. A reading of a clock belongs to its process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.walk import Rules, attributes_of
from lightning_faulttolerant.state.tensors import is_readable

_CLOCKS = (time.time, time.monotonic, time.perf_counter)  # those of the processor are near small numbers
_MAX_BYTES = 1 << 20  # it is written with each save
_MAX_ITEMS = 1_000
_MISSING = object()


@final
class StartValues:
    """Notes the attributes of some objects before these hooks.

    Args:
        owners: The objects whose hooks they are, by path.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        for owner in owners.values():
            getattr(owner, "hparams", None)  # they are created on first access
        self._owners = owners
        self._began = [clock() for clock in _CLOCKS]
        self._before = {path: {n: (one, _items(one)) for n, one in _of(owner)} for path, owner in owners.items()}

    def carry(self, state: ObjectState, rules: Rules) -> dict[str, set[str]]:
        """Let a state carry the numbers that have been set since. Return them in the form of its `changed`.

        Args:
            state: The state of these objects and others.
            rules: What it leaves out.
        """
        between = [(began, clock()) for began, clock in zip(self._began, _CLOCKS, strict=True)]

        def is_number(value: object) -> bool:
            return type(value) is float and not any(first <= value <= last for first, last in between)

        known, parts = {*state.paths}, dict[str, set[str]]()
        for path, owner in self._owners.items():
            own = attributes_of(owner, rules) if path in known else None
            found = [
                (n, one)
                for n, one in (own or {}).items()
                if not _is_same(self._before[path].get(n, (_MISSING, None)), one)
            ]
            numbers = {n: one for n, one in found if is_number(one) or _has_numbers(one, is_number)}
            parts |= state.contents_at(numbers.values())  # other objects may hold them, too
            parts[path] = parts.get(path, set()) | numbers.keys()
        state.carry(parts)
        return {path: names for path, names in parts.items() if names}


def _of(owner: object) -> Iterator[tuple[str, object]]:
    return iter(() if owner is None else list(kinds.attributes(owner).items()))


def _items(value: Any) -> list[object] | None:
    if type(value) not in (list, dict) or len(value) > _MAX_ITEMS:
        return None
    return [*value, *value.values()] if type(value) is dict else [*value]


def _is_same(before: tuple[object, list[object] | None], now: object) -> bool:
    value, items = before
    return value is now and (items is None or list(map(id, items)) == list(map(id, _items(now) or ())))


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
