"""A running digest of index batches: it shows whether a sampler has yielded exactly the same ones again.

Most samplers yield integers, at about 20 ns each. Objects are digested by the content that pickle would store, cuts of
lhotse by their ids, starts, and durations. Objects without content to compare, such as a lambda, are reported by name.
"""

from __future__ import annotations

import sys
import types
from array import array
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from torch import Tensor

from lightning_faulttolerant.state.blobs import tensor_to_blob

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
    parts = _BatchParts(not_compared)
    for part in parts.of(batch):
        values = crc32(part, values)
    return values, (sizes * 1_000_003) % _MODULUS


class _BatchParts:
    """Splits one batch into bytes that identify it."""

    def __init__(self, not_compared: set[str]) -> None:
        self._not_compared = not_compared
        self._inside: set[int] = set()
        self._num_left = _MAX_PARTS

    def of(self, value: object) -> Iterator[bytes]:
        """Yield the bytes of `value`."""
        self._num_left -= 1
        if self._num_left < 0:
            self._not_compared.add(f"more than {_MAX_PARTS:,} parts")
        elif type(value) in (bool, int, float, complex, types.NoneType):
            yield repr(value).encode() + b";"
        elif isinstance(value, str):
            yield from _sized(value.encode("utf-8", "surrogatepass"), str)
        elif isinstance(value, (bytes, bytearray)):
            yield from _sized(value, bytes)
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            yield self._named(value)
        elif id(value) in self._inside:
            yield b"again;"
        else:
            self._inside.add(id(value))
            yield from self._of_object(value)
            self._inside.discard(id(value))

    def _of_object(self, value: object) -> Iterator[bytes]:
        yield f"{type(value).__qualname__}:".encode()
        numpy = sys.modules.get("numpy")
        if type(value) in (list, tuple):
            yield from self._of_items(value)  # type: ignore[arg-type]
        elif type(value) is dict:
            yield from self._of_items([item for pair in value.items() for item in pair])
        elif type(value) in (set, frozenset):
            items = sorted(b"".join(self.of(item)) for item in value)  # type: ignore[attr-defined]
            yield f"{len(items)}{{".encode() + b"".join(items)
        elif isinstance(value, Tensor):
            yield f"{tuple(value.shape)} {value.dtype};".encode()
            yield tensor_to_blob(value.detach().cpu())
        elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind != "O":
            yield f"{value.shape} {value.dtype};".encode() + value.tobytes()
        elif _is_of_lhotse(value, "CutSet") and not value.is_lazy:  # type: ignore[attr-defined]
            yield from self._of_items(list(value))  # type: ignore[call-overload]
        elif _is_of_lhotse(value, "Cut"):
            yield from self._of_items([value.id, value.start, value.duration])  # type: ignore[attr-defined]
        else:
            yield from self._of_pickled(value)

    def _of_items(self, items: Sequence[object]) -> Iterator[bytes]:
        yield f"{len(items)}[".encode()
        for item in items:
            yield from self.of(item)

    def _of_pickled(self, value: object) -> Iterator[bytes]:
        try:
            made = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - the user's code, or an object that can't be pickled: a lock, a generator
            self._not_compared.add(type(value).__qualname__)
            return
        if isinstance(made, str):  # the name of a global
            yield made.encode()
            return
        call, arguments, state, *items = (*made, None, None, None)[:5]
        yield from self._of_items([call, arguments, state, *(item and list(item) for item in items)])

    def _named(self, value: type | types.FunctionType | types.BuiltinFunctionType) -> bytes:
        name = f"{value.__module__}.{value.__qualname__};"
        if _LOCAL in name and not isinstance(value, type):
            self._not_compared.add(value.__qualname__)
        return name.encode()


def _sized(data: bytes | bytearray, kind: type) -> Iterator[bytes]:
    yield f"{kind.__name__}{len(data)};".encode()
    yield bytes(data)


def _is_of_lhotse(value: object, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith("lhotse.cut.") for base in type(value).__mro__)
