"""Random numbers from counters, and the orders from them: sequential, and the default shuffle, in blocks of shards.

The bits are defined here and do not come from a library's generator. So an order is the same under every version of
numpy and on every machine. A key is the BLAKE2b hash of its parts. A number is SplitMix64 of a key and a counter.

Each row belongs to a canonical node: the flat order takes one sample from each row in turn. The samples of an epoch are
in ``num_rows`` rows of nearly equal length. Each row is one piece of the whole. Position ``p`` is column ``p //
num_rows`` of row ``p % num_rows``. Nodes that read every n-th position stay in their own rows.

A unit is one pass over a shard, or some of its samples: an epoch reads whole shards, some of them more than once, and
samples drawn from shards. Arrays as long as the list of shards are kept. Arrays of sample ids are created on request,
and only the latest of them are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

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
class Units:
    """The units of an epoch, none of them empty, in the order of their shards.

    Args:
        shard: The shard of each unit, counted over all streams.
        first: The id of the first sample of its shard.
        size: The number of samples in the unit.
        shard_size: The number of samples in its shard. If the shard has more, the unit's samples are drawn from them.
        num_shards: The number of shards in the whole data set, including those that this epoch does not read.
        draw: The inputs of the draws: the seed, and the epoch if each epoch draws again.
    """

    shard: Ints
    first: Ints
    size: Ints
    shard_size: Ints
    num_shards: int
    draw: tuple[int, ...] = ()
    _drawn: Callable[[int], Ints] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drawn", lru_cache(maxsize=16)(self._draw))

    @property
    def num_samples(self) -> int:
        """The number of samples in the whole epoch."""
        return int(self.size.sum())

    @property
    def are_whole(self) -> bool:
        """Whether no samples are drawn."""
        return bool((self.size == self.shard_size).all())

    def ids(self, unit: int, begin: int, stop: int) -> Ints:
        """Return the ids of the samples ``begin`` to ``stop`` of a unit."""
        first = int(self.first[unit])
        if self.size[unit] == self.shard_size[unit]:
            return np.arange(first + begin, first + stop, dtype=np.int64)
        return first + self._drawn(unit)[begin:stop]

    def _draw(self, unit: int) -> Ints:
        key = key_of("samples of a shard", *self.draw, int(self.shard[unit]))
        drawn = permutation(key, int(self.shard_size[unit]))[: int(self.size[unit])]
        drawn.sort()
        return drawn


def units_of(shard_size: Ints, chosen: Ints, *, draw: tuple[int, ...] = ()) -> Units:
    """Return the units that cover ``chosen`` samples of each shard: the whole shard as often as it fits, and a rest."""
    shards = np.flatnonzero(shard_size)
    times, rest = np.divmod(chosen[shards], shard_size[shards])
    first = np.cumsum(shard_size) - shard_size
    counts = times + (rest > 0)
    shard = np.repeat(shards, counts)
    size = shard_size[shard]
    lasts = np.cumsum(counts) - 1
    drawn = rest > 0
    size[lasts[drawn]] = rest[drawn]
    return Units(
        shard=shard,
        first=first[shard],
        size=size,
        shard_size=shard_size[shard],
        num_shards=len(shard_size),
        draw=draw,
    )


def grouped(numbers: Ints) -> Iterator[tuple[int, Ints | slice]]:
    """Yield each distinct number, with the places where it occurs."""
    if not numbers.size:
        return
    steps = np.diff(numbers)
    # Numbers that are read in turn are usually sorted already.
    order = np.argsort(numbers, kind="stable") if (steps < 0).any() else None
    if order is not None:
        numbers = numbers[order]
        steps = np.diff(numbers)
    begins = [0, *(np.flatnonzero(steps) + 1).tolist()]
    for begin, stop in zip(begins, [*begins[1:], len(numbers)], strict=True):
        where = slice(begin, stop)
        yield int(numbers[begin]), where if order is None else order[where]


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

    def __init__(self, units: Units, rows: Rows) -> None:
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
        self._table = lru_cache(maxsize=2 * num_canonical_nodes + 2)(self._ids_of)

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
            ids[where] = self._table(block)[places[where] - self._starts[block]]
        return ids

    def _ids_of(self, block: int) -> Ints:
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
