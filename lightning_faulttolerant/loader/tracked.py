"""A copy of a user's ``DataLoader`` that can return its position as a state, and continue from there.

The copy is an instance of the user's class. It shares the data set and the samplers. The user's loader stays unchanged.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.foreign import ForeignEpochs
from lightning_faulttolerant.loader.index_record import IndexPlan, birth_plan, plan_from_state, record_state
from lightning_faulttolerant.loader.index_side import SOLE_RANK, IndexSide
from lightning_faulttolerant.loader.iterable import IterableSide, between
from lightning_faulttolerant.loader.iteration import (
    CountedBatches,
    Iteration,
    IterationOwner,
    starts_fresh,
    worker_states,
)
from lightning_faulttolerant.loader.objects import LoaderObjects
from lightning_faulttolerant.loader.own_attributes import TRACKER
from lightning_faulttolerant.loader.own_state import forget_own_position, stateful_dataset
from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.per_sample_loader import SeededSamples
from lightning_faulttolerant.loader.remaining_batches import RemainingBatches
from lightning_faulttolerant.loader.resized import DEAL, planned, with_other_workers
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.samplers import index_sampler, state_of
from lightning_faulttolerant.loader.streamed import StreamedEpochs
from lightning_faulttolerant.loader.tracked_class import tracked_class
from lightning_faulttolerant.loader.worker_side import WorkerSide, WorkerState, worker_side_of
from lightning_faulttolerant.loader.workers import counts_at, counts_now, end_children
from lightning_faulttolerant.samplers.deal import RankPlace
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.modules import users_variables

_SLACK_BYTES = 262_144  # for generators that a data set creates only on first use
_SPARE_SLOTS = 5
_HELD = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator")


class TrackedLoader:
    """Follows a `DataLoader` through its iterations.

    Args:
        loader: The user's loader; `why_not_exact` must be ``None`` for it.
        exactness: Collects what is not exact. By default, that is an error.
        owner: Says which iterations are followed. By default, all are.
        rank_place: This rank, among those that share the samples.
        default_worker_init: Called in new workers if the loader has no ``worker_init_fn``.
        seeds: The seeds of the samples of a map-style data set. Without them, the workers' states are captured.
        known: The objects of the loader that was in this place before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        exactness: Exactness | None = None,
        owner: IterationOwner | None = None,
        rank_place: RankPlace = SOLE_RANK,
        default_worker_init: Callable[[int], None] | None = None,
        seeds: SampleSeeds | None = None,
        known: LoaderObjects | None = None,
    ) -> None:
        self.user_loader = loader
        self._seeded = None if seeds is None else SeededSamples(loader, seeds)
        self.num_workers = loader.num_workers
        self._plan: tuple[IndexPlan, list[WorkerState] | None, int] | None = None
        self._unused_state: dict[str, Any] | None = None
        self._is_asked = self._is_taken = False
        self._has_other_workers = False
        """Whether the run had another number of workers before a resume."""
        self.exactness = Exactness() if exactness is None else exactness
        self.owner = IterationOwner() if owner is None else owner
        self._rings_aside: list[WorkerRing] = []
        self._ring: WorkerRing | None = None
        self._fetched_before = [0] * self.num_workers
        self._resumed_states: list[WorkerState] | None = None
        self.iteration: Iteration | None = None
        """The current run over the loader."""
        parts = {name: getattr(loader, name, None) for name in _HELD}
        self.held = HeldGenerators({**parts, **users_variables(parts)})
        is_iterable = isinstance(loader.dataset, IterableDataset)
        self._streamed, self._foreign = StreamedEpochs(loader), ForeignEpochs(loader)
        self.objects = LoaderObjects(loader, known=known)
        self._in_flight = (loader.prefetch_factor or 0) * self.num_workers
        self.index_side = IndexSide(
            index_sampler(loader),
            held=self.held,
            exactness=self.exactness,
            rank_place=rank_place,
            window=0 if is_iterable else self._in_flight + self.num_workers + 2,
            has_workers=self.num_workers > 0,
            is_endless=is_iterable,
            seeds=seeds,
            is_batched=loader.batch_sampler is not None,
            streamed=self._streamed if self._streamed.is_dealt else None,
            objects=self.objects,
        )
        self.iterable = IterableSide(loader.dataset, self.exactness) if is_iterable else None
        self._start_position, self._num_iterations = None, 0
        self._collate: Callable[[Any], Any] = loader.collate_fn
        if self.iterable is not None:
            self._collate = functools.partial(self.iterable.collate, loader.collate_fn)
        self._dataset = None if self.num_workers else stateful_dataset(loader)
        self._dataset_state: Any = None
        self._worker_side: WorkerSide | None = None
        if self.num_workers:
            per_sample = None if self._seeded is None else self._seeded.dataset
            self._worker_side = worker_side_of(
                loader,
                self._collate,
                default_worker_init,
                exactness=self.exactness,
                iterable=self.iterable,
                per_sample=per_sample,
            )
            state_bytes = self._worker_side.state_bytes(loader.dataset) + _SLACK_BYTES * (4 if is_iterable else 1)
            self._slot_bytes = 1 if self._seeded else state_bytes
        self._loader: weakref.ref[DataLoader[Any]] | None = None

    @property
    def loader(self) -> DataLoader[Any]:
        """The followed copy. The copy refers to this object, not the reverse, so no cycle keeps workers alive."""
        loader = self._loader() if self._loader is not None else None
        if loader is None:
            raise ReferenceError("the loader that was followed no longer exists")
        return loader

    @property
    def is_gone(self) -> bool:
        """Whether the copy that is followed no longer exists."""
        return self._loader is None or self._loader() is None

    def is_kept_for(self, loader: DataLoader[Any]) -> bool:
        """Return whether the followed copy of `loader` still exists and has persistent workers."""
        return self.user_loader is loader and not self.is_gone and loader.persistent_workers

    def copy_of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the copy of the user's `loader` that is followed."""
        tracked = copy.copy(loader)
        tracked.__class__ = tracked_class(type(loader))  # type: ignore[arg-type]  # mypy says it is not Hashable
        vars(tracked)[TRACKER] = self
        if self.iterable is not None:
            vars(tracked)["dataset"] = self.iterable
            tracked.collate_fn = self._collate
        if self._worker_side is not None:
            tracked.collate_fn = self._worker_side.collate
            tracked.worker_init_fn = self._worker_side.init
        forget_own_position(tracked)
        self._loader = weakref.ref(tracked)
        self._foreign.follow(tracked)
        return tracked

    @property
    def deal(self) -> RemainingBatches | None:
        """How the rest of an epoch that other ranks or workers began is dealt to this rank, until that rest begins."""
        return self._plan[0].deal if self._plan is not None else None

    @property
    def can_be_resized(self) -> bool:
        """Whether another number of workers or ranks can continue in this order."""
        return self.iterable is None or self._streamed.is_dealt

    @property
    def num_handed_out(self) -> int:
        """The number of index batches drawn so far in the current iteration."""
        return self.index_side.record.handed_out

    @property
    def _has_living_workers(self) -> bool:
        return self.loader.persistent_workers and getattr(self.loader, "_iterator", None) is not None

    def ask(self) -> None:
        """Note that an iteration was requested. It begins when its iterator is created."""
        if not self._is_asked and self.owner.is_followed():
            self._is_asked = True
            self._streamed.go_on()

    def iterate(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Create torch's iterator for a new iteration, at the position that `load_state_dict` set.

        Resuming leaves the random generators of this process unchanged.
        """
        if not (self._is_asked or self.owner.is_followed()):
            return self._iterate_aside(make_iterator)
        if self.owner.is_held_back():
            self._is_asked = False
            self._streamed.take_back()
            self._foreign.take_back()
            return iter(())
        (plan, states, drop), self._plan, self._unused_state = self._plan or (None, None, 0), None, None
        self._is_asked = self._is_taken = False
        if self._dataset is not None and self._dataset_state is not None:
            self._dataset.load_state_dict(self._dataset_state)
        self._dataset_state = None
        self._begin(plan, states)
        with self.objects.put_back(*(() if plan is None else plan.objects)):
            return self._iterated(make_iterator, plan, drop)

    def _iterated(self, make_iterator: Callable[[], Iterator[Any]], plan: IndexPlan | None, drop: int) -> Iterator[Any]:
        before = self.index_side.moment() if plan is not None and plan.start is not None else None
        started = self._started()
        batches = CountedBatches(
            self._made(make_iterator),
            started,
            before_first=self.owner.before_first_batch,
            exactness=self.exactness,
        )
        if before is not None:
            self.index_side.ensure_open()
            batches.drop(drop)
            if drop:
                self._streamed.note_dropped()
            self.index_side.restore(before)
        return batches

    def _made(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._seeded is None:
            return make_iterator()
        return self._seeded.make(self.loader, self.index_side, make_iterator)

    def _started(self) -> Iteration:
        record = self.index_side.record
        self.iteration = Iteration(
            record=record,
            ring=self._ring,
            fetched_before=list(self._fetched_before),
            resumed_states=self._resumed_states,
            num_out=record.first_batch,
            iterable=None if self.iterable is None else self.iterable.record,
            number=self._num_iterations,
            dataset=self._dataset,
        )
        return self.iteration

    def _iterate_aside(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Create an iterator for other code, beside the iteration that is followed."""
        if self.loader.persistent_workers and self.num_workers:
            # There is one set of workers. torch takes it away from the iteration that uses it.
            self._is_taken = True
            self._begin(None, None)
            return self._made(make_iterator)
        with self.index_side.aside():
            if self._worker_side is None:
                return make_iterator()
            with self._worker_side.aside(self._new_ring()) as ring:
                self._rings_aside.append(ring)
                return make_iterator()

    def _begin(self, plan: IndexPlan | None, states: list[WorkerState] | None) -> None:
        if self.num_workers and self._has_living_workers:
            if self.iterable is None:
                self._fetched_before = self._fetched()
        elif self.num_workers:
            self._make_ring(states)
        self._num_iterations += 1
        self._streamed.begin()
        self._foreign.begin()
        if self.iterable is not None and not self.num_workers:
            self._start_position, position = None, self._start_position
            record = self.iterable.begin(position)
            record.num_batches = 0 if plan is None else plan.position
        epoch = 0
        if self._seeded is not None:
            epoch = self._seeded.begin(is_resumed=plan is not None or self._is_taken)
            self._has_other_workers = self._seeded.has_other_workers
        new_workers, had_others = not self._has_living_workers, self._has_other_workers
        self.index_side.begin(plan, new_workers=new_workers, epoch=epoch, has_other_workers=had_others)

    def _make_ring(self, states: list[WorkerState] | None) -> None:
        assert self._worker_side is not None
        if self._ring is not None:
            self._ring.close()
        self._ring = self._worker_side.ring = self._new_ring()
        self._worker_side.resume_from = self._resumed_states = states
        self._fetched_before = [0] * self.num_workers
        self._num_iterations = 0

    def _new_ring(self) -> WorkerRing:
        slots = (self.loader.prefetch_factor or 0) + _SPARE_SLOTS
        return WorkerRing(num_workers=self.num_workers, num_slots=slots, slot_bytes=self._slot_bytes)

    def _fetched(self) -> list[int]:
        """Return how many batches each worker has been given since it was created."""
        record = self.index_side.record
        given = record.handed_out - record.first_batch
        if self.iterable is not None and self._ring is not None:
            return counts_now(self._ring, self._num_iterations, given)
        return [
            before + max(0, -((worker - given) // self.num_workers))
            for worker, before in enumerate(self._fetched_before)
        ]

    def state_dict(self, consumed: int | None, iteration: Iteration | None = None) -> dict[str, Any]:
        """Return the position.

        Args:
            consumed: The number of consumed batches of the iteration; ``None`` between iterations.
            iteration: The iteration; the current one by default.

        Raises:
            NotExactError: If a worker's state at that position is missing.
        """
        if self._unused_state is not None:  # resumed, and not iterated since: the position is unchanged
            return copy.deepcopy(self._unused_state)
        in_iteration = consumed is not None and self.iteration is not None and not self._is_asked
        streams = self._streamed.state_dict(in_iteration=in_iteration)
        more = {"samplers": self.index_side.own_progress(), "streams": streams, "is_dealt": self._streamed.is_dealt}
        more |= {"foreign": self._foreign.state_dict(in_iteration=in_iteration), "memory": self.objects.of_memory()}
        return {**self._state(consumed, iteration), **more}

    def _state(self, consumed: int | None, iteration: Iteration | None) -> dict[str, Any]:
        if iteration is None:
            iteration = self.iteration
        if iteration is None or consumed is None or self._is_asked:
            return self._state_between(iteration)
        if self._is_taken:
            raise NotExactError(
                "Other code has iterated over the training loader in the middle of its epoch, and has taken its "
                "persistent workers away from the training. Give a callback its own loader."
            )
        record = iteration.record
        if self._seeded is not None:
            return self._seeded.state_dict(record, consumed)
        counts, drop = None, 0
        if self.num_workers and self.iterable is not None:
            assert iteration.ring is not None
            counts, drop = counts_at(iteration.ring, iteration.number, consumed - record.first_batch)
        elif self.num_workers:
            # A fresh iterator begins with worker 0, so the resume starts at the round that worker 0 began.
            rounds = (consumed - record.first_batch) // self.num_workers
            drop = (consumed - record.first_batch) % self.num_workers
            counts = [before + rounds for before in iteration.fetched_before]
        workers = None if counts is None or starts_fresh(iteration, counts) else worker_states(iteration, counts)
        state = {"consumed": consumed, "drop": drop, "record": record_state(record), "workers": workers}
        state["num_workers"] = self.num_workers
        if self._dataset is not None:
            state["dataset"] = iteration.dataset_state_after(consumed)
        if self.iterable is not None:
            held = None if self.num_workers else iteration.iterable
            position = None if held is None else held.position_after(consumed)
            state["iterable"] = {"epoch": self.iterable.user_epoch, "position": position}
        return state

    def _state_between(self, iteration: Iteration | None) -> dict[str, Any]:
        if self._seeded is not None:
            return self._seeded.state_dict()
        workers = None
        if iteration is not None and self.num_workers and self._has_living_workers:
            workers = worker_states(iteration, self._fetched())
        kept = record_state(self.index_side.record) if workers is not None else None
        state = {"consumed": None, "drop": 0, "record": kept, "workers": workers, "num_workers": self.num_workers}
        if self._dataset is not None:
            state["dataset"] = state_of(self._dataset)
        if self.iterable is not None:
            state["workers"] = workers and [{**w, "iterable": between(w["iterable"])} for w in workers]
            state["iterable"] = {"epoch": self.iterable.user_epoch, "position": self.iterable.between()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a position of `state_dict`."""
        if self._seeded is not None:
            self._seeded.load_state_dict(state_dict)
        had_workers = state_dict.get("num_workers", self.num_workers)
        if had_workers != self.num_workers and self.can_be_resized:
            state_dict = with_other_workers(state_dict, self.loader, rank=self.index_side.rank_place.rank)
            self._has_other_workers = True
        self._unused_state, self._plan = copy.deepcopy(dict(state_dict)), None
        self.index_side.load_own_progress(state_dict.get("samplers", ()))
        record, workers, consumed = state_dict["record"], state_dict["workers"], state_dict["consumed"]
        self._streamed.load_state_dict(state_dict.get("streams", ()))
        self._foreign.load_state_dict(state_dict.get("foreign", {}))
        self.objects.owed_memory = state_dict.get("memory", {})
        self._dataset_state = copy.deepcopy(state_dict.get("dataset"))
        if self.iterable is not None:
            self._start_position = state_dict["iterable"]["position"]
            self.iterable.go_to_epoch(state_dict["iterable"]["epoch"])
        if self.loader.persistent_workers:
            vars(self.loader)["_iterator"] = None
        if record is None and DEAL not in state_dict:
            return
        if DEAL in state_dict:
            self._plan = (planned(state_dict[DEAL], self.index_side, self.loader), None, 0)
            return
        if consumed is None:
            self._plan = (birth_plan(record), workers, 0)
            return
        if self._seeded is not None:
            self._plan = (self._seeded.plan(record, consumed), None, 0)
            return
        drop = state_dict["drop"]
        plan = plan_from_state(record, consumed - drop, draws_again=not self.num_workers and not had_workers)
        self._plan = (plan, workers, drop)

    def begin_after(self, num_samples: int) -> None:
        """Give the first sample of each iteration the seed of the one that follows `num_samples` others."""
        self.index_side.begin_after(num_samples)

    def release_workers(self) -> None:
        """Let the workers obey a termination signal again, because they are no longer needed."""
        self._close_rings()

    def _close_rings(self) -> list[int]:
        rings = [*self._rings_aside, *([] if self._ring is None else [self._ring])]
        return [process_id for ring in rings for process_id in ring.close()]

    def close_workers(self, *, timeout_seconds: float = 0.5) -> None:
        """End the remaining workers. A worker that doesn't exit in time when requested to is killed."""
        end_children(self._close_rings(), timeout_seconds=timeout_seconds)
