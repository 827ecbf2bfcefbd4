"""The workers of a loader that is followed: how they are created, and how many batches each has been given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.loader.iteration import IterationWorkers
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.worker_side import WorkerSide, WorkerStart, WorkerState
from lightning_faulttolerant.loader.workers import counts_at, counts_now, end_children

_SPARE_SLOTS = 5


class TrackedWorkers:
    """Creates the workers of one loader, and counts their batches.

    Args:
        side: The stand-in for the loader's functions in its workers.
        num_workers: How many workers there are.
        slot_bytes: How long a worker's state may be.
        is_iterable: Whether the data set is iterable, so that workers may run out of samples.
    """

    def __init__(self, side: WorkerSide, *, num_workers: int, slot_bytes: int, is_iterable: bool) -> None:
        self.side = side
        self._num_workers = num_workers
        self._slot_bytes = slot_bytes
        self._is_iterable = is_iterable
        self._rings_aside: list[WorkerRing] = []
        self.current: IterationWorkers | None = None
        """The workers in the newest iteration."""

    def begin(self, loader: DataLoader[Any], states: list[WorkerState] | None) -> None:
        """Prepare an iteration whose workers are created for it, and continue from these states."""
        if self.current is not None:
            self.current.ring.close()
        ring = self._new_ring(loader)
        self.side.start_with(WorkerStart(ring=ring, states=states or ()))
        fetched = (0,) * self._num_workers
        self.current = IterationWorkers(ring=ring, fetched_before=fetched, resumed_states=states, number=1)

    def begin_again(self, current: IterationWorkers, record: IndexRecord) -> None:
        """Prepare another iteration of the same workers.

        Args:
            current: They, in the previous iteration.
            record: The position of the index sampler at its end.
        """
        before = current.fetched_before if self._is_iterable else tuple(self.num_fetched(current, record))
        self.current = replace(current, number=current.number + 1, fetched_before=before)

    @contextlib.contextmanager
    def aside(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Create workers for other code in this block, beside those that are followed."""
        ring = self._new_ring(loader)
        self._rings_aside.append(ring)
        with self.side.aside(ring):
            yield

    def _new_ring(self, loader: DataLoader[Any]) -> WorkerRing:
        slots = (loader.prefetch_factor or 0) + _SPARE_SLOTS
        return WorkerRing(num_workers=self._num_workers, num_slots=slots, slot_bytes=self._slot_bytes)

    def num_fetched(self, current: IterationWorkers, record: IndexRecord) -> list[int]:
        """Return how many batches each worker has been given since it was created."""
        given = record.handed_out - record.first_batch
        if self._is_iterable:
            return counts_now(current.ring, current.number, given)
        return [
            before + max(0, -((worker - given) // self._num_workers))
            for worker, before in enumerate(current.fetched_before)
        ]

    def at(self, current: IterationWorkers, num_batches: int) -> tuple[list[int], int]:
        """Return how many batches each worker had fetched where a resume begins, and how many it drops.

        Args:
            current: The workers in an iteration.
            num_batches: How many of its batches are consumed.
        """
        if self._is_iterable:
            return counts_at(current.ring, current.number, num_batches)
        # A fresh iterator begins with worker 0, so the resume starts at the round that worker 0 began.
        rounds, drop = divmod(num_batches, self._num_workers)
        return [before + rounds for before in current.fetched_before], drop

    def release(self) -> list[int]:
        """Let the workers obey a termination signal again, because they are no longer needed; return their ids."""
        rings = [*self._rings_aside, *([] if self.current is None else [self.current.ring])]
        return [process_id for ring in rings for process_id in ring.close()]

    def close(self, *, timeout_seconds: float) -> None:
        """End the remaining workers. A worker that doesn't exit in time when requested to is killed."""
        end_children(self.release(), timeout_seconds=timeout_seconds)
