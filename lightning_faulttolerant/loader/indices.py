"""Index batches in a form that a checkpoint may hold, and back: same values, same types.

A batch with an object in it, such as a named tuple or lhotse's `CutSet`, is not kept: the sampler draws it again.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True)
class NotKept:
    """Stands for an index batch that a checkpoint can't hold.

    Args:
        num_samples: The number of its items, if it is a list or a tuple.
    """

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples


def pack_indices(batches: list[Any]) -> list[Any]:
    """Return the index batches as nested lists of plain values and bytes, each with its kind."""
    return [_pack_or_leave(batch) for batch in batches]


def unpack_indices(packed: list[Any]) -> list[Any]:
    """Return the batches that were passed to `pack_indices`, with a `NotKept` for each that could not be kept."""
    return [_unpack(item) for item in packed]


def _pack_or_leave(batch: Any) -> Any:
    try:
        return _pack(batch)
    except _HoldsObjectError:
        return ["not kept", len(batch) if isinstance(batch, (list, tuple)) else 1]


class _HoldsObjectError(Exception):
    """A batch contains a value that is neither plain nor composed of plain values."""


def _pack(value: Any) -> Any:
    if type(value) is list and value and all(type(item) is int for item in value):
        with contextlib.suppress(struct.error):  # too large for 8 bytes
            return ["ints", struct.pack(f"<{len(value)}q", *value)]
    if type(value) in _PLAIN:
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_pack(item) for item in value)]
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.tolist()]
    if _is_numpy(value):
        return ["numpy", str(value.dtype), value.tolist()]
    if type(value) is dict:
        return ["dict", *(_pack(item) for pair in value.items() for item in pair)]
    raise _HoldsObjectError


def _unpack(item: list[Any]) -> Any:
    kind, *values = item
    if kind == "ints":
        return list(struct.unpack(f"<{len(values[0]) // 8}q", values[0]))
    if kind == "plain":
        return values[0]
    if kind == "not kept":
        return NotKept(values[0])
    if kind == "tensor":
        return torch.tensor(values[1], dtype=getattr(torch, values[0]))
    if kind == "numpy":
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only indices that were NumPy's need it

        array = np.asarray(values[1], dtype=values[0])
        return array if array.ndim else array[()]
    children = [_unpack(value) for value in values]
    if kind == "dict":
        return dict(zip(children[::2], children[1::2], strict=True))
    return tuple(children) if kind == "tuple" else children


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
