"""The iterator over a sampler that a loader draws from: it passes the sampler's batches on, and counts them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lightning_faulttolerant.loader.index_digest import updated
from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.loader.per_sample import SampleSeeds


class Side(Protocol):
    """The interface that an iterator draws through."""

    record: IndexRecord
    seeds: SampleSeeds | None
    num_ranks: int
    global_rank: int
    num_before: int
    is_batched: bool

    @property
    def only_passes_on(self) -> bool:
        """Whether drawing the next batch needs no more than a call of the sampler."""

    def open(self, indices: Iterator[Any] | None) -> Iterator[Any]:
        """Return the iterator to draw from. It is called right before the first index is drawn."""

    def draw(self, indices: Iterator[Any]) -> Any:
        """Draw the next batch."""


class IndexIterator(Iterator[Any]):
    """Passes on the sampler's batches, and counts them."""

    def __init__(self, side: Side, indices: Iterator[Any] | None) -> None:
        self._side = side
        self._record = side.record
        self._indices = indices
        self._is_open = False
        self._ahead: deque[Any] = deque()
        self._draw: Callable[[], Any] = self._draw_by_side
        self._passes_on = self._only_counts = False

    def open(self) -> None:
        """Bring the sampler to its position, once."""
        if not self._is_open:
            self._is_open = True
            self._indices = self._side.open(self._indices)
            # Seeded samplers may be drawn from while their states are parked: the side notes the last draw, too.
            if self._side.seeds is None and self._side.only_passes_on:
                self._draw, self._passes_on = self._indices.__next__, True

    def draw_ahead(self) -> None:
        """Draw the next batch now, if one exists. It is handed out when it is requested."""
        with contextlib.suppress(StopIteration):
            self._ahead.append(self._draw())

    def _draw_by_side(self) -> Any:
        assert self._indices is not None
        return self._side.draw(self._indices)

    def __next__(self) -> Any:
        if self._only_counts:
            batch, record = self._draw(), self._record
            record.handed_out += 1
            record.recent.append(batch)
            return batch
        batch = self._next()
        self._only_counts = self._passes_on and not self._ahead and not self._record.digests
        return batch

    def _next(self) -> Any:
        if not self._is_open:
            self.open()
        record, seeds = self._record, self._side.seeds
        batch = self._ahead.popleft() if self._ahead else self._draw()
        record.handed_out += 1
        record.recent.append(batch)
        if digests := record.digests:
            digests.append(updated(digests[-1], batch, record.not_compared))
        if seeds is None:
            return batch
        step, begin = self._side.num_ranks, self._side.num_before if record.deal is None else record.deal.begin
        place = begin + record.num_samples * step + self._side.global_rank
        record.num_samples += len(batch) if self._side.is_batched else 1
        return seeds.of(batch, epoch=record.epoch, place=place, step=step)
