"""One rank's part of the unconsumed rest of an order: every n-th index.

All ranks together have therefore always consumed the beginning of the order, for any number of ranks.

`place_of` finds the rank: the given one, or that of the process group or environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_faulttolerant.samplers.order import SampleOrder
from lightning_faulttolerant.streaming.world import current_world


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank among all.

    Args:
        rank: The rank, from 0.
        num_replicas: The number of ranks.
    """

    rank: int
    num_replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank is {self.rank}, but must be from 0 to num_replicas - 1; num_replicas is {self.num_replicas}."
            )


def place_of(*, num_replicas: int | None, rank: int | None) -> RankPlace:
    """Return the given place. A missing part is read from the process group or the environment now.

    Raises:
        ValueError: If the place doesn't exist.
    """
    if num_replicas is None or rank is None:
        world = current_world()
        num_replicas = world.num_ranks if num_replicas is None else num_replicas
        rank = world.rank if rank is None else rank
    return RankPlace(rank=rank, num_replicas=num_replicas)


_FIRST_CHUNK, _MAX_CHUNK = 1024, 16384  # little work before the first index, and little work per index later


@runtime_checkable
class SkipsIndices(Protocol):
    """A sampler, or batch sampler, that can skip its beginning directly: all interruptible samplers here.

    ``iter_from(k)`` yields the same as ``islice(iter(sampler), k, None)``, in a time that doesn't depend on k. Code
    that keeps positions itself never calls ``advance``. The sampler's own position then stays at 0, and ``iter`` yields
    the whole epoch. Its order depends on ``sampler.epoch`` (set by ``set_epoch``), and on no generator.
    ``sampler.order(epoch)`` returns the order, a `SampleOrder`. ``sampler.deal(consumed)`` returns this rank's part of
    it after the samples that all ranks have consumed, an `EpochPart`: it deals the rest of an epoch to any number of
    ranks.
    """

    def iter_from(self, num_skipped: int) -> Iterator[object]:
        """Return an iterator over everything that ``iter`` yields after its first `num_skipped`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPart:
    """One rank's part of an epoch.

    Args:
        length: The number of samples (or batches) in the epoch, for all ranks together.
        begin: The number of them that all ranks had consumed before.
        rank: The rank.
        num_replicas: The number of ranks.
        drop_last: Whether the last ones, too few to give each rank one, are left out. Otherwise each rank gets one; the
            missing ones come from the beginning of the order.
    """

    length: int
    begin: int = 0
    rank: int
    num_replicas: int
    drop_last: bool

    @property
    def num_own(self) -> int:
        """The number of units for this rank, and for each other rank."""
        left = max(0, self.length - self.begin)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def consumed(self, own: int) -> int:
        """Return the number that all ranks have consumed when each has consumed `own` of its part."""
        return self.begin + own * self.num_replicas

    def position(self, own: int) -> int:
        """Return the position in the order of this rank's unit `own`."""
        return (self.begin + self.rank + own * self.num_replicas) % self.length

    def positions(self, start: int, stop: int) -> Tensor:
        """Return the positions in the order of this rank's samples `start` to `stop`, int64."""
        first, step = self.begin + self.rank, self.num_replicas
        positions = torch.arange(first + start * step, first + stop * step, step, dtype=torch.int64, device="cpu")
        if self.consumed(stop) > self.length:
            positions %= self.length
        return positions


def indices_of(
    order: SampleOrder, deal: EpochPart, *, skip: int = 0, at_end: Callable[[], None] | None = None
) -> Iterator[int]:
    """Yield this rank's indices after the first `skip`. The time to skip doesn't depend on their number.

    Args:
        order: The order of the epoch.
        deal: This rank's part of it.
        skip: The number of indices to leave out.
        at_end: Called when an index is requested after the last one.
    """
    return chain.from_iterable(_chunks(order, deal, skip, at_end))


def _chunks(order: SampleOrder, deal: EpochPart, start: int, at_end: Callable[[], None] | None) -> Iterator[list[int]]:
    size, end = _FIRST_CHUNK, deal.num_own
    while start < end:
        stop = min(end, start + size)
        yield order.at(deal.positions(start, stop)).tolist()
        start, size = stop, min(2 * size, _MAX_CHUNK)
    if at_end is not None:
        at_end()
