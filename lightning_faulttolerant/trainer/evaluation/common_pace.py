"""When several ranks save inside an evaluation: before batches that all of them reach.

Each rank knows how many batches it has. The ranks learn the smallest of these numbers at the start, and whenever they
have saved, rank 0 says before which batch they save next. So no rank waits for another one that has no more batches.
"""

from __future__ import annotations

import math

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.clock import perf_counter


class CommonPace:
    """Decides before which batches of an evaluation the ranks meet, to save there.

    Args:
        ranks: The ranks that evaluate together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next = math.inf
        self._num_common = 0.0
        self._began = (0, 0.0)

    def begin(self, batch: int, num_batches: float) -> None:
        """Note that an evaluation begins, or continues; a collective.

        Args:
            batch: The batch that comes first.
            num_batches: How many batches this rank has in all; infinite if that is not known.
        """
        numbers = self._ranks.to_first("the number of batches", num_batches)
        smallest = None if numbers is None else min(numbers)
        self._num_common = self._ranks.from_first("the number of common batches", smallest)
        self._began = batch, perf_counter()
        self._next = batch if self._can_meet(batch) else math.inf

    def _can_meet(self, batch: float) -> bool:
        return batch < self._num_common < math.inf

    def is_here(self, batch: int) -> bool:
        """Return whether the ranks meet before this batch."""
        return batch == self._next

    def meet_again(self, batch: int, in_seconds: float) -> None:
        """Decide where the ranks meet next; a collective.

        Args:
            batch: The batch before which they are.
            in_seconds: In how many seconds the next autosave is due. Only rank 0's counts.
        """
        first, began = self._began
        num_more = 1
        if batch > first:  # then rank 0 knows how long a batch takes
            seconds_per_batch = max((perf_counter() - began) / (batch - first), 1e-9)
            num_more = max(math.ceil(in_seconds / seconds_per_batch), 1)
        following = batch + num_more
        self._next = self._ranks.from_first("where to meet", following if self._can_meet(following) else math.inf)
