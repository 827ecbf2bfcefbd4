"""The byte layout of samples with a set of columns. Created once per set, shared by all shards that have it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from lightning_faulttolerant.streaming.format.encoding import Buffer, Encoding, Positions, Windows
from lightning_faulttolerant.streaming.format.index import encoding_of
from lightning_faulttolerant.streaming.format.shard_info import Columns

_UINT32_BYTES = 4

# The name of a column, the function that decodes its bytes, and the number of bytes if it is constant.
Decoder: TypeAlias = tuple[str, Callable[[Buffer, int, int], Any], int | None]


@functools.lru_cache(maxsize=1024)
def layout_of(columns: Columns) -> Layout:
    """Return the layout of columns. Equal columns share one."""
    return Layout(columns)


class Layout:
    """Splits samples: the lengths of the columns of variable size, then the payloads of all columns.

    Args:
        columns: The columns as the index lists them.
    """

    def __init__(self, columns: Columns) -> None:
        # A size of 0 means the same as none: the length is in each sample.
        self._columns: tuple[tuple[str, Encoding, int | None], ...] = tuple(
            (name, encoding_of(encoding), size or None)
            for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True)
        )
        self.names = columns.names
        self._decoders = tuple((name, encoding.decode, size) for name, encoding, size in self._columns)
        self._lenders = tuple((name, encoding.lend, size) for name, encoding, size in self._columns)
        self.is_lent = any(encoding.is_lent for _, encoding, _ in self._columns)
        """Whether ``lend`` avoids copies that ``decode`` makes."""
        self._num_lengths = sum(size is None for _, _, size in self._columns)
        self._head = struct.Struct(f"<{self._num_lengths}I")
        self.min_bytes = self._head.size + sum(size or 0 for _, _, size in self._columns)
        """The smallest size of a sample: lengths, and everything of fixed size."""

    @property
    def is_fixed(self) -> bool:
        """Whether all samples have exactly ``min_bytes``."""
        return not self._num_lengths

    def unsafe_column(self) -> str | None:
        """Return the name of a column that is not safe to decode, if one exists."""
        return next((name for name, encoding, _ in self._columns if not encoding.is_safe), None)

    def decode(self, buffer: Buffer, begin: int, end: int) -> dict[str, Any]:
        """Return the sample in ``buffer[begin:end]``, which has at least ``min_bytes``.

        Raises:
            ValueError: If the bytes don't encode a sample.
        """
        return self._taken_apart(buffer, begin, end, self._decoders)

    def lend(self, buffer: Buffer, begin: int, end: int) -> dict[str, object]:
        """Return the sample in ``buffer[begin:end]`` with arrays that may be views of the buffer.

        Raises:
            ValueError: If the bytes don't encode a sample.
        """
        return self._taken_apart(buffer, begin, end, self._lenders)

    def _taken_apart(self, buffer: Buffer, begin: int, end: int, decoders: tuple[Decoder, ...]) -> dict[str, object]:
        lengths = iter(self._head.unpack_from(buffer, begin))
        at = begin + self._head.size
        sample = {}
        for name, decode, size in decoders:
            first, at = at, at + (size or next(lengths))
            if at > end:
                raise ValueError(f"column {name!r} ends at byte {at}, the sample at {end}")
            sample[name] = decode(buffer, first, at)
        if at != end:
            raise ValueError(f"the columns end at byte {at}, the sample at {end}")
        return sample

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[dict[str, Any]]:
        """Return many samples in one call: the same as calling ``decode`` for each.

        Raises:
            ValueError: If the bytes of any of them don't encode a sample.
        """
        spans = self._spans(windows, begins, ends)
        values = [
            encoding.decode_many(buffer, windows, first, last)
            for (_, encoding, _), (first, last) in zip(self._columns, spans, strict=True)
        ]
        names = self.names
        return (
            [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] if names else [{} for _ in begins]
        )

    def _spans(self, windows: Windows, begins: Positions, ends: Positions) -> list[tuple[Positions, Positions]]:
        """Return the span of each column in each sample."""
        at = begins + self._head.size
        lengths = self._lengths(windows, begins)
        spans = []
        for _, _, size in self._columns:
            first, at = at, at + (size or next(lengths))
            spans.append((first, at))
        if not self.is_fixed and (at != ends).any():
            raise ValueError("the columns do not end where the sample ends")
        return spans

    def _lengths(self, windows: Windows, begins: Positions) -> Iterator[Positions]:
        if self.is_fixed:
            return iter(())
        table = windows(self._head.size)[begins].view("<u4").reshape(-1, self._num_lengths)
        return iter(table.T.astype(np.int64))
