"""One run over a loader: the states it began with, and the number of batches it has yielded.

A loader may be run over again before the trainer has used the last batches of the previous run. An example is a short
loader that is cycled beside a loader without a length. Everything that belongs to one run is therefore kept together.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.loader.iterable import IterableRecord
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.samplers import state_of
from lightning_faulttolerant.loader.worker_side import WorkerState, unpack_worker_state

_KEPT_STATES = 4  # the trainer is at most one batch behind the batches yielded


class IterationOwner:
    """The trainer or the loop whose iterations over a loader are followed.

    Args:
        is_followed: Whether an iteration requested now is the owner's, and not one that other code runs beside it.
        is_held_back: Whether an iteration requested now stays empty, because it is created again later at the right
            place.
        before_first_batch: Called right before the first batch of an iteration is requested.
    """

    def __init__(
        self,
        *,
        is_followed: Callable[[], bool] = lambda: True,
        is_held_back: Callable[[], bool] = lambda: False,
        before_first_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_followed = is_followed
        self._is_held_back = is_held_back
        self._holds_back = False
        self.before_first_batch = before_first_batch

    def is_held_back(self) -> bool:
        """Return whether an iteration requested now stays empty."""
        return self._holds_back or self._is_held_back()

    @contextlib.contextmanager
    def holding_back(self) -> Iterator[None]:
        """Let an iteration requested inside the context stay empty."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def call_before_first_batch(self, function: Callable[[], None]) -> None:
        """From the next iteration on, call `function` right before the first batch is requested."""
        self.before_first_batch = function


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationWorkers:
    """The workers of one run over a loader.

    Args:
        ring: Where they leave their states.
        fetched_before: How many batches each had fetched when the run began.
        resumed_states: The states that they continue from.
        number: The number of the run among those of the same workers.
    """

    ring: WorkerRing
    fetched_before: tuple[int, ...]
    resumed_states: list[WorkerState] | None
    number: int

    def starts_fresh(self, counts: list[int]) -> bool:
        """Return whether workers that have fetched this many batches need no state to start from."""
        # Workers that have not fetched yet are created again from the same random states, and seed themselves the same.
        return not any(counts) and self.resumed_states is None

    def states(self, counts: list[int]) -> list[WorkerState]:
        """Return the state of each worker after the given number of its batches.

        Raises:
            NotExactError: If a state is missing.
        """
        if not any(counts) and self.resumed_states is not None:
            return self.resumed_states
        try:
            return [unpack_worker_state(self.ring.get(worker, count)) for worker, count in enumerate(counts)]
        except LookupError as error:
            raise NotExactError(
                f"The state of a data-loading worker could not be read: {error}. The random draws in its"
                " samples could not continue exactly."
            ) from error


@dataclass(kw_only=True, slots=True)
class Iteration:
    """One run over a loader.

    Args:
        record: The position of its index sampler.
        workers: Its workers, if it has any.
        num_out: How many batches it has yielded since the epoch's beginning, including those before a resume.
        iterable: The position of its iterable data set in this process.
        dataset: Its data set in this process, if that keeps a state to be saved.
    """

    record: IndexRecord
    workers: IterationWorkers | None
    num_out: int = 0
    iterable: IterableRecord | None = None
    dataset: Any = None
    dataset_states: deque[tuple[int, object]] = field(default_factory=lambda: deque(maxlen=_KEPT_STATES))

    def __post_init__(self) -> None:
        self._note()

    def count(self) -> None:
        """Count a batch that was yielded."""
        self.num_out += 1
        self._note()

    def _note(self) -> None:
        if self.dataset is not None:
            self.dataset_states.append((self.num_out, state_of(self.dataset)))

    def dataset_state_after(self, num_batches: int) -> object:
        """Return the state of `dataset` after the first `num_batches`, which must be among the last yielded."""
        return dict(self.dataset_states)[num_batches] if self.dataset is not None else None


class CountedBatches(Iterator[Any]):
    """Passes on the batches of torch's iterator, and counts them.

    Args:
        batches: torch's iterator.
        iteration: The run that counts the batches.
        before_first: Called right before the first batch is requested.
        exactness: Collects the reasons why resumed workers can't continue exactly.
    """

    def __init__(
        self,
        batches: Iterator[object],
        iteration: Iteration,
        *,
        before_first: Callable[[], None],
        exactness: Exactness,
    ) -> None:
        self._batches = batches
        self._iteration = iteration
        self._before_first: Callable[[], None] | None = before_first
        self._exactness = exactness
        # Once each worker has been asked for a batch and has answered, all have begun and reported their reasons.
        resumed = None if iteration.workers is None else iteration.workers.resumed_states
        self._num_unheard = 0 if resumed is None else len(resumed) + 1

    def __next__(self) -> Any:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        if self._num_unheard:
            return self._next()
        batch, iteration = next(self._batches), self._iteration
        if iteration.dataset is None:
            iteration.num_out += 1
        else:
            iteration.count()
        return batch

    def _next(self) -> Any:
        try:
            batch = next(self._batches)
        finally:
            if self._num_unheard:
                self._num_unheard -= 1
                self._hear()
        self._iteration.count()
        return batch

    def _hear(self) -> None:
        workers = self._iteration.workers
        for reason in () if workers is None else workers.ring.said():
            self._exactness.admit(reason)

    def __getattr__(self, name: str) -> object:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterators have a length

    def drop(self, num_batches: int) -> None:
        """Take and discard the first batches: they were used before the resume."""
        for _ in range(num_batches):
            self._next()
