"""The encodings of columns: each converts a value to bytes, and the bytes back to the value.

Those of bytes, text, numbers, JSON, and arrays are here. A decoded array is a copy. It is writable (torch warns about
arrays that aren't), its memory is aligned whatever comes before it in the sample, and it outlives the file it came
from.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import pickle
import pickletools
from abc import ABC, abstractmethod
from collections.abc import Callable
from decimal import Decimal
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.records.lines import parse_json

_DISTRIBUTIONS = {"PIL": "pillow", "PIL.Image": "pillow", "snappy": "python-snappy"}


def extra(module: str, *, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Its name in an import.
        purpose: Its purpose here, as the end of a sentence: "to read images".

    Raises:
        ImportError: If it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _DISTRIBUTIONS.get(module, module)
        raise ImportError(
            f"{name} is needed {purpose} and can't be imported ({error}). "
            f"Run: pip install lightning-faulttolerant[streaming]"
        ) from error


Buffer: TypeAlias = bytes | mmap.mmap
"""The input of a decoder: a slice of either is ``bytes``."""

Windows: TypeAlias = Callable[[int], npt.NDArray[Any]]
"""Returns, for a size, an array whose item ``i`` is the ``size`` bytes of the buffer that begin at byte ``i``."""

Positions: TypeAlias = npt.NDArray[np.int64]


class Encoding(ABC):
    """One way to write a value of a column as bytes.

    A decoded value belongs to the caller: it keeps nothing of the buffer alive, and may be written to.
    """

    size: int | None = None
    """Number of bytes of every value, or ``None`` if values differ."""

    is_lent: bool = False
    """Whether ``lend`` avoids a copy that ``decode`` makes."""

    is_safe: bool = True
    """Whether decoding bytes of unknown origin runs no code from them."""

    @abstractmethod
    def encode(self, value: object) -> bytes:
        """Return the bytes of a value.

        Raises:
            TypeError: If this encoding doesn't support its type.
            ValueError: If it does, but can't store this value unchanged.
        """

    @abstractmethod
    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``.

        Raises:
            ValueError: If the bytes don't encode a value.
        """

    def check(self, payload: bytes) -> None:
        """Raise an error unless bytes encode a value."""
        self.decode(payload, 0, len(payload))

    def lend(self, buffer: Buffer, begin: int, end: int) -> object:
        """Return the value of ``buffer[begin:end]``, perhaps as a read-only view of the buffer."""
        return self.decode(buffer, begin, end)

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[Any]:
        """Return many values in one call: the same as calling ``decode`` for each."""
        decode = self.decode
        return [decode(buffer, begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


class WrongTypeError(TypeError, AttributeError):
    """A value is not of its column's type. As in the original library, this is also an ``AttributeError``."""


def expect_type(value: object, types: type | tuple[type, ...], *, encoding: str) -> None:
    """Raise TypeError unless a value is of a type that an encoding supports."""
    if not isinstance(value, types):
        names = " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
        raise WrongTypeError(
            f"A column of encoding {encoding!r} holds {names}, got {type(value).__name__}: {value!r:.100}"
        )


def expect_size(num_bytes: int, expected: int | None) -> None:
    """Raise ValueError unless the number of bytes is that of a value."""
    if num_bytes != expected:
        raise ValueError(f"a value has {num_bytes} bytes, its encoding {expected}")


class Bytes(Encoding):
    """Unchanged bytes."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, bytes, encoding="bytes")
        return bytes(value)

    def decode(self, buffer: Buffer, begin: int, end: int) -> bytes:
        """Return the value of ``buffer[begin:end]``."""
        return buffer[begin:end]


class Str(Encoding):
    """Text as UTF-8."""

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, str, encoding="str")
        return str(value).encode()

    def decode(self, buffer: Buffer, begin: int, end: int) -> str:
        """Return the value of ``buffer[begin:end]``."""
        return buffer[begin:end].decode()

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[str]:
        """Return many values at once."""
        return [buffer[begin:end].decode() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


class Int(Encoding):
    """A Python int as int64."""

    size = 8

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, int, encoding="int")
        try:
            return int(value).to_bytes(8, "little", signed=True)
        except OverflowError as error:
            raise ValueError(f"{value} does not fit the 8 bytes of encoding 'int'; 'str_int' has no limit") from error

    def decode(self, buffer: Buffer, begin: int, end: int) -> int:
        """Return the value of ``buffer[begin:end]``."""
        expect_size(end - begin, 8)
        return int.from_bytes(buffer[begin:end], "little", signed=True)

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[int]:
        """Return many values at once."""
        if (ends - begins != 8).any():
            return super().decode_many(buffer, windows, begins, ends)
        values: list[int] = windows(8)[begins].view("<i8").tolist()
        return values


class Scalar(Encoding):
    """A number of a NumPy type.

    Args:
        dtype: The name of the type.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self.size = self._dtype.itemsize

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        number: Any = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, str) or np.ndim(number):
            raise WrongTypeError(f"a column of {self._dtype.name} holds numbers, got {type(value).__name__}")
        with np.errstate(over="ignore"):
            converted = self._dtype.type(value)
        is_integer = self._dtype.kind in "iu" or isinstance(number, int)
        if converted.item() != number if is_integer else np.isinf(converted) and not math.isinf(number):
            raise ValueError(f"{value!r} is not a number of {self._dtype.name}: it would become {converted!r}")
        return bytes(converted.tobytes())

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        expect_size(end - begin, self.size)
        return np.frombuffer(buffer, self._dtype, 1, begin)[0]

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[Any]:
        """Return many values at once."""
        if (ends - begins != self._dtype.itemsize).any():
            return super().decode_many(buffer, windows, begins, ends)
        return list(windows(self._dtype.itemsize)[begins].view(self._dtype))


class Digits(Encoding):
    """A number as the text that Python prints for it, so no digit is lost.

    Args:
        name: The name of the encoding.
        type_: ``int``, ``float`` or ``Decimal``.
    """

    def __init__(self, name: str, type_: type[int] | type[float] | type[Decimal]) -> None:
        self._name = name
        self._type = type_

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, self._type, encoding=self._name)
        return str(self._type(value)).encode()

    def decode(self, buffer: Buffer, begin: int, end: int) -> int | float | Decimal:
        """Return the value of ``buffer[begin:end]``."""
        return self._type(buffer[begin:end].decode())


class Json(Encoding):
    """Any value that JSON returns as it was; arrays become lists."""

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        value = value.tolist() if isinstance(value, np.ndarray) else value
        text = json.dumps(value)
        found = json.loads(text)
        if not _is_same(value, found):
            raise ValueError(f"JSON turns it into {found!r:.100} (its keys are text, and it has no tuples)")
        return text.encode()

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        return parse_json(buffer[begin:end])


def _is_same(value: Any, found: Any) -> bool:
    if isinstance(found, dict):
        return value.keys() == found.keys() and all(_is_same(value[name], found[name]) for name in found)
    if isinstance(found, list):
        return isinstance(value, list) and all(map(_is_same, value, found))
    return bool(value == found or (value != value and found != found))  # NaN


class Pickled(Encoding):
    """Any object. Reading it runs any code that its bytes contain."""

    is_safe = False

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        return pickle.dumps(value)

    def check(self, payload: bytes) -> None:
        """Raise an error unless bytes are a whole pickle. Nothing of it is run."""
        for _ in pickletools.genops(payload):
            pass

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        return pickle.loads(buffer[begin:end])


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
