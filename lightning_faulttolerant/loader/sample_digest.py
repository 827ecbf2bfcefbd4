"""A small digest of a sample, by which one that was drawn again is told from another."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_faulttolerant.state.blobs import tensor_to_blob

_MAX_PARTS = 64
_MAX_ELEMENTS = 512
# Of these the bytes say it all, and cost a tenth of the numbers.
_PLAIN_DTYPES = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}


def sample_digest(sample: Any) -> int:
    """Return a checksum of the numbers, texts and arrays in `sample`, of the first of them where there are many."""
    digest = 0
    for number, part in enumerate(_parts(sample)):
        if number >= _MAX_PARTS:
            break
        digest = zlib.crc32(part, digest)
    return digest


def _parts(value: Any) -> Iterator[bytes]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        if value.layout is not torch.strided or value.is_meta:
            return
        if value.is_cpu and value.dtype in _PLAIN_DTYPES:
            yield tensor_to_blob(value.detach().reshape(-1)[:_MAX_ELEMENTS])
        else:
            yield repr(value.detach().reshape(-1)[:_MAX_ELEMENTS].tolist()).encode()
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        yield f"{value.shape} {value.dtype}".encode()
        if value.dtype.kind != "O":
            yield value.reshape(-1)[:_MAX_ELEMENTS].tobytes()
    elif isinstance(value, (bool, int, float, complex, type(None))):
        yield repr(value).encode()
    elif isinstance(value, (str, bytes, bytearray)):
        cut = value[: 8 * _MAX_ELEMENTS]
        yield cut.encode("utf-8", "surrogatepass") if isinstance(cut, str) else bytes(cut)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _parts(key)
            yield from _parts(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _parts(child)
    else:
        yield type(value).__qualname__.encode()
