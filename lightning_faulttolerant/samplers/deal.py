"""What comes to one rank of an order whose beginning has been consumed: every n-th of the rest.

So what all ranks together have consumed is always the beginning of the order, however many they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_faulttolerant.samplers.order import Order

_FIRST_CHUNK, _MAX_CHUNK = 1024, 16384  # little work before the first index, and little per index later


@runtime_checkable
class SkipsIndices(Protocol):
    """A sampler, or batch sampler, whose beginning can be left out at once: all interruptible ones here.

    ``iter_from(k)`` gives what ``islice(iter(sampler), k, None)`` gives, in a time that doesn't depend on k. Whoever
    keeps positions himself never calls ``advance``: the sampler's own position stays at 0, so that ``iter`` gives the
    whole epoch, whose order follows from ``sampler.epoch`` (set by ``set_epoch``) and from no generator. The order
    itself is ``sampler.order(epoch)``, an `Order`, and this rank's part of it, after what all ranks have consumed,
    ``sampler.deal(consumed)``, a `Deal`: so the rest of an epoch is dealt to another number of ranks.
    """

    def iter_from(self, num_skipped: int) -> Iterator[Any]:
        """Return what ``iter`` gives after its first `num_skipped`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """One rank's part of an epoch.

    Args:
        length: How many samples (or batches) the epoch has, for all ranks together.
        begin: How many of them were consumed before, by all ranks together.
        rank: Which rank's part.
        num_replicas: Of how many.
        drop_last: Whether the last ones, too few to give each rank one, are left out; else each rank gets one, the
            missing ones from the beginning of the order again.
    """

    length: int
    begin: int = 0
    rank: int
    num_replicas: int
    drop_last: bool

    @property
    def num_own(self) -> int:
        """How many come to this rank, and to each other one."""
        left = max(0, self.length - self.begin)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def consumed(self, own: int) -> int:
        """Return how many all ranks have consumed when each has consumed `own` of its part."""
        return self.begin + own * self.num_replicas

    def position(self, own: int) -> int:
        """Return where in the order this rank's unit `own` stands."""
        return (self.begin + self.rank + own * self.num_replicas) % self.length

    def positions(self, start: int, stop: int) -> Tensor:
        """Return where in the order this rank's samples `start` to `stop` stand, int64."""
        first, step = self.begin + self.rank, self.num_replicas
        positions = torch.arange(first + start * step, first + stop * step, step, dtype=torch.int64, device="cpu")
        if self.consumed(stop) > self.length:
            positions %= self.length
        return positions


def indices_of(order: Order, deal: Deal, *, skip: int = 0, at_end: Callable[[], None] | None = None) -> Iterator[int]:
    """Yield this rank's indices after the first `skip`, from a seek that takes as long for many as for few.

    Args:
        order: The epoch's.
        deal: This rank's part of it.
        skip: How many are left out.
        at_end: Called when one more index is asked for than there are.
    """
    return chain.from_iterable(_chunks(order, deal, skip, at_end))


def _chunks(order: Order, deal: Deal, start: int, at_end: Callable[[], None] | None) -> Iterator[list[int]]:
    size, end = _FIRST_CHUNK, deal.num_own
    while start < end:
        stop = min(end, start + size)
        yield order.at(deal.positions(start, stop)).tolist()
        start, size = stop, min(2 * size, _MAX_CHUNK)
    if at_end is not None:
        at_end()
