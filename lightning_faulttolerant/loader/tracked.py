"""A copy of a user's ``DataLoader`` that can say where it is, as a state, and go on from there.

The copy is an instance of the user's class and shares the data set and the samplers; the user's own loader is never
modified.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.index_side import IndexPlan, IndexSide, birth_plan, plan_from_state, record_state
from lightning_faulttolerant.loader.iteration import CountedBatches, Iteration
from lightning_faulttolerant.loader.per_sample import PerSampleDataset, SampleSeeds
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.worker_side import WorkerSide, WorkerState, unpack_worker_state
from lightning_faulttolerant.state.generators import HeldGenerators

_SLACK_BYTES = 262_144  # for generators that a data set makes only when it is first used
_SPARE_SLOTS = 5
_HELD_ATTRIBUTES = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator")


def needs_no_position(loader: object) -> bool:
    """Return whether whole runs over `loader` can be repeated exactly though a position in it can't be resumed.

    So it is where every run begins anew, in this process or in workers made for it.
    """
    if not isinstance(loader, DataLoader):
        return True
    keeps_workers = loader.persistent_workers or getattr(loader, "_iterator", None) is not None
    return not keeps_workers and getattr(loader, "in_order", True)


def why_not_exact(loader: object) -> str | None:
    """Return why `loader` can't be resumed exactly, or ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, which is not supported yet"
    if hasattr(loader, "state_dict"):
        return f"a {type(loader).__name__} keeps a state of its own, which is not supported yet"
    if not getattr(loader, "in_order", True):
        return "with in_order=False the order of its batches depends on the speed of its workers; set in_order=True"
    if any(isinstance(held, Iterator) and _is_of_torch(held) for held in vars(loader).values()):
        return "it already holds an iterator of its own (made before fit): its workers can't be reached any more"
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return "its sampler has no length, which is not supported yet"
    return None


def _is_of_torch(value: object) -> bool:
    return type(value).__module__.startswith("torch.utils.data")


_TRACKER = "fault_tolerance_tracker"


class _Tracked(DataLoader[Any]):
    """Stands between a user's class and torch's, where ``super().__iter__()`` of the user's class arrives.

    There a new iterator is really made, also when the user's ``__iter__`` is a generator that runs later.
    """

    def __iter__(self) -> Any:
        tracker: TrackedLoader = vars(self)[_TRACKER]
        return tracker.iterate(super().__iter__)


class _Asked(DataLoader[Any]):
    """Stands before a user's class: where its ``__iter__`` is a generator, nothing has begun yet when it is called."""

    def __iter__(self) -> Any:
        tracker: TrackedLoader = vars(self)[_TRACKER]
        tracker.ask()
        return super().__iter__()


