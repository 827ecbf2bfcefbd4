"""Bytes and the uint8 tensors that carry them through a checkpoint.

A checkpoint must load with ``torch.load(weights_only=True)``, which refuses ``bytes``; a uint8 tensor passes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


def blob_to_tensor(blob: bytes) -> Tensor:
    """Return `blob` as a uint8 tensor of its length."""
    if not blob:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def tensor_to_blob(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor.

    By address, since ``Tensor.numpy`` needs NumPy, which torch does not demand, and ``tolist`` is 100 times slower.
    """
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


# Marks a uint8 tensor that is one: a mask, an image in a metric.
_NO_BLOB = "\0uint8"


class BlobInterner:
    """Turns the bytes in a nested state into tensors, equal bytes into one tensor.

    ``torch.save`` writes a storage that appears several times once; the states of three moments of an epoch differ in
    one generator of three, so this saves most of their size.
    """

    def __init__(self) -> None:
        self._tensors: dict[bytes, Tensor] = {}

    def pack(self, state: Any) -> Any:
        """Return a copy of `state` (dicts, lists, plain values) in which every ``bytes`` is a tensor."""
        if isinstance(state, bytes):
            if state not in self._tensors:
                self._tensors[state] = blob_to_tensor(state)
            return self._tensors[state]
        if isinstance(state, Tensor) and state.dtype == torch.uint8:
            return {_NO_BLOB: state}
        if isinstance(state, dict):
            return {key: self.pack(value) for key, value in state.items()}
        if isinstance(state, list):
            return [self.pack(value) for value in state]
        return state


def unpack_blobs(state: Any) -> Any:
    """Return a copy of `state` in which every ``bytes`` is again what it was."""
    if isinstance(state, Tensor) and state.dtype == torch.uint8:
        return tensor_to_blob(state)
    if isinstance(state, dict) and _NO_BLOB in state:
        return state[_NO_BLOB]
    if isinstance(state, dict):
        return {key: unpack_blobs(value) for key, value in state.items()}
    if isinstance(state, list):
        return [unpack_blobs(value) for value in state]
    return state
