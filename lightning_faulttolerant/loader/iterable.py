"""An iterable data set that reports the position of its iteration, and can be brought back to it.

If the iterator or the data set has its own state, that state is used. Otherwise the iteration begins again from the
random states of its beginning, and the samples already drawn are drawn again and dropped, without collating them.

The state that its objects had when the iteration began is restored first. A data set that keeps a state elsewhere is
refused if the samples that are drawn again differ.

The samples of an iterable data set that are drawn again and dropped, with a digest of all of them.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.data_sets import refills_its_buffer
from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators
from lightning_faulttolerant.loader.index_record import RandomStates, moments_state, states_now
from lightning_faulttolerant.loader.objects import ATTRIBUTES, DatasetObjects
from lightning_faulttolerant.loader.samplers import DrawLog, has_state
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from lightning_faulttolerant.loader.worker_side import WorkerStates

_log = logging.getLogger(__name__)

_REPLAY, _ITERATOR, _DATASET = "replay", "iterator", "dataset"
_KEPT_POSITIONS = 4  # of the batches fetched, at most the last one is not trained yet
_OWN = frozenset({"user_dataset", "_exactness", "_held", "_plan", "_is_begun", "_worker_states", "_current",
                  "_way", "_objects", "_owed", "_unasked", "record"})  # fmt: skip

Position = dict[str, Any]


class _Mark(NamedTuple):
    """What a position consists of. There is one for each batch, so it only refers to values that don't change later."""

    way: str
    start: RandomStates | None
    first: RandomStates | None
    log: DrawLog
    num_noted: int
    num_samples: int
    digest: int
    has_ended: bool
    objects: Mapping[str, object] | None
    has_drawn: bool
    state: bytes | None

    def position(self) -> Position:
        """Return the position."""
        return {
            **moments_state(start=self.start, first=self.first),
            "way": self.way,
            "log": self.log.pack(self.num_noted),
            "samples": self.num_samples,
            "digest": self.digest,
            "ended": self.has_ended,
            "objects": self.objects,
            "drawn": self.has_drawn,
            "state": None if self.state is None else pickle.loads(self.state),
        }


@dataclass(kw_only=True, slots=True)
class IterableRecord:
    """The position of one iteration over an iterable data set.

    ``start`` is the moment when it began, ``first`` the moment right before its first sample was drawn. ``positions``
    holds the last positions, by the number of batches fetched. ``has_drawn`` says whether a sample was drawn in this
    iteration or an earlier one. ``objects`` holds the changes on its data set's objects when it began or ended.
    """

    way: str = _REPLAY
    start: RandomStates | None = None
    first: RandomStates | None = None
    log: DrawLog = field(default_factory=DrawLog)
    source: Any = None
    num_samples: int = 0
    num_batches: int = 0
    num_left: int = 0
    has_drawn: bool = False
    digest: int = 0
    has_ended: bool = False
    batch_begun: tuple[int, Mapping[str, bytes]] | None = None
    objects: Mapping[str, object] | None = None
    positions: deque[tuple[int, _Mark]] = field(default_factory=lambda: deque(maxlen=_KEPT_POSITIONS))

    def position(self) -> Position:
        """Return the position of the iteration."""
        return self._mark().position()

    def note_position(self) -> None:
        """Keep the position of the iteration for `position_after`."""
        self.positions.append((self.num_batches, self._mark()))

    def _mark(self) -> _Mark:
        content = (
            self.way,
            self.start,
            self.first,
            self.log,
            len(self.log.entries),
            self.num_samples,
            self.digest,
            self.has_ended,
            self.objects if self.has_ended or not self.num_samples else None,
            self.has_drawn,
            None if self.source is None else pickle.dumps(self.source.state_dict()),
        )
        return tuple.__new__(_Mark, content)  # `_Mark(...)` is one more function, for each batch

    def position_after(self, num_batches: int) -> Position:
        """Return the position of the iteration after `num_batches`.

        Raises:
            NotExactError: If the position is no longer known.
        """
        for count, mark in reversed(self.positions):
            if count == num_batches:
                position: Position = mark.position()
                return position
        raise NotExactError(
            f"The position of the iterable data set after {num_batches} batches is no longer known, because "
            f"{self.num_batches} have been fetched by now. Its samples could not continue exactly."
        )


