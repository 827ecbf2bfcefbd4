"""One run over a loader: the states it began with, its workers, and the number of batches it has yielded.

A loader may be run over again before the trainer has used the last batches of the previous run. An example is a short
loader that is cycled beside a loader without a length. Everything that belongs to one run is therefore kept together.

Workers supply the batches of an iterable data set in turn, as long as they have data. They can be ended without the
main process treating their end as a fault.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.loader.iterable import IterableRecord
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.samplers import state_of
from lightning_faulttolerant.loader.worker_side import WorkerSide, WorkerStart, WorkerState, unpack_worker_state

_KEPT_STATES = 4  # of the batches yielded, at most the last one is not trained yet


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
    dataset: object = None
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


class CountedBatches(Iterator[object]):
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

    def __next__(self) -> object:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        if self._num_unheard:
            return self._next()
        batch = next(self._batches)
        self._iteration.count()
        return batch

    def _next(self) -> object:
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


_WAIT_SECONDS = 5.0


def round_of(num_batches: int, ends: list[int | None]) -> tuple[int, int]:
    """Return the last round that began at or before batch `num_batches`, and the number of batches before it.

    Args:
        num_batches: The number of batches yielded.
        ends: The total number of batches of each worker that has run out, ``None`` for the others.
    """
    rounds = bisect_right(range(num_batches + 1), num_batches, key=lambda r: _num_before(r, ends)) - 1
    return rounds, _num_before(rounds, ends)


def _num_before(rounds: int, ends: list[int | None]) -> int:
    return sum(rounds if end is None else min(rounds, end) for end in ends)


def counts_at(ring: WorkerRing, iteration: int, num_batches: int) -> tuple[list[int], int]:
    """Return how many batches each worker had fetched when the round of `num_batches` began, and the rest to drop."""
    spans = _spans(ring, iteration)
    rounds, before = round_of(num_batches, [None if last is None else last - first for first, last in spans])
    counts = [first + rounds if last is None else min(first + rounds, last) for first, last in spans]
    return counts, num_batches - before


def counts_now(ring: WorkerRing, iteration: int, num_given: int) -> list[int]:
    """Return how many batches each worker has fetched once it has finished its work.

    Raises:
        NotExactError: If that is unknown, because some have run out and others were cut off.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        spans = _spans(ring, iteration)
        if all(last is not None for _, last in spans):
            return [last for _, last in spans if last is not None]
        counts = [first - (worker - num_given) // ring.num_workers for worker, (first, _) in enumerate(spans)]
        if all(last is None and ring.has(w, counts[w]) for w, (_, last) in enumerate(spans)):
            return counts
        if any(last is not None for _, last in spans):
            is_over = time.monotonic() > deadline
        else:
            is_over = not all(ring.is_working(w) for w, count in enumerate(counts) if not ring.has(w, count))
        if is_over:
            raise NotExactError(
                "An epoch ended while some of the persistent workers had run out of samples of their iterable data "
                "set and others had not. How far these have fetched ahead depends on their speed, so their random "
                "draws could not continue exactly. Pass persistent_workers=False."
            )
        time.sleep(0.001)


def _spans(ring: WorkerRing, iteration: int) -> list[tuple[int, int | None]]:
    try:
        return [ring.span(worker, iteration) for worker in range(ring.num_workers)]
    except LookupError as error:
        raise NotExactError(
            f"The position of a data-loading worker could not be read: {error}. Its samples could not continue exactly."
        ) from error


@contextlib.contextmanager
def default_sigchld() -> Iterator[None]:
    """Ignore the deaths of child processes."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except (ValueError, AttributeError):  # not the main thread, or the signal doesn't exist on this platform
        handler = None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def end_children(process_ids: Sequence[int], *, timeout_seconds: float) -> None:
    """End those children of these process ids that still exist; kill those that don't exit in time."""
    children = {child.pid: child for child in multiprocessing.active_children()}
    found = [children[process_id] for process_id in process_ids if process_id in children]
    if not found:
        return
    # torch's SIGCHLD handler raises in the main process when a worker is killed.
    with default_sigchld():
        for child in found:
            child.terminate()
        deadline = time.monotonic() + timeout_seconds
        for child in found:
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.join(timeout_seconds)


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
        self.num_workers = num_workers
        self._slot_bytes = slot_bytes
        self._is_iterable = is_iterable
        self._rings_aside: list[WorkerRing] = []
        self.current: IterationWorkers | None = None
        """The workers in the newest iteration."""

    def begin(self, loader: DataLoader[object], states: list[WorkerState] | None) -> None:
        """Prepare an iteration whose workers are created for it, and continue from these states."""
        if self.current is not None:
            self.current.ring.close()
        ring = self._new_ring(loader)
        self.side.start_with(WorkerStart(ring=ring, states=states or ()))
        fetched = (0,) * self.num_workers
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
    def aside(self, loader: DataLoader[object]) -> Iterator[None]:
        """Create workers for other code in this block, next to those that are followed."""
        ring = self._new_ring(loader)
        self._rings_aside.append(ring)
        with self.side.aside(ring):
            yield

    def _new_ring(self, loader: DataLoader[object]) -> WorkerRing:
        slots = (loader.prefetch_factor or 0) + _SPARE_SLOTS
        return WorkerRing(num_workers=self.num_workers, num_slots=slots, slot_bytes=self._slot_bytes)

    def num_fetched(self, current: IterationWorkers, record: IndexRecord) -> list[int]:
        """Return how many batches each worker has been given since it was created."""
        given = record.handed_out - record.first_batch
        if self._is_iterable:
            return counts_now(current.ring, current.number, given)
        return [
            before + max(0, -((worker - given) // self.num_workers))
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
        rounds, drop = divmod(num_batches, self.num_workers)
        return [before + rounds for before in current.fetched_before], drop

    def release(self) -> list[int]:
        """Let the workers obey a termination signal again, because they are no longer needed; return their ids."""
        rings = [*self._rings_aside, *([] if self.current is None else [self.current.ring])]
        return [process_id for ring in rings for process_id in ring.close()]

    def close(self, *, timeout_seconds: float) -> None:
        """End the remaining workers. A worker that doesn't exit in time when requested to is killed."""
        end_children(self.release(), timeout_seconds=timeout_seconds)
