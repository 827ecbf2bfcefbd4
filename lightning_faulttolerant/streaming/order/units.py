"""The units that an epoch reads: whole shards, some of them more than once, and samples drawn from shards.

A unit is one pass over a shard, or some of its samples. Arrays as long as the list of shards are kept. Arrays of sample
ids are created on request, and only the latest of them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lightning_faulttolerant.streaming.order.draws import Ints, key_of, permutation


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
    _drawn: Recent = field(default_factory=lambda: Recent(at_most=16), init=False, repr=False, compare=False)

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
        return first + self._drawn.get(unit, self._draw)[begin:stop]

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


class Recent:
    """A cache of the latest arrays. Each array is created from a number on request.

    Several threads may read the cache, and the process may fork at any time, so it has no lock that could stay locked.
    At worst, two threads create the same array.

    Args:
        at_most: The number of arrays to keep.
    """

    def __init__(self, *, at_most: int) -> None:
        self._at_most = at_most
        self._kept: dict[int, Ints] = {}

    def get(self, number: int, make: Callable[[int], Ints]) -> Ints:
        """Return the array of a number. Create it if it is not kept."""
        found = self._kept.pop(number, None)
        if found is None:
            found = make(number)
        self._kept[number] = found
        for oldest in list(self._kept)[: -self._at_most]:
            self._kept.pop(oldest, None)
        return found


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