@dataclass(slots=True)
class _Current:
    """The iteration that the samples of the batch in progress come from. To set it here costs no ``__setattr__``."""

    record: IterableRecord | None = None


class IterableSide(IterableDataset[Any]):
    """Stands in for an iterable data set on the loader that is followed.

    Args:
        dataset: The user's data set. Every attribute is looked up and set on it.
        exactness: Collects what is not exact.
    """

    def __init__(self, dataset: Any, exactness: Exactness) -> None:
        self.user_dataset = dataset
        self._exactness = exactness
        self._held = HeldGenerators({"dataset": dataset})
        self._objects = DatasetObjects(dataset)
        self._plan: Position | None = None
        self._is_begun = False
        self._worker_states: WorkerStates | None = None
        self._current = _Current()
        self._way: str | None = None
        self._owed: list[dict[str, object]] = []
        self._unasked: tuple[Position, IterableRecord, Mapping[str, object]] | None = None
        self.record = IterableRecord()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.user_dataset)

    def __getattr__(self, name: str) -> object:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.user_dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.user_dataset, name, value)

    def __len__(self) -> int:
        return len(self.user_dataset)

    def __reduce__(self) -> Any:
        return IterableSide, (self.user_dataset, self._exactness.of_worker())

    def begin(self, plan: Position | None) -> IterableRecord:
        """Prepare the next iteration in this process, resumed at `plan`."""
        self._plan, self._is_begun = plan, True
        self.record = IterableRecord(has_drawn=self.record.has_drawn)
        return self.record

    def begin_in_worker(self, plan: Position | None, worker: WorkerStates, exactness: Exactness) -> None:
        """Follow all iterations from now on.

        Args:
            plan: The position of the first of them.
            worker: Hears of each of them.
            exactness: The worker's collector of what is not exact.
        """
        self._plan, self._worker_states, self._exactness = plan, worker, exactness

    def __iter__(self) -> Iterator[object]:
        is_in_worker = self._worker_states is not None
        if not (self._is_begun or is_in_worker):
            return _Samples(self, iter(self.user_dataset), None)
        if is_in_worker:
            self.record = IterableRecord(has_drawn=self.record.has_drawn)
        plan, self._plan, self._is_begun = self._plan, None, False
        if plan is not None:
            self.record.has_drawn = plan["drawn"]
            if not plan["samples"] and plan.get("objects"):
                self._note_lost(self._objects.load_between(plan["objects"]))
        if plan is not None and plan["samples"] is None:  # between two iterations
            if plan["state"] is not None and self._has_loaded(plan):
                self._ask(iter(self.user_dataset), plan["state"])
            plan = None
        if plan is not None and is_in_worker and not plan["samples"] and not plan["ended"]:
            if plan["way"] == _DATASET:
                self._has_loaded(plan)
            plan = None  # this worker's current random states are those of its beginning
        samples = self._started_over() if plan is None else self._resumed(plan)
        self.record.note_position()
        return samples

    def _started_over(self) -> Iterator[object]:
        record = self.record
        record.start = self._moment_of_start()
        record.objects = self._between()
        if self._way == _DATASET:
            record.way, record.source = _DATASET, self.user_dataset
        if self._worker_states is not None:
            self._worker_states.begin_iteration()
        samples = iter(self.user_dataset)
        record.way = self._chosen_way(samples)
        record.source = {_ITERATOR: samples, _DATASET: self.user_dataset}.get(record.way)
        return _Samples(self, samples, record)

    def _resumed(self, plan: Position) -> Iterator[object]:
        before, record = self._moment(), self.record
        record.way, record.digest, record.has_ended = plan["way"], plan["digest"], plan["ended"]
        record.start = RandomStates.from_state_dict(plan["start"])
        record.first = RandomStates.from_state_dict(plan["first"])
        record.log, record.num_samples = DrawLog(plan["log"]), plan["samples"]
        moments = [moment for moment in (record.start, record.first) if moment is not None]
        owed = self._objects.as_now(*(moment.objects for moment in moments))
        if record.start is not None:
            self._restore(record.start)
        self._objects.begin_draws()
        attributes = dict(vars(self.user_dataset)) if plan.get(ATTRIBUTES) else {}
        has_loaded = record.way == _DATASET and self._has_loaded(plan)
        samples = iter(self.user_dataset)
        if has_loaded and self._worker_states is None:
            self._unasked = plan, record, attributes
        elif record.way == _ITERATOR:
            samples.load_state_dict(plan["state"])
        record.source = {_ITERATOR: samples, _DATASET: self.user_dataset}.get(record.way)
        if record.way == _REPLAY:
            self._replay(samples, record)
        samples = iter(()) if record.has_ended and record.way != _REPLAY else samples
        self._owed = owed
        if record.num_samples:
            self._put_back()
        set_rng_state(before.rng)
        self._held.load_state_dict(before.held)
        if self._worker_states is not None:
            self._worker_states.begin_iteration()
            if record.has_ended:
                self._worker_states.end_iteration(record)
        return _Samples(self, samples, record)

    def _has_loaded(self, plan: Position) -> bool:
        """Load a position's state, unless that of no iteration is there already: after a load, one would continue."""
        is_there = not plan["samples"] and self._is_there(plan)
        if not is_there:
            self.user_dataset.load_state_dict(plan["state"])
        return not is_there

    def _is_there(self, plan: Position) -> bool:
        return sample_digest(self.user_dataset.state_dict()) == sample_digest(plan["state"])

    def end_resumed(self) -> None:
        """End the iteration that was resumed, if no sample of it was left: a generator has not even begun."""
        if self._unasked is not None:
            plan, record, attributes = self._unasked
            if record is self.record and record.num_samples == plan["samples"]:
                vars(self.user_dataset).update(attributes)
                self._objects.load_attributes(plan)
                if not (attributes and self._is_there(plan)):
                    self.user_dataset.load_state_dict(plan["state"])
                    self._ask(iter(self.user_dataset), plan["state"])
        self._unasked = None

    def _ask(self, samples: Iterator[object], state: object) -> None:
        """Ask for a sample after a state was loaded that may be the end of an iteration, which must not be the next."""
        before = self._moment()
        if next(samples, self) is not self:  # it is the state of a beginning
            self.user_dataset.load_state_dict(state)
        set_rng_state(before.rng)
        self._held.load_state_dict(before.held)

    def _replay(self, samples: Iterator[object], record: IterableRecord) -> None:
        if record.first is None:
            return
        self._restore(record.first)
        drawn = DrawnAgain(samples)
        for at, states_after in record.log.by_batch():
            drawn.draw_up_to(at)
            self._restore(RandomStates.from_states(states_after(self._states())))
        drawn.draw_up_to(record.num_samples)
        if (drawn.num_drawn, drawn.digest) != (record.num_samples, record.digest):
            self._differs(record.num_samples)
        elif record.has_ended:
            drawn.draw_up_to(record.num_samples + 1)

    def _differs(self, num_samples: int) -> None:
        message = (
            f"Started again from the same random states, the iterable data set {type(self.user_dataset).__name__} "
            f"does not yield the same {num_samples} samples again. It keeps its own state, such as a counter of "
            "epochs in __iter__, or its data changed, or was drawn when it was built. Its samples would differ from "
            "the uninterrupted run. Give it state_dict and load_state_dict, `set_epoch`, or a seed; or pass "
            "strict=False."
        )
        self._exactness.refuse(message)

    def _chosen_way(self, samples: Any) -> str:
        if self._way is None:
            self._way = _REPLAY
            found = ((_ITERATOR, samples), (_DATASET, self.user_dataset))
            if not any(refills_its_buffer(value) for _, value in found):
                self._way = next((way for way, value in found if has_state(value)), _REPLAY)
            _log.debug("%s is resumed by %s.", type(self.user_dataset).__name__, self._way)
        return self._way

    def _begin_batch(self, record: IterableRecord) -> None:
        record.batch_begun = record.num_samples, self._states()
        record.first = record.first or self._moment_of_start()

    def _end(self, record: IterableRecord) -> None:
        if record.has_ended:
            return
        record.has_ended, record.objects = True, self._between()
        self._note_draws(record)
        if self._worker_states is not None:
            self._worker_states.end_iteration(record)

    def _between(self) -> Mapping[str, object] | None:
        return None if self._objects.is_fed and self._worker_states is None else self._objects.between()

    def _put_back(self) -> None:
        """Restore the trained module as it was before samples were drawn that depended on its earlier state."""
        owed, self._owed = self._owed, []
        for state in (*owed, *self._objects.after_draws()):
            self._load(state)

    def _load(self, objects: Mapping[str, Any]) -> None:
        self._note_lost(self._objects.load_state_dict(objects) if objects else ())

    def _note_lost(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._refuse(f"continues without {line}")

    def _refuse(self, what: str) -> None:
        name = type(self.user_dataset).__name__
        self._exactness.refuse(f"The iterable data set {name} {what}")

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> object:
        """Note that all samples of a batch are drawn, then collate it with the user's function."""
        record = self._current.record
        if record is not None:
            self._current.record = None
            self._note_draws(record)
            record.num_left = 0
            record.num_batches += 1
            if self._worker_states is None:
                record.note_position()
        return collate_fn(samples)

    def _note_draws(self, record: IterableRecord) -> None:
        if record.batch_begun is not None:
            at, before = record.batch_begun
            record.batch_begun = None
            after = self._states()
            if after is not before:
                record.log.note(at, before, after)

    def position_after(self, record: IterableRecord, num_batches: int) -> Position:
        """Return the position of an iteration after `num_batches`, with what an end of it there would need."""
        attributes = self._objects.attributes() if record is self.record and record.num_batches == num_batches else {}
        return {**record.position_after(num_batches), **attributes}

    def between(self) -> Position | None:
        """Return what the next iteration must know about the previous ones."""
        position = between(self.record.position())
        return position and {**position, "objects": self._objects.between()}

    @property
    def user_epoch(self) -> int | None:
        """The epoch that was passed to the data set's ``set_epoch``."""
        epoch = getattr(self.user_dataset, "epoch", None)
        return epoch if isinstance(epoch, int) and callable(getattr(self.user_dataset, "set_epoch", None)) else None

    def _states(self) -> Mapping[str, bytes]:
        self._held.refresh()
        return states_now(self._held)

    def _moment(self) -> RandomStates:
        self._held.refresh()
        return RandomStates(rng=rng_state(), held=self._held.state_dict(), sampler_epochs=[self.user_epoch])

    def _moment_of_start(self) -> RandomStates:
        """Return the states from which an iteration can begin again, including those of the data set's objects."""
        return replace(self._moment(), objects=self._objects.at_start())

    def _restore(self, moment: RandomStates) -> None:
        set_rng_state(moment.rng)
        self._load(moment.objects)
        missing = self._held.load_state_dict(moment.held) if moment.held else []
        if missing:
            self._refuse(f"can't begin again exactly: {lacks_generators(missing)}")
        for epoch in moment.sampler_epochs:
            self.go_to_epoch(epoch)

    def go_to_epoch(self, epoch: int | None) -> None:
        """Set the data set's epoch, if one was set before."""
        if epoch is not None:
            self.user_dataset.set_epoch(epoch)


class _Samples(Iterator[object]):
    """Passes on the samples of one iteration."""

    def __init__(self, side: IterableSide, samples: Iterator[object], record: IterableRecord | None) -> None:
        self._side = side
        self._samples = samples
        self._record = record

    def __next__(self) -> object:
        side, record = self._side, self._record
        side._current.record = record
        if record is None:
            return next(self._samples)
        is_replayed = record.way == _REPLAY
        if is_replayed and record.batch_begun is None:
            side._begin_batch(record)
        try:
            sample = next(self._samples)
        except StopIteration:
            side._end(record)
            raise
        record.num_samples += 1
        if record.num_samples == 1 or side._owed:
            side._put_back()
            record.has_drawn = True
        record.num_left += 1
        if is_replayed:  # digest it now: training may change a sample that it receives
            record.digest = sample_digest(sample, record.digest)
        return sample


def between(position: Position | None) -> Position | None:
    """Return the part of `position` that the following iteration must know."""
    if position is None or (position["way"] != _DATASET and not position["drawn"]):  # nothing was drawn
        return None
    state = position["state"] if position["way"] == _DATASET else None
    return {**position, "samples": None, "start": None, "first": None, "log": b"", "state": state}


class DrawnAgain:
    """Counts samples that are drawn again.

    Args:
        samples: The iterator. `iter` is not called on it: a data set that is its own iterator would begin again.
    """

    def __init__(self, samples: Iterator[object]) -> None:
        self._samples = samples
        self.num_drawn, self.digest = 0, 0

    def draw_up_to(self, number: int) -> None:
        """Draw samples until this number is reached, or no more come."""
        while self.num_drawn < number:
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            self.digest = sample_digest(sample, self.digest)
            self.num_drawn += 1
