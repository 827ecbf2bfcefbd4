"""The orders that cost nothing in advance: one after the other, and the default shuffle, in blocks of a few shards."""

from __future__ import annotations

import numpy as np

from lightning_faulttolerant.streaming.order.draws import Ints, key_of, numbers, permutation
from lightning_faulttolerant.streaming.order.rows import EvenRows, PaddedRows, Rows
from lightning_faulttolerant.streaming.order.units import Recent, Units, grouped

SHARDS_PER_BLOCK = 8


class SequentialOrder:
    """One shard after the other, in each canonical node: what ``shuffle=False`` means.

    Guarantees: every sample of the epoch once, the same in each epoch; one shard open for each canonical node; no
    memory beside the list of shards.

    Args:
        units: What the epoch reads.
        rows: Its canonical nodes.
    """

    def __init__(self, units: Units, rows: EvenRows | PaddedRows) -> None:
        self._units = units
        self._rows = rows
        self._stops = np.cumsum(units.size)
        self._begins = self._stops - units.size
        self._offsets = units.first - self._begins
        self._are_whole = units.are_whole

    @property
    def num_positions(self) -> int:
        """Of the whole epoch."""
        return self._rows.num_positions

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        places = self._rows.places(np.asarray(positions, np.int64))
        units = np.searchsorted(self._stops, places, side="right")
        if self._are_whole:
            return self._offsets[units] + places
        ids = np.empty(len(places), np.int64)
        for unit, where in grouped(units):
            ids[where] = self._units.ids(unit, 0, int(self._units.size[unit]))[places[where] - self._begins[unit]]
        return ids


class BlockOrder:
    """The default shuffle: shards in a new order in each epoch, and samples shuffled in blocks of a few shards.

    Guarantees: every sample of the epoch once. Each canonical node has the same share of the shards in every epoch.
    In each epoch its shards come in a new random order, are taken together in blocks of up to eight (or of about
    ``block_size`` samples), and all samples of a block are permuted. So at any time the shards of one block are open
    for each canonical node, of two where one ends, and a start or a resume at any position needs no others. Samples of
    different blocks are not mixed within an epoch, but shards meet in other blocks in the next one. Data in which
    neighbouring shards are alike need no larger block; data of which each shard is all of one kind do.

    Cost: memory for the list of shards and one block for each canonical node; a start or a resume permutes the shards,
    and the samples of the blocks in which it goes on.

    Args:
        units: What the epoch reads.
        seed: Of the order.
        epoch: Of which the order is.
        num_canonical_nodes: The number of rows.
        block_size: How many samples a block should have: whole shards, as near as they go. By default a block has up to
            eight shards.
    """

    def __init__(
        self, units: Units, *, seed: int, epoch: int, num_canonical_nodes: int = 1, block_size: int | None = None
    ) -> None:
        self._units = units
        self._rows = Rows(num_samples=units.num_samples, num_rows=num_canonical_nodes)
        self._seed = seed
        self._epoch = epoch
        bounds = self._rows.bounds
        unit, begin, size, row = _parts(units, bounds, seed=seed)
        drawn = numbers(key_of("shards", seed, epoch), len(unit))
        order = np.lexsort((drawn, row))
        self._unit, self._begin, self._size, row = unit[order], begin[order], size[order], row[order]
        starts = np.cumsum(self._size) - self._size
        block = _blocks_of(self._size, starts - bounds[row], row, bounds, block_size)
        changes = (np.diff(block, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0)
        self._first_part = np.append(np.flatnonzero(changes), len(order))
        self._starts = np.append(starts[self._first_part[:-1]], units.num_samples)
        # Each row reads in one block, in two where one ends; a thread that looks ahead is in others.
        self._tables = Recent(self._table, at_most=2 * num_canonical_nodes + 2)

    @property
    def num_positions(self) -> int:
        """Of the whole epoch."""
        return self._rows.num_positions

    @property
    def num_blocks(self) -> int:
        """Of all canonical nodes together."""
        return len(self._starts) - 1

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        places = self._rows.places(np.asarray(positions, np.int64))
        blocks = np.searchsorted(self._starts, places, side="right") - 1
        ids = np.empty(len(places), np.int64)
        for block, where in grouped(blocks):
            ids[where] = self._tables[block][places[where] - self._starts[block]]
        return ids

    def _table(self, block: int) -> Ints:
        """The ids of a block, in order."""
        parts = range(self._first_part[block], self._first_part[block + 1])
        spans = (
            self._units.ids(int(self._unit[part]), int(self._begin[part]), int(self._begin[part] + self._size[part]))
            for part in parts
        )
        ids = np.concatenate([*spans])
        return ids[permutation(key_of("samples", self._seed, self._epoch, block), len(ids))]


def _parts(units: Units, bounds: Ints, *, seed: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Deal the shards to the rows, the same in every epoch, and cut those that lie over a bound.

    Returns the unit of each part, where in the unit it begins, its size, and its row.
    """
    place = np.empty(units.num_shards, np.int64)
    place[permutation(key_of("rows", seed), len(place))] = np.arange(len(place))
    order = np.argsort(place[units.shard], kind="stable")
    stops = np.cumsum(units.size[order])
    starts = stops - units.size[order]
    # Both ascend: what np.union1d would give, which takes half of the whole time for a million shards.
    cuts = np.unique(bounds)
    places = np.searchsorted(starts, cuts)
    is_new = np.append(starts, -1)[places] != cuts
    edges = np.insert(starts, places[is_new], cuts[is_new])
    begins, sizes = edges[:-1], np.diff(edges)
    where = np.searchsorted(stops, begins, side="right")
    return order[where], begins - starts[where], sizes, np.searchsorted(bounds[1:], begins, side="right")


def _blocks_of(size: Ints, starts: Ints, row: Ints, bounds: Ints, block_size: int | None) -> Ints:
    """Number the block of each part within its row: blocks of a row are as equal as whole parts go."""
    if block_size is None:
        lengths = np.bincount(row, minlength=len(bounds) - 1)
        places = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
        counts = -(-lengths // SHARDS_PER_BLOCK)
    else:
        lengths, places = np.diff(bounds), starts
        counts = np.maximum(1, (lengths + block_size // 2) // block_size)
    blocks: Ints = places * counts[row] // lengths[row]
    return blocks
