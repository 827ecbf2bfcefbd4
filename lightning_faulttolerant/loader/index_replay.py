"""Brings a sampler to its position: the batches that it has yielded are drawn again, and must be the same.

A running digest compares all of them, so a sampler is also detected if only its last batches happen to be the same. A
sampler that is skipped without a walk over its batches is checked by the inputs of its order: the generator's state, or
seed and epoch, and its length. Its last batches are compared as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any

from lightning_faulttolerant.loader.draws import DrawLog
from lightning_faulttolerant.loader.index_digest import START, updated
from lightning_faulttolerant.loader.index_record import IndexPlan, RandomStates
from lightning_faulttolerant.loader.indices import NotKept, pack_indices
from lightning_faulttolerant.loader.skipping import rest_of


class Replay:
    """Draws the batches of a sampler again.

    Args:
        sampler: The loader's sampler.
        plan: The position to reach.
    """

    def __init__(self, sampler: Any, plan: IndexPlan) -> None:
        self._sampler = sampler
        self._plan = plan
        self._num_known = plan.handed_out - len(plan.recent)
        self.is_same = True
        """Whether the sampler has yielded the same as before."""
        self.not_compared: set[str] = set()
        """The names of objects in the batches that can't be told from others of their kind."""

    def skipped(self) -> Iterator[Any] | None:
        """Return the batches after the position, or ``None`` if the sampler has to be run through."""
        plan, num_known = self._plan, self._num_known
        if not num_known or plan.log or any(isinstance(batch, NotKept) for batch in plan.recent):
            return None
        indices = rest_of(self._sampler, num_known - 1)
        if indices is None:
            return None
        next(indices, None)  # draw now what it draws at its beginning, even if nothing is yielded again
        again = list(islice(indices, len(plan.recent)))
        return self._rest(again, indices) if self._is_recent(again) else None

    def run_through(self, indices: Iterator[Any], restore: Callable[[RandomStates], None]) -> Iterator[Any]:
        """Return the batches after the position of an iterator that has just been started.

        Args:
            indices: The sampler's iterator.
            restore: Restores the random states of a moment.
        """
        indices = map(next, repeat(indices))  # `iter` would restart a sampler that is its own iterator
        again: deque[Any] = deque(maxlen=len(self._plan.recent))
        digest, num_drawn = START, 0
        for batch in self._drawn(indices, restore):
            digest = updated(digest, batch, self.not_compared)
            num_drawn += 1
            again.append(batch)
        found, expected = list(again), self._plan.digest
        self.is_same = num_drawn == self._plan.handed_out and (
            self._is_recent(found) if expected is None else digest == expected
        )
        return self._rest(found, indices)

    def _drawn(self, indices: Iterator[Any], restore: Callable[[RandomStates], None]) -> Iterator[Any]:
        num_drawn = 0
        for number, states in DrawLog(self._plan.log).states():
            yield from islice(indices, number - num_drawn)
            num_drawn = number
            restore(RandomStates.from_states(states))
        yield from islice(indices, self._plan.handed_out - num_drawn)

    def _is_recent(self, again: list[Any]) -> bool:
        return pack_indices(again) == pack_indices(list(self._plan.recent))

    def _rest(self, again: list[Any], indices: Iterator[Any]) -> Iterator[Any]:
        kept = list(self._plan.recent)
        if any(isinstance(batch, NotKept) for batch in kept):
            kept = again
        return chain(kept[self._plan.position - self._num_known :], indices)
