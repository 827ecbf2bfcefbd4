"""Random numbers from counters, each computed without those before it, and the rows that an order reads in turn.

The bits are defined here and do not come from a library's generator. So an order is the same under every version of
numpy and on every machine. A key is the BLAKE2b hash of its parts. A number is SplitMix64 of a key and a counter.

Each row belongs to a canonical node: the flat order takes one sample from each row in turn. The samples of an epoch are
in ``num_rows`` rows of nearly equal length. Each row is one piece of the whole. Position ``p`` is column ``p //
num_rows`` of row ``p % num_rows``. Nodes that read every n-th position stay in their own rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def key_of(*parts: int | str) -> int:
    """Return the 64-bit key for ``parts``: a use, a seed, an epoch, a number."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def numbers(key: int, count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` random 64-bit numbers, as uint64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    mixed *= np.uint64(_STEP)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def permutation(key: int, count: int) -> Ints:
    """Return a permutation of ``range(count)``, as int64.

    The low bits of each random number are replaced by its index, so no two are equal. The sorted result therefore does
    not depend on the sorting algorithm, and sorting values is several times faster than sorting indices.
    """
    bits = np.uint64(max(count - 1, 1).bit_length())
    drawn = numbers(key, count)
    drawn >>= bits
    drawn <<= bits
    drawn |= np.arange(count, dtype=np.uint64)
    drawn.sort()
    drawn &= (np.uint64(1) << bits) - np.uint64(1)
    return drawn.view(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Every sample once. Only the rows that are longer by one reach the last column, and these rows come first.

    Args:
        num_samples: The number of samples in the whole epoch.
        num_rows: The number of canonical nodes.
    """

    num_samples: int
    num_rows: int

    @property
    def num_positions(self) -> int:
        """The number of positions, equal to the number of samples."""
        return self.num_samples

    @property
    def bounds(self) -> Ints:
        """The beginning of each row, and the end of the last one."""
        return self._begin(np.arange(self.num_rows + 1, dtype=np.int64))

    def places(self, positions: Ints) -> Ints:
        """Return the place of each position in the rows laid end to end."""
        if self.num_rows == 1:
            return positions
        columns, rows = np.divmod(positions, self.num_rows)
        return self._begin(rows) + columns

    def _begin(self, rows: Ints) -> Ints:
        length, longer = divmod(self.num_samples, self.num_rows)
        return rows * length + np.minimum(rows, longer)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenRows:
    """Every sample once, with the longer rows spread evenly: `PaddedRows` without the repeats in the last column.

    Args:
        num_samples: The number of samples in the whole epoch.
        num_rows: The number of canonical nodes.
    """

    num_samples: int
    num_rows: int

    @property
    def num_positions(self) -> int:
        """The number of positions, equal to the number of samples."""
        return self.num_samples

    def places(self, positions: Ints) -> Ints:
        """Return the place of each position in the samples of the epoch."""
        columns, rows = np.divmod(positions, self.num_rows)
        length, longer = divmod(self.num_samples, self.num_rows)
        if longer:
            # The k-th row that is longer by one: the first c with (c + 1) * longer // num_rows = k + 1.
            rows = np.where(columns == length, ((rows + 1) * self.num_rows - 1) // longer, rows)
        return rows * self.num_samples // self.num_rows + columns


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedRows:
    """The layout of the original library: short rows repeat samples, so all have the same length.

    Args:
        num_samples: The number of samples in the whole epoch.
        num_rows: The number of canonical nodes.
        num_nodes: The number of nodes. If each row serves several nodes, its length is a multiple of their number.

    Source: ``partition/orig.py`` of MosaicML Streaming 0.13.
    """

    num_samples: int
    num_rows: int
    num_nodes: int = 1

    @property
    def num_positions(self) -> int:
        """The number of positions in the whole matrix, including its repeats."""
        return self.num_rows * (self._length + self._padding)

    def places(self, positions: Ints) -> Ints:
        """Return the place of each position in the samples of the epoch."""
        columns, rows = np.divmod(positions, self.num_rows)
        if self.num_samples < self.num_rows or self.num_samples == self.num_rows < self.num_nodes:
            # Too few samples: they repeat over the rows again and again.
            return (rows * (self._length + self._padding) + columns) % self.num_samples
        if self._padding:
            ratio = self.num_nodes // self.num_rows
            again = (columns - self._padding - ratio + 1) % self._length
            columns = np.where(columns < self._length, columns, again)
        stops = (rows + 1) * self.num_samples // self.num_rows
        places: Ints = np.minimum(rows * self.num_samples // self.num_rows + columns, stops - 1)
        return places

    @property
    def _length(self) -> int:
        return -(-self.num_samples // self.num_rows)

    @property
    def _padding(self) -> int:
        if self.num_rows >= self.num_nodes or self.num_nodes % self.num_rows:
            return 0
        return -self._length % (self.num_nodes // self.num_rows)
