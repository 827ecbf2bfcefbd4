"""Index batches as what a checkpoint may hold, and back: same values, same types."""

from __future__ import annotations

import contextlib
import struct
import sys
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.errors import NotExactError

_PLAIN = (int, float, str, bool, type(None))


def pack_indices(batches: list[Any]) -> list[Any]:
    """Return the index batches as nested lists of plain values and bytes, each with its kind.

    Raises:
        NotExactError: If an index is of a type that a checkpoint can't hold.
    """
    return [_pack(batch) for batch in batches]


def unpack_indices(packed: list[Any]) -> list[Any]:
    """Return what `pack_indices` was given."""
    return [_unpack(item) for item in packed]


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
    raise NotExactError(
        f"The sampler gives an index of type {type(value).__name__}, which can't be kept in a checkpoint. Batches in"
        " flight could not be handed out again. Let the sampler give integers, strings, tuples, tensors or arrays."
    )


def _unpack(item: list[Any]) -> Any:
    kind, *values = item
    if kind == "ints":
        return list(struct.unpack(f"<{len(values[0]) // 8}q", values[0]))
    if kind == "plain":
        return values[0]
    if kind == "tensor":
        return torch.tensor(values[1], dtype=getattr(torch, values[0]))
    if kind == "numpy":
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only indices that were NumPy's need it

        array = np.asarray(values[1], dtype=values[0])
        return array if array.ndim else array[()]
    children = [_unpack(value) for value in values]
    return tuple(children) if kind == "tuple" else children


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
