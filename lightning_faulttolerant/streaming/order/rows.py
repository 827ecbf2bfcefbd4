"""Canonical nodes: the flat order takes one sample from each row of a matrix in turn.

The samples of an epoch are in ``num_rows`` rows of nearly equal length. Each row is one piece of the whole. Position
``p`` is column ``p // num_rows`` of row ``p % num_rows``. Nodes that read every n-th position stay in their own rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_faulttolerant.streaming.order.draws import Ints


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
