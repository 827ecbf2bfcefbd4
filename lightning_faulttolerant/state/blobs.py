"""The bytes in a state, pooled in one uint8 tensor that carries them through a checkpoint.

A checkpoint must load with ``torch.load(weights_only=True)``, which refuses ``bytes`` but accepts a uint8 tensor. All
share one tensor, since each tensor costs a record of 200 bytes in the file. The pool is compressed, since torch's state
is half zeros and the states of two moments are mostly alike.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

POOL = "blobs"
# A dict of this one key replaces the bytes. It holds their number in the pool.
_REFERENCE = "blob"
_LEVEL = 1  # within 2 percent of level 9: whatever isn't zeros or a repetition is random


def blob_to_tensor(blob: bytes) -> Tensor:
    """Return `blob` as a uint8 tensor of the same length."""
    if not blob:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def tensor_to_blob(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor.

    It reads by address: ``Tensor.numpy`` needs NumPy, which torch does not require, and ``tolist`` is 100 times
    slower.
    """
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def pack_blobs(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `state` (dicts, lists, plain values, tensors) with all ``bytes`` moved under the key `POOL`.

    Raises:
        ValueError: If `state` uses a name that the copy needs.
    """
    if POOL in state:
        raise ValueError(f"A state can't have a part named {POOL!r}: its bytes are kept under that name.")
    numbers: dict[bytes, int] = {}
    packed: dict[str, Any] = _pack(dict(state), numbers)
    data = zlib.compress(b"".join(numbers), _LEVEL)
    return {**packed, POOL: {"lengths": [len(blob) for blob in numbers], "data": blob_to_tensor(data)}}


def unpack_blobs(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `pack_blobs` turned into `packed`."""
    pool = packed[POOL]
    blobs = list(_split(zlib.decompress(tensor_to_blob(pool["data"])), pool["lengths"]))
    state: dict[str, Any] = _unpack({name: part for name, part in packed.items() if name != POOL}, blobs)
    return state


def is_packed(state: dict[object, object]) -> bool:
    """Return whether a dict is a result of `pack_blobs`."""
    pool = dict.get(state, POOL)
    return type(pool) is dict and pool.keys() == {"lengths", "data"}


def _pack(state: object, numbers: dict[bytes, int]) -> Any:
    if isinstance(state, bytes):
        return {_REFERENCE: numbers.setdefault(state, len(numbers))}
    if isinstance(state, dict):
        if state.keys() == {_REFERENCE}:
            raise ValueError(f"A state can't hold a dict of the one key {_REFERENCE!r}: it would be taken for bytes.")
        return {key: _pack(value, numbers) for key, value in state.items()}
    if isinstance(state, list):
        return [_pack(value, numbers) for value in state]
    return state


def _unpack(state: object, blobs: list[bytes]) -> Any:
    if isinstance(state, dict):
        if state.keys() == {_REFERENCE}:
            return blobs[state[_REFERENCE]]
        return {key: _unpack(value, blobs) for key, value in state.items()}
    if isinstance(state, list):
        return [_unpack(value, blobs) for value in state]
    return state


def _split(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    end = 0
    for length in lengths:
        begin, end = end, end + length
        yield data[begin:end]
