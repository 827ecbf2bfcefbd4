"""The encodings ``ndarray``, ``ndarray:<dtype>`` and ``ndarray:<dtype>:<shape>``.

A decoded array is a copy. It is writable (torch warns about arrays that aren't), its memory is aligned whatever comes
before it in the sample, and it outlives the file it came from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.streaming.format.encoding import (
    Buffer,
    Encoding,
    Positions,
    Windows,
    expect_size,
    expect_type,
)

Array = npt.NDArray[Any]

_DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    8: np.dtype("uint8"),
    9: np.dtype("int8"),
    16: np.dtype("uint16"),
    17: np.dtype("int16"),
    18: np.dtype("float16"),
    32: np.dtype("uint32"),
    33: np.dtype("int32"),
    34: np.dtype("float32"),
    64: np.dtype("uint64"),
    65: np.dtype("int64"),
    66: np.dtype("float64"),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_MAX_NDIM = 63

# Arrays up to this size are copied many at a time and share the memory of that copy. Larger ones have separate memory,
# so keeping one sample does not keep its neighbors.
_MAX_SHARED_BYTES = 4096

DTYPES = tuple(dtype.name for dtype in _DTYPE_OF_CODE.values())
"""Names of the supported array types."""


def array_encoding(config: str) -> Encoding:
    """Return the encoding that ``ndarray:<config>`` names.

    Raises:
        ValueError: If the config is not understood.
    """
    if not config:
        return DynamicArray(None)
    dtype_name, *rest = config.split(":")
    if dtype_name not in DTYPES or len(rest) > 1:
        raise ValueError(
            f"ndarray:{config}: needs a type, one of {', '.join(DTYPES)}, and may have a shape (ndarray:int32:3,4)"
        )
    if not rest:
        return DynamicArray(np.dtype(dtype_name))
    shape = tuple(int(dim) for dim in rest[0].split(","))
    if min(shape) < 1:
        raise ValueError(f"ndarray:{config}: each dimension is at least 1")
    return FixedArray(np.dtype(dtype_name), shape)


def _checked(value: Any, dtype: np.dtype[Any] | None) -> Array:
    expect_type(value, np.ndarray, encoding="ndarray")
    array: Array = value
    if array.dtype.newbyteorder("<") not in _CODE_OF_DTYPE:
        raise ValueError(f"An array of {array.dtype} can't be stored; the types are {', '.join(DTYPES)}.")
    if dtype is not None and array.dtype.newbyteorder("<") != dtype:
        raise ValueError(f"The column holds arrays of {dtype}, got one of {array.dtype}.")
    if not array.ndim or not array.size:
        raise ValueError(f"An array of shape {array.shape} can't be stored: it needs an axis and an element.")
    # The stored values are little-endian, as on every platform that uses the format.
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


class FixedArray(Encoding):
    """Arrays of one type and one shape; only the values are stored.

    Args:
        dtype: Type of the elements.
        shape: Shape of each array, at least one dimension.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape
        self._num_elements = math.prod(shape)
        self.size = dtype.itemsize * self._num_elements
        self.is_lent = self.size > _MAX_SHARED_BYTES

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        array = _checked(value, self._dtype)
        if array.shape != self._shape:
            raise ValueError(f"The column holds arrays of shape {self._shape}, got {array.shape}.")
        return array.tobytes()

    def decode(self, buffer: Buffer, begin: int, end: int) -> Array:
        """Return the value of ``buffer[begin:end]``."""
        copied: Array = self.lend(buffer, begin, end).copy()
        return copied

    def lend(self, buffer: Buffer, begin: int, end: int) -> Array:
        """Return the value of ``buffer[begin:end]`` as a view of the buffer."""
        expect_size(end - begin, self.size)
        flat = np.frombuffer(buffer, self._dtype, self._num_elements, begin)
        return flat if len(self._shape) == 1 else flat.reshape(self._shape)

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[Array]:
        """Return many values at once."""
        size = self._dtype.itemsize * self._num_elements
        if size > _MAX_SHARED_BYTES or (ends - begins != size).any():
            return super().decode_many(buffer, windows, begins, ends)
        return list(windows(size)[begins].view(self._dtype).reshape(-1, *self._shape))


class DynamicArray(Encoding):
    """Arrays of any shape, of one type or of any.

    One byte for the type if it is not fixed; one byte ``ndim << 2 | k``; the dimensions in unsigned integers of
    ``2 ** k`` bytes; the values.

    Args:
        dtype: Type of the elements, or ``None`` if each array stores its own.
    """

    def __init__(self, dtype: np.dtype[Any] | None) -> None:
        self._dtype = dtype

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        array = _checked(value, self._dtype)
        if array.ndim > _MAX_NDIM:
            raise ValueError(f"An array of {array.ndim} axes can't be stored, at most {_MAX_NDIM}.")
        largest = max(array.shape)
        k = next(k for k in range(4) if largest < 1 << (8 << k))
        head = b"" if self._dtype is not None else bytes([_CODE_OF_DTYPE[array.dtype]])
        dims = b"".join(dim.to_bytes(1 << k, "little") for dim in array.shape)
        return head + bytes([array.ndim << 2 | k]) + dims + array.tobytes()

    def decode(self, buffer: Buffer, begin: int, end: int) -> Array:
        """Return the value of ``buffer[begin:end]``."""
        dtype = self._dtype
        at = begin
        if dtype is None:
            dtype = _DTYPE_OF_CODE[self._byte(buffer, at, end)]
            at += 1
        head = self._byte(buffer, at, end)
        ndim, width = head >> 2, 1 << (head & 3)
        at += 1
        first = at + ndim * width
        if not ndim or first > end:
            raise ValueError(f"an array of {ndim} dimensions in {end - begin} bytes")
        shape = tuple(int.from_bytes(buffer[i : i + width], "little") for i in range(at, first, width))
        expect_size(end - first, math.prod(shape) * dtype.itemsize)
        flat: Array = np.frombuffer(buffer, dtype, math.prod(shape), first).copy()
        return flat if ndim == 1 else flat.reshape(shape)

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[Array]:
        """Return many values in one call, faster if all have the same type and shape."""
        size = int(ends[0] - begins[0])
        if not 0 < size <= _MAX_SHARED_BYTES or (ends - begins != size).any():
            return super().decode_many(buffer, windows, begins, ends)
        first = self.decode(buffer, int(begins[0]), int(ends[0]))
        table = windows(size)[begins].view(np.uint8).reshape(-1, size)
        heads, values = np.hsplit(table, [size - first.nbytes])
        if (heads != heads[0]).any():
            return super().decode_many(buffer, windows, begins, ends)
        return list(values.copy().view(first.dtype).reshape(-1, *first.shape))

    @staticmethod
    def _byte(buffer: Buffer, at: int, end: int) -> int:
        if at >= end:
            raise ValueError("an array ends before its shape")
        return buffer[at]
