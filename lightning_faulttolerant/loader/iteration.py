"""One run over a loader: what it was begun with, and how many of its batches have come out.

A loader may be run over again before the trainer has used the last batches of the run before (a short loader that is
cycled, beside a loader without a length), so what belongs to one run is kept together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import refuse
from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.loader.iterable import IterableRecord
from lightning_faulttolerant.loader.plain_state import state_of
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.worker_side import WorkerState, unpack_worker_state

_KEPT_STATES = 4  # the trainer is at most one batch behind what has come out


@dataclass(kw_only=True, slots=True)
class Iteration:
    """One run over a loader.

    Args:
        record: Where its index sampler is.
        ring: Where its workers leave their states.
        fetched_before: How many batches each worker had fetched when it began.
        resumed_states: What its workers were given to continue from.
        num_out: How many batches have come out since the epoch's beginning, those before a resume included.
        iterable: Where its iterable data set is, in this process.
        number: The how-manieth of its workers it is.
        dataset: Its data set in this process, if that keeps a state which is to be known.
    """

    record: IndexRecord
    ring: WorkerRing | None
    fetched_before: list[int]
    resumed_states: list[WorkerState] | None
    num_out: int = 0
    iterable: IterableRecord | None = None
    number: int = 0
    dataset: Any = None
    dataset_states: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_STATES))

    def __post_init__(self) -> None:
        self._note()

    def count(self) -> None:
        """Count a batch that has come out."""
        self.num_out += 1
        self._note()

    def _note(self) -> None:
        if self.dataset is not None:
            self.dataset_states.append((self.num_out, state_of(self.dataset)))

    def dataset_state_after(self, num_batches: int) -> Any:
        """Return the state of `dataset` after the first `num_batches`, one of the last that have come out."""
        return dict(self.dataset_states)[num_batches] if self.dataset is not None else None


class CountedBatches(Iterator[Any]):
    """Passes on what torch's iterator gives, and counts it.

    Args:
        batches: What torch gives.
        iteration: What is to know their number.
        before_first: Called right before the first batch is asked for.
        not_exact: Gets what workers that were given something to continue from say against it.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        iteration: Iteration,
        *,
        before_first: Callable[[], None],
        not_exact: list[str],
    ) -> None:
        self._batches = batches
        self._iteration = iteration
        self._before_first: Callable[[], None] | None = before_first
        self._not_exact = not_exact
        # Every worker has begun, and said what it has to say, once each has been asked for a batch and has answered.
        self._num_heard = 0 if iteration.resumed_states is None else len(iteration.resumed_states) + 1

    def __next__(self) -> Any:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        return self._next()

    def _next(self) -> Any:
        try:
            batch = next(self._batches)
        finally:
            if self._num_heard:
                self._num_heard -= 1
                self._hear()
        self._iteration.count()
        return batch

    def _hear(self) -> None:
        assert self._iteration.ring is not None
        for reason in self._iteration.ring.said():
            refuse(reason, strict=False, not_exact=self._not_exact)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterators have a length

    def drop(self, num_batches: int) -> None:
        """Take the first batches out unseen: they were used before the resume."""
        for _ in range(num_batches):
            self._next()


def starts_fresh(iteration: Iteration, counts: list[int]) -> bool:
    """Return whether workers that have fetched so many batches need no state to begin from."""
    # Workers that have done nothing yet are made again from the same random states, and seed themselves alike.
    return not any(counts) and iteration.resumed_states is None


def worker_states(iteration: Iteration, counts: list[int]) -> list[WorkerState]:
    """Return the state of each worker after so many of its batches.

    Raises:
        NotExactError: If one is not there.
    """
    assert iteration.ring is not None
    if not any(counts) and iteration.resumed_states is not None:
        return iteration.resumed_states
    try:
        return [unpack_worker_state(iteration.ring.get(worker, count)) for worker, count in enumerate(counts)]
    except LookupError as error:
        raise NotExactError(
            f"The state of a data-loading worker could not be read: {error}. The random draws in its"
            " samples could not continue exactly."
        ) from error
