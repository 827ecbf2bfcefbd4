"""The orders that need no preparation: sequential, and the default shuffle, in blocks of a few shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.streaming.order.draws import Ints, key_of, numbers, permutation
from lightning_faulttolerant.streaming.order.rows import EvenRows, PaddedRows, Rows
from lightning_faulttolerant.streaming.order.units import Recent, Units, grouped

SHARDS_PER_BLOCK = 8
# A block with more samples is read in slices, each with a piece of each of its shards.
MAX_BLOCK_SAMPLES = 1 << 17


class SequentialShardOrder:
    """One shard after the other, in each canonical node: the order of ``shuffle=False``.

    Guarantees: every sample of the epoch once, in the same order in each epoch. One shard is open for each canonical
    node. No memory is needed besides the list of shards.

    Args:
        units: The units that the epoch reads.
        rows: The canonical nodes of the epoch.
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
        """The number of positions in the whole epoch."""
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

    Guarantees: every sample of the epoch once. Each canonical node has the same share of the shards in every epoch. In
    each epoch, its shards come in a new random order. They are grouped into blocks of up to eight shards (or of about
    ``block_size`` samples), and all samples of a block are permuted. At any time, the shards of one block are open for
    each canonical node, or of two blocks where one ends. A start or a resume at any position needs no other shards.
    Samples of different blocks do not mix within an epoch, but the next epoch groups the shards into other blocks. Data
    with similar neighboring shards needs no larger block. Data with only one kind of sample in each shard does.

    Cost: memory for the list of shards, and for one block for each canonical node. A start or a resume permutes the
    shards, and the samples of the blocks in which it continues. If the shards are so large that a block would have more
    than 131,072 samples, it is read in slices of about that many, each with a piece of each of its shards.

    Args:
        units: The units that the epoch reads.
        seed: The seed of the order.
        epoch: The epoch of the order.
        num_canonical_nodes: The number of rows.
        block_size: The approximate number of samples in a block, which consists of whole shards. By default a block has
            up to eight shards.
    """

    def __init__(
        self, units: Units, *, seed: int, epoch: int, num_canonical_nodes: int = 1, block_size: int | None = None
    ) -> None:
        self._units = units
        self._rows = Rows(num_samples=units.num_samples, num_rows=num_canonical_nodes)
        self._seed = seed
        self._epoch = epoch
        bounds = self._rows.bounds
        parts, row = _parts(units, bounds, seed=seed)
        drawn = numbers(key_of("shards", seed, epoch), len(row))
        order = np.lexsort((drawn, row))
        parts, row = parts.of(order), row[order]
        starts = np.cumsum(parts.size) - parts.size
        block = _blocks_of(starts - bounds[row], row, bounds, block_size)
        changes = (np.diff(block, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0)
        self._parts, block = _sliced(parts, np.cumsum(changes) - 1, drawn[order])
        self._first_part = np.searchsorted(block, np.arange(block.max(initial=-1) + 2))
        self._starts = np.append(0, np.cumsum(self._parts.size))[self._first_part]
        # Each row reads from one block, or from two where one ends. A thread that looks ahead reads from others.
        self._tables = Recent(at_most=2 * num_canonical_nodes + 2)

    @property
    def num_positions(self) -> int:
        """The number of positions in the whole epoch."""
        return self._rows.num_positions

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all canonical nodes together."""
        return len(self._starts) - 1

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        places = self._rows.places(np.asarray(positions, np.int64))
        blocks = np.searchsorted(self._starts, places, side="right") - 1
        ids = np.empty(len(places), np.int64)
        for block, where in grouped(blocks):
            ids[where] = self._tables.get(block, self._table)[places[where] - self._starts[block]]
        return ids

    def _table(self, block: int) -> Ints:
        """Return the ids of a block, in order."""
        unit, begin, size = (
            array[self._first_part[block] : self._first_part[block + 1]].tolist()
            for array in (self._parts.unit, self._parts.begin, self._parts.size)
        )
        spans = (self._units.ids(*part) for part in zip(unit, begin, np.add(begin, size).tolist(), strict=True))
        ids = np.concatenate([*spans])
        return ids[permutation(key_of("samples", self._seed, self._epoch, block), len(ids))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitParts:
    """Parts of units.

    Args:
        unit: The unit of each part.
        begin: Where the part begins in its unit.
        size: The number of samples in the part.
    """

    unit: Ints
    begin: Ints
    size: Ints

    def of(self, which: Ints) -> _UnitParts:
        """Return some of the parts, in the given order."""
        return _UnitParts(unit=self.unit[which], begin=self.begin[which], size=self.size[which])


def _parts(units: Units, bounds: Ints, *, seed: int) -> tuple[_UnitParts, Ints]:
    """Deal the shards to the rows, the same in every epoch, and cut those that cross a bound.

    Returns the parts, and the row of each.
    """
    place = np.empty(units.num_shards, np.int64)
    place[permutation(key_of("rows", seed), len(place))] = np.arange(len(place))
    order = np.argsort(place[units.shard], kind="stable")
    stops = np.cumsum(units.size[order])
    starts = stops - units.size[order]
    # Both ascend. np.union1d would return the same, but takes half of the whole time for a million shards.
    cuts = np.unique(bounds)
    places = np.searchsorted(starts, cuts)
    is_new = np.append(starts, -1)[places] != cuts
    edges = np.insert(starts, places[is_new], cuts[is_new])
    begins, sizes = edges[:-1], np.diff(edges)
    where = np.searchsorted(stops, begins, side="right")
    parts = _UnitParts(unit=order[where], begin=begins - starts[where], size=sizes)
    return parts, np.searchsorted(bounds[1:], begins, side="right")


def _blocks_of(starts: Ints, row: Ints, bounds: Ints, block_size: int | None) -> Ints:
    """Number the block of each part within its row. The blocks of a row are as equal as whole parts allow."""
    if block_size is None:
        lengths = np.bincount(row, minlength=len(bounds) - 1)
        places = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
        counts = -(-lengths // SHARDS_PER_BLOCK)
    else:
        lengths, places = np.diff(bounds), starts
        counts = np.maximum(1, (lengths + block_size // 2) // block_size)
    blocks: Ints = places * counts[row] // lengths[row]
    return blocks


def _sliced(parts: _UnitParts, block: Ints, drawn: npt.NDArray[np.uint64]) -> tuple[_UnitParts, Ints]:
    """Split each block with too many samples. Each slice has a piece of each of the block's parts, in random order.

    Returns the parts and the block of each.
    """
    num_slices = -(-np.bincount(block, weights=parts.size).astype(np.int64) // MAX_BLOCK_SAMPLES)
    if (num_slices <= 1).all():
        return parts, block
    times = num_slices[block]
    part = np.repeat(np.arange(len(block)), times)
    piece = np.arange(len(part)) - np.repeat(np.cumsum(times) - times, times)
    begin = parts.size[part] * piece // times[part]
    size = parts.size[part] * (piece + 1) // times[part] - begin
    turn = (piece + (drawn % times.astype(np.uint64)).astype(np.int64)[part]) % times[part]
    of_slice = (np.cumsum(num_slices) - num_slices)[block[part]] + turn
    order = np.argsort(of_slice, kind="stable")
    sliced = _UnitParts(unit=parts.unit[part], begin=parts.begin[part] + begin, size=size)
    return sliced.of(order), of_slice[order]
