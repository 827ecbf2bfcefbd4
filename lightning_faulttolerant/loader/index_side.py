"""The main process's side of a loader: it passes the index sampler through, and reports and resumes its position.

A sampler's order follows from the random states at its start. They are recorded when an epoch's iteration begins. To
resume, they are restored, the sampler is started again, and its first batches are skipped by index alone. Batches that
were handed out to workers but not consumed are kept unchanged and handed out again.

The iterator over a sampler that a loader draws from: it passes the sampler's batches on, and counts them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.data_sets import StreamedEpochs
from lightning_faulttolerant.loader.digests import START, updated
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.index_record import IndexPlan, IndexRecord, RandomStates, states_now
from lightning_faulttolerant.loader.objects import LoaderObjects
from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.remaining import (
    GlobalOrder,
    RankShare,
    RemainingBatches,
    order_of,
    share_of,
)
from lightning_faulttolerant.loader.sampler_states import Replay, SamplerStates
from lightning_faulttolerant.loader.samplers import DrawLog, epoch_in, generators_of, order_follows_from_start
from lightning_faulttolerant.samplers.order import RankPlace
from lightning_faulttolerant.state.generators import HeldGenerators

_log = logging.getLogger(__name__)

SOLE_RANK = RankPlace(rank=0, num_replicas=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """The sampler's iterator, and the moment when it was started."""

    indices: Iterator[object]
    moment: RandomStates


class IndexIterator(Iterator[object]):
    """Passes on the sampler's batches, and counts them.

    Args:
        side: The side that it draws through.
        started: The iterator to draw from; ``None`` if it is to be started when it is opened.
    """

    def __init__(self, side: IndexSide, started: _Started | None) -> None:
        self._side = side
        self._record = side.record
        self._started = started
        self._is_open = False
        self._ahead: deque[object] = deque()
        self._draw: Callable[[], object]
        """Draws the next batch, once it is open."""
        self._passes_on = self._only_counts = False

    def open(self) -> None:
        """Bring the sampler to its position, once."""
        if not self._is_open:
            indices = self._side.open(self._started)
            self._is_open = True
            # Seeded samplers may be drawn from while their states are parked: the side notes the last draw, too.
            self._passes_on = self._side.seeding is None and self._side.only_passes_on
            self._draw = indices.__next__ if self._passes_on else functools.partial(self._side.draw, indices)

    def draw_ahead(self) -> None:
        """Draw the next batch now, if one exists. It is handed out when it is requested."""
        with contextlib.suppress(StopIteration):
            self._ahead.append(self._draw())

    def __next__(self) -> object:
        if self._only_counts:
            batch, record = self._draw(), self._record
            record.handed_out += 1
            record.recent.append(batch)
            return batch
        batch = self._next()
        self._only_counts = self._passes_on and not self._ahead and not self._record.digests
        return batch

    def _next(self) -> object:
        if not self._is_open:
            self.open()
        record, seeding = self._record, self._side.seeding
        batch = self._ahead.popleft() if self._ahead else self._draw()
        record.handed_out += 1
        record.recent.append(batch)
        if digests := record.digests:
            digests.append(updated(digests[-1], batch, record.not_compared))
        return batch if seeding is None else seeding.of(batch, record)


class SampleSeeding:
    """Gives each sample of the index batches its seed, by its place in the order of all ranks.

    Args:
        seeds: The source of the seeds.
        rank_place: This rank, among those that share the samples.
        is_batched: Whether an index batch holds the indices of several samples.
    """

    def __init__(self, seeds: SampleSeeds, rank_place: RankPlace, *, is_batched: bool) -> None:
        self._seeds = seeds
        self._rank_place = rank_place
        self._is_batched = is_batched
        self._num_before = 0

    def begin_after(self, num_samples: int) -> None:
        """Count the samples of each iteration from `num_samples` on, which other ranks have consumed before."""
        self._num_before = num_samples

    def of(self, batch: Any, record: IndexRecord) -> object:
        """Return the next batch of an iteration with its seed, and count its samples."""
        step, begin = self._rank_place.num_replicas, self._num_before if record.deal is None else record.deal.begin
        place = begin + record.num_samples * step + self._rank_place.rank
        record.num_samples += len(batch) if self._is_batched else 1
        return self._seeds.of(batch, epoch=record.epoch, place=place, step=step)


