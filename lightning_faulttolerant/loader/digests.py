"""Digests of index batches and of samples: they show whether a sampler or a data set yields the same ones again.

The digest of index batches is a running one. Most samplers yield integers, at about 20 ns each. Objects are digested by
the content that pickle would store, cuts of lhotse by their ids, starts, and durations. Objects without content to
compare, such as a lambda, are reported by name. The digest of a sample or batch covers everything that it holds.
"""

from __future__ import annotations

import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import math
import pathlib
import sys
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch

from lightning_faulttolerant.state.packing import tensor_to_blob
from lightning_faulttolerant.state.reachable import attributes

Digest = tuple[int, int]
"""A checksum of the values, and a hash of the number of values in each batch."""

START: Digest = (0, 0)
"""The digest of no batches."""

_MODULUS = (1 << 61) - 1
_MAX_PARTS = 50_000  # 25 ms
_LOCAL = "<"  # in the names of lambdas, and of functions that functions define


def updated(digest: Digest, batch: object, not_compared: set[str]) -> Digest:
    """Return the digest of the batches so far and `batch`. It is the same in each process.

    Args:
        digest: The digest of the batches so far.
        batch: The value that the sampler yielded: indices, or anything else.
        not_compared: Receives the names of objects in `batch` that the digest can't tell from others of their kind.
    """
    values, sizes = digest
    numbers: Any = batch if type(batch) is list else (batch,) if type(batch) is int else None
    if numbers is not None:
        size = len(numbers) + 2 if type(batch) is list else 1  # a single number is not a list of one
        try:
            return crc32(array("q", numbers), values), (sizes * 1_000_003 + size) % _MODULUS
        except (TypeError, OverflowError):  # not integers, or too large for 8 bytes
            pass
    walk = _Walk(is_of_indices=True, not_compared=not_compared, num_left=_MAX_PARTS)
    return _checksum(batch, walk, values), (sizes * 1_000_003) % _MODULUS


_Memory = ctypes.Array[ctypes.c_ubyte]
_Bytes = bytes | memoryview | _Memory
_SMALL_BYTES = 65_536
_NUM_SUMS = 1_024
_WORD_BYTES = 8
# The bytes determine these values completely.
_PLAIN_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
                 torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}  # fmt: skip
_SHOWN = (bool, int, float, complex, type(None), enum.Enum, datetime.date, datetime.time, datetime.timedelta,
          decimal.Decimal, fractions.Fraction, pathlib.PurePath, range, slice)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def sample_digest(sample: object, digest: int = 0) -> int:
    """Return a checksum of every number, string, and array in `sample`, including those inside objects of any class.

    Args:
        sample: The value that a loader or a data set yielded.
        digest: The checksum of the previous values.
    """
    plain = _plain(sample)
    if plain is None:
        return _checksum(sample, _Walk(), digest)
    return crc32(plain[1], crc32(plain[0], digest))


def _checksum(value: object, walk: _Walk, digest: int = 0) -> int:
    for part in _parts(value, walk):
        digest = crc32(part, digest)
    return digest


def _plain(value: object) -> tuple[bytes, _Bytes] | None:
    """Return what `_of_tensor` yields, for a small tensor of whose bytes nothing has to be converted; else ``None``.

    After a training step, each attribute of a tensor takes 0.3 µs. So this reads as few as possible: the others of a
    sparse or nested tensor raise an error.
    """
    if type(value) is not torch.Tensor or not value.is_cpu:
        return None
    try:
        if not value.is_contiguous() or value.is_neg():
            return None
        shown, kind = _layout(value.shape, value.dtype)
        address = value.data_ptr()  # 0 if the tensor has no memory
        return (shown, kind.from_address(address)) if kind is not None and address else None
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=256)
def _layout(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, type[_Memory] | None]:
    """Return the text for a shape and type, and the type of its bytes, unless these are none, many, or not plain."""
    num_bytes = shape.numel() * dtype.itemsize
    is_plain = dtype in _PLAIN_DTYPES and not dtype.is_complex  # the bytes of a complex one may mean its conjugate
    is_small = 0 < num_bytes <= _SMALL_BYTES
    return f"{tuple(shape)} {dtype}".encode(), ctypes.c_ubyte * num_bytes if is_plain and is_small else None


@dataclass(kw_only=True, slots=True)
class _Walk:
    """What is known while one value is split into its parts.

    ``is_of_indices`` says whether it is an index batch. The digest of a batch shows the types of containers, has at
    most ``num_left`` more parts, and is the same if equal objects are one object. ``seen`` has objects by their ids.
    """

    is_of_indices: bool = False
    not_compared: set[str] = field(default_factory=set)
    num_left: float = math.inf
    seen: dict[int, tuple[int, object]] = field(default_factory=dict)


