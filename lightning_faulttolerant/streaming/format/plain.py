"""Encodings of bytes, text, numbers, and JSON."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.format.encoding import (
    Buffer,
    Encoding,
    Positions,
    Windows,
    expect_size,
    expect_type,
)


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
        converted = self._dtype.type(value)
        if self._dtype.kind in "iu" and converted != value:
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
    """Any value that JSON supports; arrays become lists."""

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        return json.loads(buffer[begin:end])


class Pickled(Encoding):
    """Any object. Reading it runs any code that its bytes contain."""

    is_safe = False

    def encode(self, value: object) -> bytes:
        """Return the bytes of a value."""
        return pickle.dumps(value)

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        return pickle.loads(buffer[begin:end])
