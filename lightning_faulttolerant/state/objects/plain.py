"""Plain data: lists and dicts of numbers and strings, and of such lists and dicts. It stands for itself in a state."""

from __future__ import annotations

import operator
import pickle
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from lightning_faulttolerant.state.blobs import POOL

_LEAVES = frozenset({type(None), bool, int, float, str})
_KINDS = _LEAVES | {list, dict, tuple}
_MAX_DEPTH = 8
_ITEM_BYTES = 72
_values_of = operator.methodcaller("values")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Plain data.

    Args:
        value: The list or dict that holds it.
        ids: The ``id`` of each list and dict inside, and of each tuple.
        num_bytes: The approximate size.
    """

    value: Any
    ids: frozenset[int]
    num_bytes: int

    def copy(self) -> Any:
        """Return a copy, including everything inside."""
        # Safe: the bytes are our own, of plain data.
        return pickle.loads(pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL)) if self.ids else self.value.copy()


def plain_of(value: object) -> Plain | None:
    """Return `value` as plain data, or ``None`` if it is something else or refers to a list or dict twice.

    All items of one depth are checked together, at the speed of C.
    """
    if type(value) not in (list, dict):
        return None
    layer: dict[type, list[Any]] = {type(value): [value]}
    ids, tuples, num_bytes = {id(value)}, set[int](), 0
    for _ in range(_MAX_DEPTH):
        dicts = layer.get(dict, [])
        if any(map(operator.contains, dicts, repeat(POOL))):  # maybe a saved state
            return None
        parts = [list(chain.from_iterable(inside)) for inside in (*layer.values(), map(_values_of, dicts)) if inside]
        layer = {}
        for items in parts:
            kinds = set(map(type, items))
            if not kinds <= _KINDS:
                return None
            num_bytes += _ITEM_BYTES * len(items) + (sum(map(len, _of_kind(items, str))) if str in kinds else 0)
            for kind in kinds - _LEAVES:
                layer.setdefault(kind, []).extend(items if len(kinds) == 1 else _of_kind(items, kind))
        num_before = len(ids)
        ids.update(map(id, layer.get(list, ())), map(id, layer.get(dict, ())))
        if len(ids) < num_before + len(layer.get(list, ())) + len(layer.get(dict, ())):
            return None
        tuples.update(map(id, layer.get(tuple, ())))
        if not layer:
            return Plain(value=value, ids=frozenset(ids | tuples) - {id(value)}, num_bytes=num_bytes)
    return None


def _of_kind(items: list[object], kind: type) -> list[Any]:
    return [item for item in items if type(item) is kind]
