"""Convert the description of a checkpoint to JSON, however large, deep or strange it is."""

from __future__ import annotations

import math
from typing import Any

from lightning_faulttolerant.checkpoint.described import LongData, Made, Named, Storage, TensorInfo

_MAX_DEPTH = 24
_MAX_VALUES = 100_000
_LEFT_OUT = "..."


def plain(value: Any) -> Any:
    """Return a value as dicts with string keys, lists, strings, finite numbers, booleans and None.

    Values nested more than 24 deep and values after the first 100,000 are left out.

    Args:
        value: A value of a described checkpoint.

    Example:
        >>> plain({1: (float("inf"), b"abc"), "seen": {True, }})
        {'1': ['inf', '3 bytes'], 'seen': 'a set'}
    """
    return _Plain().of(value, depth=0)


class _Plain:
    def __init__(self) -> None:
        self._num_left = _MAX_VALUES

    def of(self, value: Any, *, depth: int) -> Any:
        self._num_left -= 1
        if depth > _MAX_DEPTH or self._num_left < 0:
            return _LEFT_OUT
        if isinstance(value, dict):
            return self._mapping(value, depth=depth + 1)
        if isinstance(value, (list, tuple)):
            items = [self.of(item, depth=depth + 1) for item in value[: max(self._num_left, 0)]]
            return items if len(items) == len(value) else [*items, _LEFT_OUT]
        return one(value)

    def _mapping(self, value: dict[Any, Any], *, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, child in value.items():
            if self._num_left < 0:
                made[_LEFT_OUT] = _LEFT_OUT
                break
            made[key if isinstance(key, str) else str(self.of(key, depth=depth))] = self.of(child, depth=depth)
        return made


def one(value: Any) -> Any:
    """Return a single value, or a description of it.

    Args:
        value: A value of a described checkpoint, other than a dict, list or tuple.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return f"{len(value)} bytes"
        case LongData(kind, num_bytes):
            return f"{kind} of {num_bytes} bytes"
        case TensorInfo(dtype, shape):
            return f"tensor of {dtype} {list(shape)}"
        case Storage(_, dtype, num_bytes):
            return f"storage of {dtype}, {num_bytes} bytes"
        case Named(name) | Made(name):
            return f"<{name}>"
    return f"a {type(value).__name__}"
