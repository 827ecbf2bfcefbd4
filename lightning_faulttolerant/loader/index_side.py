"""The main process's side of a loader: it passes the index sampler through, and reports and resumes its position.

A sampler's order follows from the random states at its start. They are recorded when an epoch's iteration begins. To
resume, they are restored, the sampler is started again, and its first batches are skipped by index alone. Batches that
were handed out to workers but not consumed are kept unchanged and handed out again.

The iterator over a sampler that a loader draws from: it passes the sampler's batches on, and counts them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.draws import (
    DrawLog,
    draws_only_at_its_start,
    generators_of,
    order_follows_from_start,
)
from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators
from lightning_faulttolerant.loader.index_digest import START, updated
from lightning_faulttolerant.loader.index_record import IndexPlan, IndexRecord, RandomStates
from lightning_faulttolerant.loader.index_replay import Replay
from lightning_faulttolerant.loader.objects import LoaderObjects, of_workers_in
from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.remaining_batches import GlobalOrder, RankShare, order_of, share_of
from lightning_faulttolerant.loader.samplers import epoch_in, epochs_of, is_interruptible, put_epochs
from lightning_faulttolerant.loader.streamed import StreamedEpochs
from lightning_faulttolerant.samplers.deal import RankPlace
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import rng_state, set_rng_state, torch_rng_state


class Side(Protocol):
    """The interface that an iterator draws through."""

    record: IndexRecord
    seeds: SampleSeeds | None
    rank_place: RankPlace
    num_before: int
    is_batched: bool

    @property
    def only_passes_on(self) -> bool:
        """Whether drawing the next batch needs no more than a call of the sampler."""

    def open(self, indices: Iterator[object] | None) -> Iterator[Any]:
        """Return the iterator to draw from. It is called right before the first index is drawn."""

    def draw(self, indices: Iterator[object]) -> Any:
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
        step = self._side.rank_place.num_replicas
        begin = self._side.num_before if record.deal is None else record.deal.begin
        place = begin + record.num_samples * step + self._side.rank_place.rank
        record.num_samples += len(batch) if self._side.is_batched else 1
        return seeds.of(batch, epoch=record.epoch, place=place, step=step)


_log = logging.getLogger(__name__)

SOLE_RANK = RankPlace(rank=0, num_replicas=1)


class IndexSide:
    """Sits between torch's iterators and the index sampler of a loader.

    That is its ``batch_sampler``, or its ``sampler`` without batching. Both attributes keep the user's objects.

    Args:
        sampler: The loader's sampler. Every attribute is looked up on it.
        held: Generators that the sampler may draw from besides the global ones.
        exactness: Collects what is not exact.
        rank_place: This rank, among those that share the samples.
        window: How many of the batches last handed out are kept.
        has_workers: Whether the loader has workers. They start from the random states of their creation.
        is_endless: Whether the sampler is torch's for an iterable data set, which yields no indices.
        seeds: The source of the seeds, if each sample is seeded.
        is_batched: Whether an index batch holds the indices of several samples.
        streamed: Describes how the samples of a streaming data set are distributed to ranks.
        objects: Tracks what iterating changes on the loader's objects.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        held: HeldGenerators,
        exactness: Exactness,
        rank_place: RankPlace = SOLE_RANK,
        window: int,
        has_workers: bool = True,
        is_endless: bool = False,
        seeds: SampleSeeds | None = None,
        is_batched: bool = True,
        streamed: StreamedEpochs | None = None,
        objects: LoaderObjects | None = None,
    ) -> None:
        self._objects = objects
        self.seeds = seeds
        self.streamed = streamed
        self.is_batched = is_batched
        self.rank_place = rank_place
        self.num_before = 0
        """The number of samples that other ranks have consumed before this sampler's first one."""
        self._parked: RandomStates | None = None
        self._sampler = sampler
        self._held = held
        self._window = window
        self._has_workers = has_workers
        self.is_endless = is_endless
        self.may_draw = not is_endless and not draws_only_at_its_start(sampler)
        self._is_digested = not is_endless and not order_follows_from_start(sampler)
        self._plan: IndexPlan | None = None
        self._birth: RandomStates | None = None
        self._is_aside = False
        self._is_begun = self._is_first_due = False
        self._iterator: IndexIterator | None = None
        self.record = IndexRecord()
        self._exactness = exactness

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    @property
    def only_passes_on(self) -> bool:
        """Whether drawing the next batch needs no more than a call of the sampler."""
        return not self.may_draw and not self._is_first_due and self._parked is None

    @property
    def own_sampler(self) -> Any:
        """The loader's sampler."""
        return self._sampler

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # a sampler without a length raises the TypeError expected

    def current_share(self) -> RankShare | None:
        """Return how the samples are distributed to this rank, or ``None`` if that is not known."""
        if self.streamed is not None:
            return self.streamed.share(rank=self.rank_place.rank, num_ranks=self.rank_place.num_replicas)
        return share_of(self._sampler, rank=self.rank_place.rank, num_ranks=self.rank_place.num_replicas)

    def begin_after(self, num_samples: int) -> None:
        """Count the samples of each iteration from `num_samples` on, which other ranks have consumed before."""
        self.num_before = num_samples

    def begin(
        self, plan: IndexPlan | None, *, new_workers: bool, epoch: int = 0, has_other_workers: bool = False
    ) -> None:
        """Prepare the next iteration.

        Args:
            plan: The position to resume it at.
            new_workers: Whether its workers are created for it.
            epoch: The number of earlier iterations, if each sample is seeded.
            has_other_workers: Whether the run had another number of workers before a resume.
        """
        self._plan = plan
        if new_workers:
            self._birth = None
        self._is_begun = True
        self._is_first_due = False
        self._iterator = None
        self.record = IndexRecord(
            first_batch=0 if plan is None else plan.position,
            recent=deque(maxlen=self._window),
            digests=deque([START] if self._is_digested else [], maxlen=self._window + 1),
            share=self.current_share(),
            epoch=epoch,
            has_other_workers=has_other_workers,
        )

    @contextlib.contextmanager
    def opened_before(self) -> Iterator[None]:
        """Start the sampler and draw its first batch now. torch's draws inside the block don't advance the generators.

        The order then doesn't depend on when torch draws, which differs with the number of workers.
        """
        self._iterator = IndexIterator(self, None)
        self._iterator.open()
        if self.record.handed_out == 0:
            self._iterator.draw_ahead()
        self._parked = self.moment()
        try:
            yield
        finally:
            self.restore(self._parked)
            self._parked = None

    def __iter__(self) -> Iterator[Any]:
        if self._is_aside:
            return iter(self._sampler)
        if self._parked is not None:
            assert self._iterator is not None
            return self._iterator
        if not self._is_begun:
            raise NotExactError(
                "A DataLoader subclass calls DataLoader.__iter__(self) itself, so its iterations can't be followed. "
                "Let it call super().__iter__()."
            )
        # torch starts the sampler twice when it creates workers: the first call marks the workers' birth, the last one
        # starts the iterator that is used.
        # With a plan, take the whole moment: the birth of the new workers replaces the states found here for a while.
        now = self._start_moment() if self._plan is None else self.moment()
        if self._birth is None and self._has_workers:
            self._birth = replace(self.moment(), objects=self._objects_of_workers(now))
            if self._plan is not None and self._plan.birth is not None:
                self._birth = self._plan.birth
                self._go_back_to(self._birth)
        self.record.birth = self._birth
        if self._plan is None or self.record.start is None:
            self.record.start = now
        self._iterator = IndexIterator(self, self._started())
        return self._iterator

    def _started(self) -> Iterator[Any]:
        if self._plan is not None and not self.may_draw:
            return iter(())  # `open` starts the sampler again; a list of millions of indices is not built twice
        return iter(self._sampler)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let an iterator created in this block draw from the sampler directly, without being recorded."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def ensure_open(self) -> None:
        """Bring the iterator to its position now, not when the first index is drawn."""
        self._is_begun = False
        if self._iterator is not None:
            self._iterator.open()

    def moment(self) -> RandomStates:
        """Return the current random states."""
        return RandomStates(rng=rng_state(), held=self._held.state_dict(), sampler_epochs=self._epochs())

    def _start_moment(self, before: RandomStates | None = None) -> RandomStates:
        """Return those current states that the sampler may draw from when it starts.

        Args:
            before: An earlier moment. Only torch's own code ran since then, and it changes no objects.
        """
        objects = self._objects.of_start() if self._objects is not None and before is None else {}
        objects = objects if before is None else dict(before.objects)
        if self.may_draw:
            return replace(self.moment(), objects=objects)
        # torch's own samplers draw from torch's generator or from one passed to them.
        held = self._held.state_dict(of=generators_of(self._sampler))
        return RandomStates(rng=torch_rng_state(), held=held, sampler_epochs=self._epochs(), objects=objects)

    def _objects_of_workers(self, now: RandomStates) -> Mapping[str, Any]:
        """Return the changes on the objects that workers copy. `now` may contain them already."""
        if self._objects is None:
            return {}
        return self._objects.of_workers() if self._plan is not None or self.is_endless else of_workers_in(now.objects)

    def _epochs(self) -> list[Any]:
        return epochs_of(self._samplers_with_epoch())

    def own_progress(self) -> list[Any]:
        """Return the positions that this package's samplers keep: the user may advance them."""
        return [s.progress_state() if is_interruptible(s) else None for s in self._samplers_with_epoch()]

    def load_own_progress(self, states: Sequence[object]) -> None:
        """Set this package's samplers to the positions that `own_progress` returned."""
        put_epochs(self._samplers_with_epoch(), states)

    def open(self, indices: Iterator[object] | None) -> Iterator[Any]:
        """Return the iterator to draw from. It is called right before the first index is drawn."""
        plan, self._plan = self._plan, None
        if plan is not None and plan.deal is not None:
            return self._open_dealt(plan)
        opened = self._open(indices, plan)
        self.record.order = plan.order if plan is not None and plan.order is not None else self._order()
        return opened

    def _open_dealt(self, plan: IndexPlan) -> Iterator[Any]:
        record, deal = self.record, plan.deal
        assert deal is not None
        record.start, record.first, record.deal, record.order = plan.start, plan.first, deal, deal.order
        record.handed_out, record.num_samples = plan.position, plan.num_samples
        return iter(self._sampler) if self.is_endless else deal.batches(skip=plan.position - deal.first_batch)

    def _order(self) -> GlobalOrder | None:
        record = self.record
        if record.share is None or record.first is None:
            return None
        if self.streamed is not None:
            return self.streamed.order()
        held = list(record.first.held.values())
        if generators_of(self._sampler) and not held:
            return None
        generator = held[0].partition(b"\n")[2] if held else record.first.rng["torch"]
        epoch = epoch_in(record.first.sampler_epochs)
        return order_of(self._sampler, epoch=epoch, generator=generator, is_own_generator=bool(held))

    def _open(self, indices: Iterator[object] | None, plan: IndexPlan | None) -> Iterator[Any]:
        record = self.record
        if indices is None and (plan is None or plan.start is None or plan.first is None):
            record.start = self._start_moment()
            indices = iter(self._sampler)
            plan = None
        if plan is None:
            assert indices is not None
            record.first = self._start_moment(None if self.may_draw else record.start)
            return indices
        if plan.start is None or plan.first is None:
            assert record.start is not None
            self._go_back_to(record.start)
            self._is_first_due = True  # its first draw comes later, under the states restored here
            return iter(self._sampler)
        record.start, record.first, record.log = plan.start, plan.first, DrawLog(plan.log)
        record.go_to(plan)
        self._go_back_to(plan.first)
        replay = Replay(self._sampler, plan)
        rest = None if self.may_draw or self.is_endless else replay.skipped()
        if rest is None:
            self._go_back_to(plan.start)
            indices = iter(self._sampler)
            self._go_back_to(plan.first)
            rest = indices if self.is_endless else self._run_through(replay, indices, plan)
        return rest

    def _run_through(self, replay: Replay, indices: Iterator[object], plan: IndexPlan) -> Iterator[Any]:
        rest = replay.run_through(indices, self._go_back_to)
        if not replay.is_same:
            self._differs(plan)
        elif replay.not_compared:
            _log.warning(
                "The batches in flight of %s were drawn again. Some of their contents can't be compared: %s.",
                type(self._sampler).__name__,
                ", ".join(sorted(replay.not_compared)),
            )
        return rest

    def draw(self, indices: Iterator[object]) -> Any:
        """Draw the next batch, and record the states in which the sampler drew random numbers for it."""
        parked = self._parked
        if self._is_first_due and parked is None:
            self._is_first_due = False
            self.record.first = self._start_moment()
            self.record.order = self.record.order or self._order()
        if parked is None and not self.may_draw:
            return next(indices)
        if parked is not None:
            aside = self.moment()
            self.restore(parked)
        before = self.moment().states()
        try:
            return next(indices)
        finally:
            moment = self.moment()
            after = moment.states()
            if parked is not None:
                self._parked = moment
                self.restore(aside)
            if self.may_draw:
                self.record.log.note(self.record.handed_out, before, after)
                if self.record.has_other_workers and self.record.handed_out and after != before:
                    self._depends_on_workers()

    def _depends_on_workers(self) -> None:
        message = (
            f"{type(self._sampler).__name__} draws random numbers in the middle of an epoch, and the number of "
            "workers has changed. With more workers, torch draws the indices earlier. The order of samples would "
            "belong to neither run. Resume with as many workers as before, let the sampler draw only in its __iter__, "
            "or give it its own generator and pass strict=False."
        )
        self._exactness.refuse(message)

    def _differs(self, plan: IndexPlan) -> None:
        inner = getattr(self._sampler, "sampler", None)
        name = type(self._sampler).__name__ + ("" if inner is None else f" over {type(inner).__name__}")
        message = (
            f"Started again from the same random states, {name} yields other indices than before batch "
            f"{plan.handed_out}. It keeps its own state, such as a counter in __iter__, or its data set or arguments "
            "changed. The order of samples would differ from the uninterrupted run. Give it `set_epoch`, or derive "
            "its order from a generator; or pass strict=False."
        )
        self._exactness.refuse(message)

    def restore(self, moment: RandomStates) -> list[str]:
        """Restore the random states of `moment`; return the paths of generators that are missing."""
        set_rng_state(moment.rng)
        missing = self._held.load_state_dict(moment.held) if moment.held else []
        put_epochs(self._samplers_with_epoch(), moment.sampler_epochs)
        return missing

    def _go_back_to(self, moment: RandomStates) -> None:
        """Restore all the states of a process that is gone."""
        missing = self.restore(moment)
        if self._objects is not None:
            missing += self._objects.load(moment.objects)
        if missing:
            reason = f"The order of samples begins again: {lacks_generators(missing)}"
            self._exactness.refuse(reason)

    def _samplers_with_epoch(self) -> list[Any]:
        chain = (self._sampler, getattr(self._sampler, "sampler", None))
        return [s for s in chain if callable(getattr(s, "set_epoch", None))]
