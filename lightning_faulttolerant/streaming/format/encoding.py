"""The interface of a column's encoding: it converts a value to bytes, and the bytes back to the value."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
