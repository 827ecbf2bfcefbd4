"""A copy of a user's ``DataLoader`` that can return its position as a state, and continue from there.

The copy is an instance of the user's class. It shares the data set and the samplers. The user's loader stays unchanged.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.data_sets import ForeignEpochs, StreamedEpochs
from lightning_faulttolerant.loader.exactness import (
    TRACKER,
    Exactness,
    begin_plainly,
    forget_own_position,
    stateful_dataset,
    tracked_class,
)
from lightning_faulttolerant.loader.index_record import IndexPlan, birth_plan, plan_from_state, record_state
from lightning_faulttolerant.loader.index_side import SOLE_RANK, IndexSide
from lightning_faulttolerant.loader.iterable import IterableSide, between
from lightning_faulttolerant.loader.iteration import (
    CountedBatches,
    Iteration,
    IterationOwner,
    TrackedWorkers,
)
from lightning_faulttolerant.loader.objects import LoaderObjects
from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.remaining import RemainingBatches
from lightning_faulttolerant.loader.resized import DEAL, SeededSamples, planned, with_other_workers
from lightning_faulttolerant.loader.samplers import index_sampler, state_of
from lightning_faulttolerant.loader.worker_side import GuardedSamples, WorkerSide, WorkerState
from lightning_faulttolerant.samplers.order import RankPlace
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.walk import users_variables

_SLACK_BYTES = 262_144  # for generators that a data set creates only on first use
_HELD = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resumed:
    """The position that the next iteration continues from.

    ``state`` is what was loaded. ``plan`` is for the index sampler, ``worker_states`` are for the workers, and ``drop``
    is the number of batches that are drawn again and dropped.
    """

    state: dict[str, Any]
    plan: IndexPlan | None = None
    worker_states: list[WorkerState] | None = None
    drop: int = 0


@dataclass(kw_only=True, slots=True)
class _Next:
    """What is known of the next iteration.

    It continues from ``resumed``. ``is_asked`` says whether it was requested: it begins when its iterator is created.
    ``is_taken`` says whether other code has taken the persistent workers away, and ``has_other_workers`` whether the
    run had a different number of workers before a resume.
    """

    resumed: _Resumed | None = None
    is_asked: bool = False
    is_taken: bool = False
    has_other_workers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _StandIns:
    """What stands in for parts of the loader on the copy that is followed, or keeps their state.

    ``seeded`` seeds each sample, and ``guarded`` counts samples that can't be loaded. ``dataset`` is the data set in
    this process, if that keeps a state. ``collate`` is the loader's ``collate_fn``, with what ``iterable`` adds to it.
    """

    seeded: SeededSamples | None
    guarded: GuardedSamples | None
    iterable: IterableSide | None
    dataset: Any
    collate: Callable[[Any], Any]

    @classmethod
    def of(
        cls, loader: DataLoader[object], *, seeds: SampleSeeds | None, exactness: Exactness, is_guarded: bool
    ) -> _StandIns:
        """Return what stands in for the parts of `loader`."""
        iterable = IterableSide(loader.dataset, exactness) if isinstance(loader.dataset, IterableDataset) else None
        can_be_guarded = loader.num_workers > 0 and iterable is None and seeds is None
        return cls(
            seeded=None if seeds is None else SeededSamples(loader, seeds),
            guarded=GuardedSamples(loader.dataset) if is_guarded and can_be_guarded else None,
            iterable=iterable,
            dataset=None if loader.num_workers else stateful_dataset(loader),
            collate=loader.collate_fn if iterable is None else functools.partial(iterable.collate, loader.collate_fn),
        )


class _DatasetEpochs:
    """The epochs that streaming data sets count themselves: those of this package, and those of other libraries."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.streamed, self.foreign = StreamedEpochs(loader), ForeignEpochs(loader)

    def begin(self) -> None:
        """Note that an iteration begins."""
        self.streamed.begin()
        self.foreign.begin()

    def take_back(self) -> None:
        """Take back the request of an iteration that doesn't begin."""
        self.streamed.take_back()
        self.foreign.take_back()

    def state_dict(self, *, in_iteration: bool) -> dict[str, object]:
        """Return the epochs, and whether their samples are dealt to ranks by this package."""
        return {
            "streams": self.streamed.state_dict(in_iteration=in_iteration),
            "is_dealt": self.streamed.is_dealt,
            "foreign": self.foreign.state_dict(in_iteration=in_iteration),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin in these epochs."""
        self.streamed.load_state_dict(state_dict.get("streams", ()))
        self.foreign.load_state_dict(state_dict.get("foreign", {}))


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
        is_guarded: Whether workers count a batch that can't be loaded. The error is raised as before.
    """

    def __init__(
        self,
        loader: DataLoader[object],
        *,
        exactness: Exactness | None = None,
        owner: IterationOwner | None = None,
        rank_place: RankPlace = SOLE_RANK,
        default_worker_init: Callable[[int], None] | None = None,
        seeds: SampleSeeds | None = None,
        known: LoaderObjects | None = None,
        is_guarded: bool = False,
    ) -> None:
        self.user_loader = loader
        self._next = _Next()
        self.exactness = Exactness() if exactness is None else exactness
        self.owner = IterationOwner() if owner is None else owner
        self.iteration: Iteration | None = None
        """The current run over the loader."""
        parts = {name: getattr(loader, name, None) for name in _HELD}
        self.held = HeldGenerators({**parts, **users_variables(parts)})
        self._epochs = _DatasetEpochs(loader)
        self.objects = LoaderObjects(loader, known=known)
        is_iterable, num_workers = isinstance(loader.dataset, IterableDataset), loader.num_workers
        in_flight = (loader.prefetch_factor or 0) * num_workers
        self.index_side = IndexSide(
            index_sampler(loader),
            held=self.held,
            exactness=self.exactness,
            rank_place=rank_place,
            window=0 if is_iterable else in_flight + num_workers + 2,
            has_workers=num_workers > 0,
            is_endless=is_iterable,
            seeds=seeds,
            is_batched=loader.batch_sampler is not None,
            streamed=self._epochs.streamed if self._epochs.streamed.is_dealt else None,
            objects=self.objects,
        )
        self._parts = _StandIns.of(loader, seeds=seeds, exactness=self.exactness, is_guarded=is_guarded)
        self._workers = self._tracked_workers(default_worker_init) if num_workers else None
        self._loader: weakref.ref[DataLoader[object]] | None = None

    def _tracked_workers(self, default_init: Callable[[int], None] | None) -> TrackedWorkers:
        loader, parts, is_iterable = self.user_loader, self._parts, self.iterable is not None
        side = WorkerSide(
            loader,
            collate_fn=parts.collate,
            default_init=default_init,
            exactness=self.exactness,
            iterable=parts.iterable,
            per_sample=None if parts.seeded is None else parts.seeded.dataset,
            guarded=parts.guarded,
        )
        state_bytes = side.state_bytes(loader.dataset) + _SLACK_BYTES * (4 if is_iterable else 1)
        slot_bytes = 1 if parts.seeded else state_bytes
        return TrackedWorkers(side, num_workers=loader.num_workers, slot_bytes=slot_bytes, is_iterable=is_iterable)

    @property
    def num_workers(self) -> int:
        """The number of processes that load the batches."""
        return 0 if self._workers is None else self._workers.num_workers

    @property
    def iterable(self) -> IterableSide | None:
        """The stand-in for an iterable data set."""
        return self._parts.iterable

    @property
    def loader(self) -> DataLoader[object]:
        """The followed copy. The copy refers to this object, not the reverse, so no cycle keeps workers alive."""
        loader = self._loader() if self._loader is not None else None
        if loader is None:
            raise ReferenceError("the loader that was followed no longer exists")
        return loader

    @property
    def is_gone(self) -> bool:
        """Whether the copy that is followed no longer exists."""
        return self._loader is None or self._loader() is None

    def is_kept_for(self, loader: DataLoader[object]) -> bool:
        """Return whether the followed copy of `loader` still exists and has persistent workers."""
        return self.user_loader is loader and not self.is_gone and loader.persistent_workers

    def copy_of(self, loader: DataLoader[object]) -> DataLoader[object]:
        """Return the copy of the user's `loader` that is followed."""
        tracked = copy.copy(loader)
        tracked.__class__ = tracked_class(type(loader))  # type: ignore[arg-type]  # mypy says it is not Hashable
        vars(tracked)[TRACKER] = self
        if self.iterable is not None:
            vars(tracked)["dataset"] = self.iterable
            tracked.collate_fn = self._parts.collate
        if self._workers is not None:
            tracked.collate_fn = self._workers.side.collate
            tracked.worker_init_fn = self._workers.side.init
        forget_own_position(tracked)
        self._loader = weakref.ref(tracked)
        self._epochs.foreign.follow(tracked)
        return tracked

    @property
    def deal(self) -> RemainingBatches | None:
        """How the rest of an epoch that other ranks or workers began is dealt to this rank, until that rest begins."""
        plan = None if self._next.resumed is None else self._next.resumed.plan
        return None if plan is None else plan.deal

    @property
    def can_be_resized(self) -> bool:
        """Whether a different number of workers or ranks can continue in this order."""
        return self.iterable is None or self._epochs.streamed.is_dealt

    @property
    def num_handed_out(self) -> int:
        """The number of index batches drawn so far in the current iteration."""
        return self.index_side.record.handed_out

    @property
    def _has_living_workers(self) -> bool:
        return self.loader.persistent_workers and getattr(self.loader, "_iterator", None) is not None

    def ask(self) -> None:
        """Note that an iteration was requested. It begins when its iterator is created."""
        if not self._next.is_asked and self.owner.is_followed():
            self._next.is_asked = True
            self._epochs.streamed.continue_epochs()

    def iterate(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Create torch's iterator for a new iteration, at the position that `load_state_dict` set.

        Resuming leaves the random generators of this process unchanged.
        """
        if not (self._next.is_asked or self.owner.is_followed()):
            return self._iterate_aside(make_iterator)
        if self.owner.is_held_back():
            self._next.is_asked = False
            self._epochs.take_back()
            return iter(())
        resumed, self._next.resumed = self._next.resumed, None
        self._next.is_asked = self._next.is_taken = False
        plan, drop = (None, 0) if resumed is None else (resumed.plan, resumed.drop)
        if self._parts.dataset is not None and resumed is not None and resumed.state.get("dataset") is not None:
            self._parts.dataset.load_state_dict(resumed.state["dataset"])
        self._begin(resumed)
        with self.objects.put_back(*(() if plan is None else plan.objects)):
            return self._iterated(make_iterator, plan, drop)

    def _iterated(
        self, make_iterator: Callable[[], Iterator[object]], plan: IndexPlan | None, drop: int
    ) -> Iterator[object]:
        before = self.index_side.states.now() if plan is not None and plan.start is not None else None
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
                self._epochs.streamed.note_dropped()
            self.index_side.states.restore(before)
        return batches

    def _made(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        if self._parts.guarded is not None:
            with self._parts.guarded.stand_in(self.loader):
                return make_iterator()
        if self._parts.seeded is None:
            return make_iterator()
        return self._parts.seeded.make(self.loader, self.index_side, make_iterator)

    def _started(self) -> Iteration:
        record = self.index_side.record
        self.iteration = Iteration(
            record=record,
            workers=None if self._workers is None else self._workers.current,
            num_out=record.first_batch,
            iterable=None if self.iterable is None else self.iterable.record,
            dataset=self._parts.dataset,
        )
        return self.iteration

    def _iterate_aside(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Create an iterator for other code, next to the iteration that is followed."""
        if self.loader.persistent_workers and self.num_workers:
            # There is one set of workers. torch takes it away from the iteration that uses it.
            self._next.is_taken = True
            self._begin(None)
            return self._made(make_iterator)
        with self.index_side.aside():
            if self._workers is None:
                return make_iterator()
            with self._workers.aside(self.loader):
                return make_iterator()

    def _begin(self, resumed: _Resumed | None) -> None:
        plan = None if resumed is None else resumed.plan
        if self._workers is not None:
            current = self._workers.current
            if current is not None and self._has_living_workers:
                self._workers.begin_again(current, self.index_side.record)
            else:
                self._workers.begin(self.loader, None if resumed is None else resumed.worker_states)
        self._epochs.begin()
        if self.iterable is not None and not self.num_workers:
            record = self.iterable.begin(None if resumed is None else resumed.state["iterable"]["position"])
            record.num_batches = 0 if plan is None else plan.position
        epoch = 0
        if self._parts.seeded is not None:
            epoch = self._parts.seeded.begin(is_resumed=plan is not None or self._next.is_taken)
            self._next.has_other_workers = self._parts.seeded.has_other_workers
        new_workers, had_others = not self._has_living_workers, self._next.has_other_workers
        self.index_side.begin(plan, new_workers=new_workers, epoch=epoch, has_other_workers=had_others)

    def state_dict(self, consumed: int | None, iteration: Iteration | None = None) -> dict[str, object]:
        """Return the position.

        Args:
            consumed: The number of consumed batches of the iteration; ``None`` between iterations.
            iteration: The iteration; the current one by default.

        Raises:
            NotExactError: If a worker's state at that position is missing.
        """
        if self._next.resumed is not None:  # and not iterated since: the position is unchanged
            return copy.deepcopy(self._next.resumed.state)
        in_iteration = consumed is not None and self.iteration is not None and not self._next.is_asked
        epochs = self._epochs.state_dict(in_iteration=in_iteration)
        more = {"samplers": self.index_side.states.own_progress(), "memory": self.objects.of_memory()}
        return {**self._state(consumed, iteration), **epochs, **more}

    def _state(self, consumed: int | None, iteration: Iteration | None) -> dict[str, object]:
        if iteration is None:
            iteration = self.iteration
        if iteration is None or consumed is None or self._next.is_asked:
            return self._state_between(iteration)
        if self._next.is_taken:
            raise NotExactError(
                "Other code has iterated over the training loader in the middle of its epoch, and has taken its "
                "persistent workers away from the training. Give a callback its own loader."
            )
        record = iteration.record
        if self._parts.seeded is not None:
            return self._parts.seeded.state_dict(record, consumed)
        workers, drop = None, 0
        if self._workers is not None and iteration.workers is not None:
            counts, drop = self._workers.at(iteration.workers, consumed - record.first_batch)
            workers = None if iteration.workers.starts_fresh(counts) else iteration.workers.states(counts)
        state = {"consumed": consumed, "drop": drop, "record": record_state(record), "workers": workers}
        state["num_workers"] = self.num_workers
        if self._parts.dataset is not None:
            state["dataset"] = iteration.dataset_state_after(consumed)
        if self.iterable is not None:
            held = None if self.num_workers else iteration.iterable
            position = None if held is None else self.iterable.position_after(held, consumed)
            state["iterable"] = {"epoch": self.iterable.user_epoch, "position": position}
        return state

    def _state_between(self, iteration: Iteration | None) -> dict[str, Any]:
        if self._parts.seeded is not None:
            return self._parts.seeded.state_dict()
        workers, current = None, None if self._workers is None else self._workers.current
        begun = None if iteration is None else iteration.workers
        if self._workers is not None and current is not None and begun is not None and self._has_living_workers:
            workers = begun.states(self._workers.num_fetched(current, self.index_side.record))
        kept = record_state(self.index_side.record) if workers is not None else None
        state = {"consumed": None, "drop": 0, "record": kept, "workers": workers, "num_workers": self.num_workers}
        if self._parts.dataset is not None:
            state["dataset"] = state_of(self._parts.dataset)
        if self.iterable is not None:
            state["workers"] = workers and [{**w, "iterable": between(w["iterable"])} for w in workers]
            state["iterable"] = {"epoch": self.iterable.user_epoch, "position": self.iterable.between()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a position of `state_dict`."""
        if self._parts.seeded is not None:
            self._parts.seeded.load_state_dict(state_dict)
        had_workers = state_dict.get("num_workers", self.num_workers)
        if had_workers != self.num_workers and self.can_be_resized:
            state_dict = with_other_workers(state_dict, self.loader, rank=self.index_side.rank_place.rank)
            self._next.has_other_workers = True
        resumed = self._next.resumed = _Resumed(state=copy.deepcopy(dict(state_dict)))
        self.index_side.states.load_own_progress(state_dict.get("samplers", ()))
        record, workers, consumed = state_dict["record"], state_dict["workers"], state_dict["consumed"]
        self._epochs.load_state_dict(state_dict)
        self.objects.owe_memory(state_dict.get("memory", {}))
        if self.iterable is not None:
            self.iterable.go_to_epoch(state_dict["iterable"]["epoch"])
        if self.loader.persistent_workers:
            vars(self.loader)["_iterator"] = None
        if record is None and DEAL not in state_dict:
            return
        if DEAL in state_dict:
            self._next.resumed = replace(resumed, plan=planned(state_dict[DEAL], self.index_side, self.loader))
        elif consumed is None:
            self._next.resumed = replace(resumed, plan=birth_plan(record), worker_states=workers)
        elif self._parts.seeded is not None:
            self._next.resumed = replace(resumed, plan=self._parts.seeded.plan(record, consumed))
        else:
            drop = state_dict["drop"]
            plan = plan_from_state(record, consumed - drop, draws_again=not self.num_workers and not had_workers)
            self._next.resumed = replace(resumed, plan=plan, worker_states=workers, drop=drop)

    def end_resumed(self) -> None:
        """End the iteration that was resumed, if no batch of it was left: a generator of the user's has not begun."""
        resumed = self._next.resumed
        if resumed is not None and resumed.state.get("consumed") is not None and self._next.is_asked:
            begin_plainly(self.loader)
        if self.iterable is not None and not self.num_workers:
            self.iterable.end_resumed()

    def begin_after(self, num_samples: int) -> None:
        """Give the first sample of each iteration the seed of the one that follows `num_samples` others."""
        if self.index_side.seeding is not None:
            self.index_side.seeding.begin_after(num_samples)

    def release_workers(self) -> None:
        """Let the workers obey a termination signal again, because they are no longer needed."""
        if self._workers is not None:
            self._workers.release()

    def close_workers(self, *, timeout_seconds: float = 0.5) -> None:
        """End the remaining workers. A worker that doesn't exit in time when requested to is killed."""
        if self._workers is not None:
            self._workers.close(timeout_seconds=timeout_seconds)
