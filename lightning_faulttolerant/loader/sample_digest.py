"""A small digest of everything that a sample or a batch holds, to compare it with one that is drawn again."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from lightning_faulttolerant.state.blobs import tensor_to_blob
from lightning_faulttolerant.state.reachable import attributes

_SMALL_BYTES = 65_536
_NUM_SUMS = 1_024
_WORD_BYTES = 8
# The bytes determine these values completely.
_PLAIN_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
                 torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}  # fmt: skip
_SHOWN = (bool, int, float, complex, type(None), enum.Enum, datetime.date, datetime.time, datetime.timedelta,
          decimal.Decimal, fractions.Fraction, pathlib.PurePath, range, slice)  # fmt: skip
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def sample_digest(sample: object, digest: int = 0) -> int:
    """Return a checksum of every number, string, and array in `sample`, including those inside objects of any class.

    Args:
        sample: The value that a loader or a data set yielded.
        digest: The checksum of the previous values.
    """
    for part in _parts(sample, {}):
        digest = zlib.crc32(part, digest)
    return digest


def _parts(value: object, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes | memoryview]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        yield from _of_array(value, seen)
    elif isinstance(value, (str, bytes, bytearray)):
        yield f"{len(value)}".encode()
        yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    elif isinstance(value, _SHOWN):
        yield repr(value).encode("utf-8", "surrogatepass")
    elif isinstance(value, _NAMED):
        yield getattr(value, "__qualname__", value.__name__).encode()
    elif id(value) in seen:
        yield f"again {seen[id(value)][0]}".encode()
    else:
        seen[id(value)] = (len(seen), value)  # holds the object, so its id stays unique
        yield from _of_object(value, seen)


def _of_object(value: object, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes | memoryview]:
    if isinstance(value, Mapping):
        yield f"{len(value)}".encode()
        for key, child in value.items():
            yield from _parts(key, seen)
            yield from _parts(child, seen)
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)}".encode()
        for child in value:
            yield from _parts(child, seen)
    elif isinstance(value, AbstractSet):  # in no order
        yield repr(sorted(sample_digest(child) for child in value)).encode()
    else:
        yield type(value).__qualname__.encode()
        if type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "tobytes"):
            yield value.tobytes()
            return
        for name, child in attributes(value):
            yield name.encode()
            yield from _parts(child, seen)


def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    shape = f"{tensor.size(0)} parts" if tensor.is_nested else tuple(tensor.shape)
    yield f"{shape} {tensor.dtype}".encode()
    if tensor.is_meta or tensor.is_quantized:
        return
    tensor = tensor.detach()
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from _of_tensor(part)
    elif tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            yield from _of_tensor(tensor.indices())
            yield from _of_tensor(tensor.values())
    elif tensor.dtype not in _PLAIN_DTYPES:
        yield repr(tensor.cpu().reshape(-1).tolist()).encode()
    else:
        content = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if content.data_ptr() % _WORD_BYTES:  # a part of a larger tensor
            content = content.clone()
        yield from _of_numbers(content, torch.int64, lambda part: tensor_to_blob(part.cpu()))


def _of_numbers(content: Any, word: Any, bytes_of: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Return the bytes, or, if there are many, sums of them. A change of any byte changes a sum, at memory speed.

    Args:
        content: The bytes, as a tensor or an array.
        word: The 8-byte integer type.
        bytes_of: Returns the bytes of a tensor or an array.
    """
    if len(content) > _SMALL_BYTES:
        num_words = len(content) // (_NUM_SUMS * _WORD_BYTES) * _NUM_SUMS
        words = content[: num_words * _WORD_BYTES].view(word).reshape(_NUM_SUMS, -1)
        yield bytes_of(words.sum(1))
        yield bytes_of(words[:, 0])
        content = content[num_words * _WORD_BYTES :]
    yield bytes_of(content)


def _of_array(array: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes | memoryview]:
    numpy = sys.modules["numpy"]
    yield f"{array.shape} {array.dtype}".encode()
    if array.dtype.hasobject:
        for child in array.reshape(-1).tolist():
            yield from _parts(child, seen)
        return
    content = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    yield from _of_numbers(content, numpy.int64, numpy.ndarray.tobytes)
