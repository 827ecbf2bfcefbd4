"""A state of plain values, tensors, and bytes in a form that JSON can hold, and back.

A value that JSON can't hold becomes a dict with one key that names its kind. All bytes are one text, under `POOL`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.blobs import POOL, blob_to_tensor, pack_blobs, tensor_to_blob, unpack_blobs

_TENSOR, _TUPLE, _PAIRS = "<tensor>", "<tuple>", "<pairs>"


def to_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` that ``json.dumps`` and ``torch.load(weights_only=True)`` accept."""
    packed = pack_blobs({name: _encoded(part) for name, part in state.items()})
    data = base64.b64encode(tensor_to_blob(packed[POOL]["data"])).decode("ascii")
    return {**packed, POOL: {**packed[POOL], "data": data}}


def from_json(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state in `packed`, which `to_json` returned, or, in an older version, `pack_blobs`."""
    data = packed[POOL]["data"]
    if isinstance(data, str):
        packed = {**packed, POOL: {**packed[POOL], "data": blob_to_tensor(base64.b64decode(data))}}
    return {name: _decoded(part) for name, part in unpack_blobs(packed).items()}


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) != 1 and all(type(key) is str for key in value):
            return {key: _encoded(child) for key, child in value.items()}
        return {_PAIRS: [[_encoded(key), _encoded(child)] for key, child in value.items()]}
    if isinstance(value, list):
        return [_encoded(child) for child in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(child) for child in value]}
    if type(value) is Tensor and value.layout is torch.strided and not (value.is_quantized or value.requires_grad):
        name = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [name, list(value.shape), str(value.device), tensor_to_blob(value.cpu())]}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(child) for child in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_PAIRS}:
        return {_decoded(key): _decoded(child) for key, child in value[_PAIRS]}
    if value.keys() == {_TUPLE}:
        return tuple(_decoded(child) for child in value[_TUPLE])
    if value.keys() == {_TENSOR}:
        return _tensor(*value[_TENSOR])
    return {key: _decoded(child) for key, child in value.items()}


def _tensor(dtype: str, shape: list[int], device: str, blob: bytes) -> Tensor:
    flat = blob_to_tensor(blob).view(getattr(torch, dtype)) if blob else torch.empty(0, dtype=getattr(torch, dtype))
    return flat.reshape(shape).to(device)