def _parts(value: object, walk: _Walk) -> Iterator[_Bytes]:
    numpy = sys.modules.get("numpy")
    walk.num_left -= 1
    if walk.num_left < 0:
        walk.not_compared.add(f"more than {_MAX_PARTS:,} parts")
    elif isinstance(value, str):
        yield f"str{len(value)};".encode()
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, torch.Tensor):
        yield from _plain(value) or _of_tensor(value)
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        yield from _of_array(value, walk)
    elif isinstance(value, (bytes, bytearray)):
        yield f"bytes{len(value)};".encode()
        yield bytes(value)
    elif isinstance(value, _SHOWN):
        yield repr(value).encode("utf-8", "surrogatepass") + b";"
    elif isinstance(value, _NAMED):
        name = getattr(value, "__qualname__", value.__name__)
        if _LOCAL in name and not isinstance(value, type):
            walk.not_compared.add(name)
        yield (f"{getattr(value, '__module__', '')}.{name};" if walk.is_of_indices else name).encode()
    elif id(value) in walk.seen:
        yield f"again {walk.seen[id(value)][0]};".encode()
    else:
        walk.seen[id(value)] = (len(walk.seen), value)  # holds the object, so its id stays unique
        yield from _of_object(value, walk)
        if walk.is_of_indices:
            del walk.seen[id(value)]


def _of_object(value: object, walk: _Walk) -> Iterator[_Bytes]:
    if walk.is_of_indices:
        yield f"{type(value).__qualname__}:".encode()
    if walk.is_of_indices and type(value) not in _CONTAINERS:
        yield from _parts(_content(value, walk.not_compared), walk)
    elif isinstance(value, Mapping):
        yield f"{len(value)}{{".encode()
        for key, child in value.items():
            yield from _parts(key, walk)
            yield from _parts(child, walk)
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)}[".encode()
        for child in value:
            yield from _parts(child, walk)
    elif isinstance(value, AbstractSet):  # in no order
        checksums = (_checksum(child, replace(walk, seen=dict(walk.seen))) for child in value)
        yield repr(sorted(checksums)).encode()
    else:
        yield f"{type(value).__qualname__}:".encode()
        if type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "tobytes"):
            yield value.tobytes()
            return
        for name, child in attributes(value).items():
            yield f"{name}=".encode()
            yield from _parts(child, walk)


def _content(value: Any, not_compared: set[str]) -> object:
    """Return what pickle would store of an object; of cuts of lhotse, their ids, starts, and durations."""
    if _is_of_lhotse(value, "CutSet") and not value.is_lazy:
        return list(value)
    if _is_of_lhotse(value, "Cut"):
        return [value.id, value.start, value.duration]
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - the user's code, or an object that can't be pickled: a lock, a generator
        not_compared.add(type(value).__qualname__)
        return None
    if isinstance(made, str):  # the name of a global
        return made
    call, arguments, state, *items = (*made, None, None, None)[:5]
    return [call, arguments, state, *(item and list(item) for item in items)]


def _is_of_lhotse(value: object, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith("lhotse.cut.") for base in type(value).__mro__)


def _of_tensor(tensor: torch.Tensor) -> Iterator[_Bytes]:
    shape = f"{tensor.size(0)} parts" if tensor.is_nested else tuple(tensor.shape)
    yield f"{shape} {tensor.dtype}".encode()
    if tensor.is_meta or tensor.is_quantized:
        return
    tensor = tensor.detach()
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from _of_tensor(part)
    elif parts := _parts_of(tensor):
        yield from _parts(parts, _Walk())
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from _of_tensor(tensor.indices())
        yield from _of_tensor(tensor.values())
    elif tensor.layout is not torch.strided:
        yield from _of_tensor(tensor.to_dense())
    elif tensor.dtype not in _PLAIN_DTYPES:
        yield repr(tensor.cpu().reshape(-1).tolist()).encode()
    else:
        content = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if content.stride(-1) != 1:  # a view of one element, which counts as contiguous
            content = content.as_strided(content.shape, (1,))
        content = content.view(torch.uint8)
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


def _of_array(array: Any, walk: _Walk) -> Iterator[_Bytes]:
    numpy = sys.modules["numpy"]
    yield f"{array.shape} {array.dtype}".encode()
    if array.dtype.hasobject:
        for child in array.reshape(-1).tolist():
            yield from _parts(child, walk)
        return
    content = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    yield from _of_numbers(content, numpy.int64, numpy.ndarray.tobytes)


def _parts_of(value: torch.Tensor) -> dict[str, object] | None:
    """Return the parts of a tensor if it has no memory itself: reading at its address would end the process."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return None
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}
    try:
        has_memory = value.data_ptr() != 0 or not value.numel()
    except RuntimeError:
        has_memory = False
    return None if has_memory else dict(vars(value))