@functools.cache
def _tracked_class(user_class: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    bases = (_Tracked,) if user_class is DataLoader else (_Asked, user_class, _Tracked)
    namespace = {"__module__": user_class.__module__, "__doc__": user_class.__doc__}
    return type(user_class.__name__, bases, namespace)


class TrackedLoader:
    """Follows a `DataLoader` through its iterations.

    Args:
        loader: The user's loader; `why_not_exact` must be ``None`` for it.
        default_worker_init: Called in new workers where the loader has no ``worker_init_fn``.
        seeds: Seed each sample from these; without them the workers' random states are captured.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        default_worker_init: Callable[[int], None] | None = None,
        seeds: SampleSeeds | None = None,
    ) -> None:
        self._seeds = seeds
        self._per_sample: PerSampleDataset | None = None
        is_batched = loader.batch_sampler is not None
        if seeds is not None:
            self._per_sample = PerSampleDataset(loader.dataset, loader.collate_fn, is_batched=is_batched)
        self.num_workers = loader.num_workers
        self._plan: tuple[IndexPlan, list[WorkerState] | None, int] | None = None
        self._unused_state: dict[str, Any] | None = None
        self._is_asked = False
        self._is_taken = False
        self._resumed_workers = self.num_workers
        self.is_followed: Callable[[], bool] = lambda: True
        """Whether an iteration that is asked for now is the one to follow, rather than somebody else's beside it."""
        self.is_held_back: Callable[[], bool] = lambda: False
        """Whether an iteration that is asked for now is to be empty, since it will be made anew at the right place."""
        self.on_first_batch: Callable[[], None] = lambda: None
        """Called right before the first batch of an iteration is asked for."""
        self._rings_aside: list[WorkerRing] = []
        self._ring: WorkerRing | None = None
        self._fetched_before = [0] * self.num_workers
        self._resumed_states: list[WorkerState] | None = None
        self.iteration: Iteration | None = None
        """The run over the loader that is under way."""
        self.held = HeldGenerators({name: getattr(loader, name, None) for name in _HELD_ATTRIBUTES})
        self._in_flight = (loader.prefetch_factor or 0) * self.num_workers
        self.index_side = IndexSide(
            loader.batch_sampler if loader.batch_sampler is not None else loader.sampler,
            held=self.held,
            window=self._in_flight + self.num_workers + 2,
            seeds=seeds,
            is_batched=is_batched,
        )
        self._worker_side: WorkerSide | None = None
        if self.num_workers:
            self._worker_side = WorkerSide(
                collate_fn=loader.collate_fn,
                worker_init_fn=loader.worker_init_fn,
                default_init=default_worker_init,
                per_sample=self._per_sample,
            )
            states = self._worker_side.state_bytes(loader.dataset) + _SLACK_BYTES if seeds is None else 1
            self._slot_bytes = states
        self._loader: weakref.ref[DataLoader[Any]] | None = None

    @property
    def loader(self) -> DataLoader[Any]:
        """The copy that is followed; it holds this object, not the other way round, so that no cycle keeps workers."""
        loader = self._loader() if self._loader is not None else None
        if loader is None:
            raise ReferenceError("the loader that was followed is gone")
        return loader

    @property
    def is_gone(self) -> bool:
        """Whether nobody holds the copy that is followed any more."""
        return self._loader is None or self._loader() is None

    def copy_of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the copy of the user's `loader` that is followed."""
        tracked = copy.copy(loader)
        tracked.__class__ = _tracked_class(type(loader))  # type: ignore[arg-type]  # mypy: a class with __hash__ is no Hashable
        # `DataLoader.__setattr__` refuses a new sampler after construction.
        vars(tracked)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = self.index_side
        vars(tracked)[_TRACKER] = self
        if self._worker_side is not None:
            tracked.collate_fn = self._worker_side.collate
            tracked.worker_init_fn = self._worker_side.init
        self._loader = weakref.ref(tracked)
        return tracked

    @property
    def _has_living_workers(self) -> bool:
        return self.loader.persistent_workers and getattr(self.loader, "_iterator", None) is not None

    def ask(self) -> None:
        """Note that an iteration was asked for; it begins when it is made."""
        self._is_asked = self._is_asked or self.is_followed()

    def iterate(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make torch's iterator for a new iteration, resumed where `load_state_dict` said so.

        Resuming leaves the random generators of this process as they were found.
        """
        if not (self._is_asked or self.is_followed()):
            return self._iterate_aside(make_iterator)
        if self.is_held_back():
            self._is_asked = False
            return iter(())
        (plan, states, drop), self._plan = self._plan or (None, None, 0), None
        self._unused_state = None
        self._is_asked = self._is_taken = False
        self._begin(plan, states)
        before = self.index_side.moment() if plan is not None and plan.start is not None else None
        started = self._started()
        if self._seeds is not None:
            make_iterator = functools.partial(self._make_per_sample, self._seeds, make_iterator)
        batches = CountedBatches(make_iterator(), started, before_first=self.on_first_batch)
        if before is not None:
            self.index_side.ensure_open()
            batches.drop(drop)
            self.index_side.restore(before)
        return batches

    def _make_per_sample(self, seeds: SampleSeeds, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make torch's iterator over a data set that seeds before each sample; the loader's own attributes stay."""
        assert self._per_sample is not None
        stand_in = self._per_sample.stand_in(self.loader, collates=self._worker_side is None)
        with self.index_side.opened_before(), stand_in:
            seeds.seed_workers(self.loader.generator)
            return make_iterator()

    def _started(self) -> Iteration:
        record = self.index_side.record
        self.iteration = Iteration(
            record=record,
            ring=self._ring,
            fetched_before=list(self._fetched_before),
            resumed_states=self._resumed_states,
            num_out=record.first_batch,
        )
        return self.iteration

    def _iterate_aside(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make an iterator for somebody else, beside the iteration that is followed."""
        if self.loader.persistent_workers and self.num_workers:
            # There is one set of workers: torch takes them away from whoever iterates.
            self._is_taken = True
            self._begin(None, None)
            return make_iterator() if self._seeds is None else self._make_per_sample(self._seeds, make_iterator)
        with self.index_side.aside():
            if self._worker_side is None:
                return make_iterator()
            with self._worker_side.aside(self._new_ring()) as ring:
                self._rings_aside.append(ring)
                return make_iterator()

    def _begin(self, plan: IndexPlan | None, states: list[WorkerState] | None) -> None:
        if self.num_workers and self._has_living_workers:
            self._fetched_before = self._fetched()
        elif self.num_workers:
            self._make_ring(states)
        self.index_side.begin(plan, new_workers=not self._has_living_workers)
        if self._seeds is not None:
            self.index_side.record.epoch = self._seeds.begin(is_resumed=plan is not None or self._is_taken)
            self.index_side.has_other_workers = plan is not None and self._resumed_workers != self.num_workers

    def _make_ring(self, states: list[WorkerState] | None) -> None:
        assert self._worker_side is not None
        if self._ring is not None:
            self._ring.close()
        self._ring = self._worker_side.ring = self._new_ring()
        self._worker_side.strict = self.index_side.strict
        self._worker_side.resume_from = self._resumed_states = states
        self._fetched_before = [0] * self.num_workers

    def _new_ring(self) -> WorkerRing:
        slots = (self.loader.prefetch_factor or 0) + _SPARE_SLOTS
        return WorkerRing(num_workers=self.num_workers, num_slots=slots, slot_bytes=self._slot_bytes)

    def _fetched(self) -> list[int]:
        """Return how many batches each worker was given since it was made."""
        record = self.index_side.record
        given = record.handed_out - record.first_batch
        return [
            before + max(0, -((worker - given) // self.num_workers))
            for worker, before in enumerate(self._fetched_before)
        ]

    def state_dict(self, consumed: int | None, iteration: Iteration | None = None) -> dict[str, Any]:
        """Return the position.

        Args:
            consumed: How many batches of the iteration have been used; ``None`` between iterations.
            iteration: Which; the one that is under way by default.

        Raises:
            NotExactError: If a worker's state of that position is not there.
        """
        if self._unused_state is not None:  # resumed, and not iterated since: still where it was
            return copy.deepcopy(self._unused_state)
        if iteration is None:
            iteration = self.iteration
        if iteration is None or consumed is None or self._is_asked:
            return self._state_between(iteration)
        if self._is_taken:
            raise NotExactError(
                "Somebody else has iterated over the training loader in the middle of its epoch, and its persistent"
                " workers were taken away from the training. Let a callback have a loader of its own."
            )
        record = iteration.record
        if self._seeds is not None:
            state = {"consumed": consumed, "record": record_state(record), "workers": None}
            return {**state, "per_sample": self._per_sample_state(record.epoch + 1)}
        counts = None
        if self.num_workers:
            # A fresh iterator begins with worker 0, so the resume begins with the round that worker 0 began.
            rounds = (consumed - record.first_batch) // self.num_workers
            counts = [before + rounds for before in iteration.fetched_before]
        workers = None if counts is None or _starts_fresh(iteration, counts) else _worker_states(iteration, counts)
        return {"consumed": consumed, "record": record_state(record), "workers": workers}

    def _state_between(self, iteration: Iteration | None) -> dict[str, Any]:
        if self._seeds is not None:
            state = {"consumed": None, "record": None, "workers": None}
            return {**state, "per_sample": self._per_sample_state(self._seeds.num_begun)}
        workers = None
        if iteration is not None and self.num_workers and self._has_living_workers:
            workers = _worker_states(iteration, self._fetched())
        kept = record_state(self.index_side.record) if workers is not None else None
        return {"consumed": None, "record": kept, "workers": workers}

    def _per_sample_state(self, num_begun: int) -> dict[str, int]:
        assert self._seeds is not None
        return {**self._seeds.state_dict(num_begun=num_begun), "num_workers": self.num_workers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a position of `state_dict`."""
        per_sample = state_dict.get("per_sample")
        if self._seeds is not None and per_sample is not None:
            self._seeds.load_state_dict(per_sample)
            self._resumed_workers = per_sample["num_workers"]
        self._unused_state = copy.deepcopy(dict(state_dict))
        record, workers, consumed = state_dict["record"], state_dict["workers"], state_dict["consumed"]
        if record is None:
            return
        if self.loader.persistent_workers:
            self._forget_iterator()
        if consumed is None:
            self._plan = (birth_plan(record), workers, 0)
            return
        if self._seeds is not None or per_sample is not None:
            self._plan = (plan_from_state(record, consumed, is_batched=self.index_side.is_batched), None, 0)
            return
        drop = consumed % self.num_workers if self.num_workers else 0
        self._plan = (plan_from_state(record, consumed - drop), workers, drop)

    def _forget_iterator(self) -> None:
        vars(self.loader)["_iterator"] = None

    def release_workers(self) -> None:
        """Let the workers follow a termination again: nobody needs them any more."""
        self._close_rings()

    def _close_rings(self) -> list[int]:
        rings = [*self._rings_aside, *([] if self._ring is None else [self._ring])]
        return [process_id for ring in rings for process_id in ring.close()]

    def close_workers(self, *, timeout_seconds: float = 0.5) -> None:
        """End the workers that are still there: those that don't follow a request within the time are killed."""
        process_ids = self._close_rings()
        children = {child.pid: child for child in multiprocessing.active_children()}
        workers = [children[process_id] for process_id in process_ids if process_id in children]
        if not workers:
            return
        # torch's handler of SIGCHLD raises in the main process when a worker is killed.
        with _default_sigchld():
            for worker in workers:
                worker.terminate()
            deadline = time.monotonic() + timeout_seconds
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
                if worker.is_alive() and worker.pid is not None:
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.join(timeout_seconds)


@contextlib.contextmanager
def _default_sigchld() -> Iterator[None]:
    """Let children die unnoticed."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except (ValueError, AttributeError):  # not the main thread, or no such signal here
        handler = None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _starts_fresh(iteration: Iteration, counts: list[int]) -> bool:
    # Workers that have done nothing yet are made again from the same random states, and seed themselves alike.
    return not any(counts) and iteration.resumed_states is None


def _worker_states(iteration: Iteration, counts: list[int]) -> list[WorkerState]:
    assert iteration.ring is not None
    if not any(counts) and iteration.resumed_states is not None:
        return iteration.resumed_states
    try:
        return [unpack_worker_state(iteration.ring.get(worker, count)) for worker, count in enumerate(counts)]
    except LookupError as error:
        raise NotExactError(
            f"The state of a data-loading worker could not be read: {error}. The random draws in its"
            " samples could not go on exactly."
        ) from error