@dataclass(kw_only=True, slots=True)
class _Parked:
    """The states of a sampler while torch draws: it was opened before, and torch's draws don't advance it."""

    iterator: IndexIterator
    moment: RandomStates


@dataclass(kw_only=True, slots=True)
class _Begun:
    """What the side knows of the iteration in progress, besides its record.

    ``plan`` is the position to resume it at, until it is opened. ``may_start`` says whether torch may start the sampler
    for it. ``is_first_due`` says whether the moment of its first draw is still to be recorded.
    """

    plan: IndexPlan | None = None
    iterator: IndexIterator | None = None
    may_start: bool = True
    is_first_due: bool = False


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
        sampler: Iterable[object],
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
        self._sampler = sampler
        self._exactness = exactness
        self.rank_place = rank_place
        self.streamed = streamed
        self.seeding = None if seeds is None else SampleSeeding(seeds, rank_place, is_batched=is_batched)
        self.states = SamplerStates(sampler, held=held, exactness=exactness, is_endless=is_endless, objects=objects)
        self._window = window
        self._has_workers = has_workers
        self._is_endless = is_endless
        self._is_digested = not is_endless and not order_follows_from_start(sampler)
        self._birth: RandomStates | None = None
        self._parked: _Parked | None = None
        self._is_aside = False
        self._begun = _Begun(may_start=False)
        self.record = IndexRecord()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    @property
    def only_passes_on(self) -> bool:
        """Whether drawing the next batch needs no more than a call of the sampler."""
        return not self.states.may_draw and not self._begun.is_first_due and self._parked is None

    @property
    def own_sampler(self) -> object:
        """The loader's sampler."""
        return self._sampler

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # a sampler without a length raises the TypeError expected

    def current_share(self) -> RankShare | None:
        """Return how the samples are distributed to this rank, or ``None`` if that is not known."""
        if self.streamed is not None:
            return self.streamed.share(rank=self.rank_place.rank, num_ranks=self.rank_place.num_replicas)
        return share_of(self._sampler, rank=self.rank_place.rank, num_ranks=self.rank_place.num_replicas)

    def begin(
        self, plan: IndexPlan | None, *, new_workers: bool, epoch: int = 0, has_other_workers: bool = False
    ) -> None:
        """Prepare the next iteration.

        Args:
            plan: The position to resume it at.
            new_workers: Whether its workers are created for it.
            epoch: The number of earlier iterations, if each sample is seeded.
            has_other_workers: Whether the run had a different number of workers before a resume.
        """
        if new_workers:
            self._birth = None
        self._begun = _Begun(plan=plan)
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
        iterator = self._begun.iterator = IndexIterator(self, None)
        iterator.open()
        if self.record.handed_out == 0:
            iterator.draw_ahead()
        parked = self._parked = _Parked(iterator=iterator, moment=self.states.now())
        try:
            yield
        finally:
            self.states.restore(parked.moment)
            self._parked = None

    def __iter__(self) -> Iterator[object]:
        if self._is_aside:
            return iter(self._sampler)
        if self._parked is not None:
            return self._parked.iterator
        if not self._begun.may_start:
            raise NotExactError(
                "A DataLoader subclass calls DataLoader.__iter__(self) itself, so its iterations can't be followed. "
                "Let it call super().__iter__()."
            )
        # torch starts the sampler twice when it creates workers: the first call marks the workers' birth, the last one
        # starts the iterator that is used.
        # With a plan, take the whole moment: the birth of the new workers replaces the states found here for a while.
        plan, states, record = self._begun.plan, self.states, self.record
        now = states.at_start() if plan is None else states.now()
        if self._birth is None and self._has_workers:
            self._birth = states.at_birth(now, is_resumed=plan is not None)
            if plan is not None and plan.birth is not None:
                self._birth = plan.birth
                states.go_back_to(self._birth)
        record.birth = self._birth
        start = record.start = now if plan is None or record.start is None else record.start
        self._begun.iterator = IndexIterator(self, _Started(indices=self._started(plan), moment=start))
        return self._begun.iterator

    def _started(self, plan: IndexPlan | None) -> Iterator[object]:
        if plan is not None and not self.states.may_draw:
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
        self._begun.may_start = False
        if self._begun.iterator is not None:
            self._begun.iterator.open()

    def open(self, started: _Started | None) -> Iterator[object]:
        """Return the iterator to draw from. It is called right before the first index is drawn.

        Args:
            started: The iterator that was started before. Without it, one is started now.
        """
        plan, self._begun.plan = self._begun.plan, None
        if plan is not None and plan.deal is not None:
            return self._open_dealt(plan, plan.deal)
        opened = self._open(started, plan)
        self.record.order = plan.order if plan is not None and plan.order is not None else self._order()
        return opened

    def _open_dealt(self, plan: IndexPlan, deal: RemainingBatches) -> Iterator[object]:
        record = self.record
        record.start, record.first, record.deal, record.order = plan.start, plan.first, deal, deal.order
        record.handed_out, record.num_samples = plan.position, plan.num_samples
        return iter(self._sampler) if self._is_endless else deal.batches(skip=plan.position - deal.first_batch)

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

    def _open(self, started: _Started | None, plan: IndexPlan | None) -> Iterator[object]:
        record, states = self.record, self.states
        if plan is not None and plan.start is not None and plan.first is not None:
            return self._open_at(plan, start=plan.start, first=plan.first)
        if started is None:
            started, plan = _Started(moment=states.at_start(), indices=iter(self._sampler)), None
            record.start = started.moment
        if plan is None:
            record.first = states.at_start(None if states.may_draw else record.start)
            return started.indices
        if plan.start is not None:  # nothing was drawn yet, but a sampler may draw as it starts
            record.start = plan.start
        states.go_back_to(record.start or started.moment)
        self._begun.is_first_due = True  # its first draw comes later, under the states restored here
        return iter(self._sampler)

    def _open_at(self, plan: IndexPlan, *, start: RandomStates, first: RandomStates) -> Iterator[object]:
        record, states = self.record, self.states
        record.start, record.first, record.log = start, first, DrawLog(plan.log)
        record.go_to(plan)
        states.go_back_to(first)
        replay = Replay(self._sampler, plan)
        rest = None if states.may_draw or self._is_endless else replay.skipped()
        if rest is None:
            states.go_back_to(start)
            indices = iter(self._sampler)
            states.go_back_to(first)
            rest = indices if self._is_endless else self._run_through(replay, indices, plan)
        return rest

    def _run_through(self, replay: Replay, indices: Iterator[object], plan: IndexPlan) -> Iterator[object]:
        rest = replay.run_through(indices, self.states)
        if not replay.is_same:
            self._differs(plan)
        elif replay.not_compared:
            _log.warning(
                "The batches that %s had drawn ahead are drawn again. These contents can't be compared: %s.",
                type(self._sampler).__name__,
                ", ".join(sorted(replay.not_compared)),
            )
        return rest

    def draw(self, indices: Iterator[object]) -> object:
        """Draw the next batch, and record the states in which the sampler drew random numbers for it."""
        states = self.states
        if self._parked is not None:
            return self._draw_parked(indices, self._parked)
        if self._begun.is_first_due:
            self._begun.is_first_due = False
            self.record.first = states.at_start()
            self.record.order = self.record.order or self._order()
        if not states.may_draw:
            return next(indices)
        before = states_now(states.held)
        try:
            return next(indices)
        finally:
            after = states_now(states.held)
            if after is not before:
                self._note_draws(before, after)

    def _draw_parked(self, indices: Iterator[object], parked: _Parked) -> object:
        states = self.states
        aside = states.now()
        states.restore(parked.moment)
        before = states_now(states.held)
        try:
            return next(indices)
        finally:
            parked.moment = states.now()
            states.restore(aside)
            if states.may_draw:
                self._note_draws(before, parked.moment.states())

    def _note_draws(self, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
        if after == before:
            return
        record = self.record
        record.log.note(record.handed_out, before, after)
        if record.has_other_workers and record.handed_out:
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
