"""Each rank's own part of a data set that all ranks can see: its samples, and a data set of just those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from lightning_faulttolerant.samplers.deal import place_of
from lightning_faulttolerant.samplers.order import FeistelPermutation


class Indexable(Protocol):
    """An object with a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_fraction(fraction: float, name: str) -> None:
    """Raise a ``ValueError`` unless `fraction` is more than 0 and at most 1, the same on every rank."""
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{name}={fraction!r}: it must be the fraction of the data set that each rank holds, more than 0 and at "
            "most 1. For one half, pass 0.5."
        )


class ShardPositions:
    """The positions that one rank holds in an order of `length` samples: equally many on each rank.

    Each rank first takes every `num_replicas`-th position, starting at its rank. To hold more, it takes those of the
    next rank, and so on. So no rank holds a sample twice. Shards are disjoint while ``fraction * num_replicas <= 1``,
    except for the last round, which fills shards to equal length if the numbers don't divide. If the product is 1 or
    more, they hold all samples together.

    Args:
        length: The length of the order.
        fraction: The fraction of it that each rank holds, rounded up to whole samples.
        rank: The rank.
        num_replicas: The number of ranks.
    """

    def __init__(self, length: int, *, fraction: float, rank: int, num_replicas: int) -> None:
        self._length, self._rank, self._num_replicas = length, rank, num_replicas
        self._count = min(length, math.ceil(round(fraction * length, 6)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return the position in the order of sample `index` of this share."""
        if not 0 <= index < self._count:
            raise IndexError(f"{index} of {self._count} samples")
        taken = 0
        for turn in range(self._num_replicas):
            first = (self._rank + turn) % self._num_replicas
            size = len(range(first, self._length, self._num_replicas))
            if index < taken + size:
                return first + (index - taken) * self._num_replicas
            taken += size
        raise AssertionError("a share has no more samples than the order")


class ShardedMapDataset(Dataset[Any]):
    """This rank's part of any data set with a length and indices. Nothing is loaded before it is requested.

    Args:
        source: The whole data set, the same on every rank.
        rank: The rank of this process, from 0; by default read from the process group or the environment now.
        world_size: The number of ranks; by default found in the same way.
        samples_pct_per_replica: The fraction of the data set that each rank holds, more than 0 and at most 1, rounded
            up to whole samples; by default one `world_size`-th.
        seed: The seed of the order in which samples are dealt.
        shuffle: Whether they are dealt in a random order; this takes no memory.

    Raises:
        ValueError: If the fraction is out of its range, or the rank doesn't exist.

    Example:
        >>> part = ShardedMapDataset(list("abcde"), rank=1, world_size=2, shuffle=False)
        >>> [part[i] for i in range(len(part))]
        ['b', 'd', 'a']
    """

    def __init__(
        self,
        source: Indexable | Sequence[object],
        rank: int | None = None,
        world_size: int | None = None,
        samples_pct_per_replica: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        place = place_of(num_replicas=world_size, rank=rank)
        fraction = 1 / place.num_replicas if samples_pct_per_replica is None else samples_pct_per_replica
        check_fraction(fraction, "samples_pct_per_replica")
        self.source = source
        length = len(source)
        self._share = ShardPositions(length, fraction=fraction, rank=place.rank, num_replicas=place.num_replicas)
        self._permutation = FeistelPermutation(length, seed=seed, epoch=0) if shuffle else None

    def __len__(self) -> int:
        return len(self._share)

    def index_of(self, index: int) -> int:
        """Return the index in the whole data set of sample `index` of this part."""
        position = self._share[index]
        if self._permutation is None:
            return position
        return int(self._permutation.at(torch.tensor([position], device="cpu")))

    def __getitem__(self, index: int) -> Any:
        return self.source[self.index_of(index)]
