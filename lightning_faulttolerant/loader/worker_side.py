"""The worker's side of a loader: it leaves its random state in the ring after each batch, and restores it on resume.

A worker fetches batches ahead of their use, so a checkpoint can't use its *current* state. The ring holds the states
after each of the last batches. The main process picks the one that belongs to its position.

If a sample fails to load, torch sends the error in place of the batch, and the worker would return no state with it. A
run that leaves such a batch out could not be resumed after it. So a guarded data set returns the error in place of the
batch, which is counted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators, stateful_dataset
from lightning_faulttolerant.loader.iterable import IterableRecord, IterableSide
from lightning_faulttolerant.loader.objects import WorkerObjects
from lightning_faulttolerant.loader.per_sample import DatasetStandIn, PerSampleDataset
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.processes import end_with_parent, is_running
from lightning_faulttolerant.state import rng
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.walk import users_variables
from lightning_faulttolerant.state.rng import look, rng_state, set_rng_state


@final
class Unloaded:
    """Stands in a worker for a sample that could not be loaded.

    Args:
        error: The error. torch raises it in the main process if it comes in place of a batch.
    """

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error


def unloaded_now() -> Unloaded:
    """Return what stands for the exception that is being handled."""
    info = get_worker_info()
    number = "" if info is None else f" {info.id}"
    return Unloaded(ExceptionWrapper(where=f"in DataLoader worker process{number}"))  # type: ignore[no-untyped-call]


def error_in(samples: object) -> ExceptionWrapper | None:
    """Return why the samples of a batch could not be loaded, or ``None`` if they were."""
    found = samples[0] if isinstance(samples, list) and samples else samples
    return found.error if isinstance(found, Unloaded) else None


@final
class GuardedSamples(DatasetStandIn):
    """Stands in for the data set of workers: a sample that can't be loaded is an `Unloaded`."""

    def __getitem__(self, index: Any) -> object:
        try:
            return self.user_dataset[index]
        except Exception:  # noqa: BLE001 - torch raises it in the main process
            return unloaded_now()

    def __getitems__(self, indices: Any) -> list[object]:
        """Return the samples of a batch, or one that says why they could not be loaded."""
        try:
            at_once = getattr(self.user_dataset, "__getitems__", None)
            return at_once(indices) if at_once else [self.user_dataset[index] for index in indices]
        except Exception:  # noqa: BLE001 - likewise
            return [unloaded_now()]


WorkerState = dict[str, Any]

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """Where workers that are created together leave their states, what they continue from, and who creates them."""

    ring: WorkerRing
    states: Sequence[WorkerState] = ()
    process_id: int = field(default_factory=os.getpid)
    is_in_main_thread: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())


class WorkerSide:
    """Stands in for the ``collate_fn`` and the ``worker_init_fn`` of a loader with workers.

    Both are methods of one object, so they remain one object in a spawned worker.

    Args:
        loader: The user's loader.
        collate_fn: Its ``collate_fn``, with what stand-ins add to it.
        default_init: Called in place of a missing ``worker_init_fn``.
        exactness: The main process's collector of what is not exact.
        iterable: The stand-in for an iterable data set.
        per_sample: Seeds the samples in that mode. No state is left in the ring then.
        guarded: The data set of workers that count batches which can't be loaded.
    """

    def __init__(
        self,
        loader: DataLoader[object],
        *,
        collate_fn: Callable[[object], object],
        default_init: Callable[[int], None] | None,
        exactness: Exactness,
        iterable: IterableSide | None,
        per_sample: PerSampleDataset | None,
        guarded: GuardedSamples | None,
    ) -> None:
        self.exactness = exactness.of_worker()
        self._per_sample = per_sample
        self._guarded = guarded
        self.collate_fn = collate_fn if per_sample is None else per_sample.collate
        self.init_fn = default_init if loader.worker_init_fn is None else loader.worker_init_fn
        self.iterable = iterable
        self.leaves_rest = loader.batch_size is not None and not loader.drop_last
        """Whether samples too few for a whole batch form one."""
        self.has_state = stateful_dataset(loader) is not None
        """Whether the state of a map-style data set continues, too."""
        self._starts: list[WorkerStart] = []
        self._states: WorkerStates | None = None

    def start_with(self, start: WorkerStart) -> None:
        """Let workers that are created from now on start with `start`."""
        self._starts = [start]

    @contextlib.contextmanager
    def aside(self, ring: WorkerRing) -> Iterator[None]:
        """Give workers created in this block a separate ring, and nothing to continue from."""
        kept, self._starts = self._starts, [WorkerStart(ring=ring)]
        try:
            yield
        finally:
            self._starts = kept

    def init(self, worker_id: int) -> None:
        """Set up a worker that has just started: its signals, the user's function, then the state to continue from."""
        [start] = self._starts
        # torch looks for the parent only after this function, and compares it with the one of that moment.
        if start.is_in_main_thread:  # the kernel takes the end of the thread that starts a process for its parent's
            end_with_parent()
        self._init(worker_id, start)
        if not is_running(start.process_id):
            os._exit(1)

    def _init(self, worker_id: int, start: WorkerStart) -> None:
        start.ring.register(worker_id, os.getpid())
        _handle_signals(start.ring, worker_id)
        _note_failures(start.ring, worker_id)
        for stand_in in (self.iterable, self._per_sample, self._guarded):
            if stand_in is not None:  # users must see their own object; torch's class refuses a plain assignment
                object.__setattr__(get_worker_info(), "dataset", stand_in.user_dataset)
        if self.init_fn is not None:
            self.init_fn(worker_id)
        if self._per_sample is not None:
            return
        self._states = WorkerStates(worker_id, start.ring, self)
        # If there are more workers than before and strict is off, the new ones keep the states they started with.
        self._states.begin(start.states[worker_id] if worker_id < len(start.states) else None)

    def collate(self, samples: object) -> object:
        """Collate a batch with the user's function, then leave the worker's state in the ring."""
        batch = self.collate_fn(samples) if self._guarded is None else self._guarded_batch(samples)
        if self._states is not None:
            self._states.leave_after_batch()
        return batch

    def _guarded_batch(self, samples: object) -> object:
        error = error_in(samples)
        if error is not None:
            return error
        try:
            return self.collate_fn(samples)
        except Exception:  # noqa: BLE001 - torch raises it in the main process
            return unloaded_now().error

    def state_bytes(self, dataset: object) -> int:
        """Return the approximate length of a worker's state, from the main process's copy of the data set."""
        held = _held_generators(dataset, self.collate_fn)
        return len(_pack(held, dataset=dataset if self.has_state else None))


class WorkerStates:
    """The states of a running worker. Each is left in the ring; the first may be one of an earlier process.

    Args:
        worker: The number of the worker.
        ring: Where it leaves its states.
        side: What stands in for the functions of the loader.
    """

    def __init__(self, worker: int, ring: WorkerRing, side: WorkerSide) -> None:
        self._worker, self._ring, self._side = worker, ring, side
        self._generators = _Generators(_held_generators(_dataset(), side.collate_fn))
        self._objects = WorkerObjects(
            dataset=_dataset(),
            collate_fn=side.collate_fn,
            worker_init_fn=side.init_fn,
            held=self._generators.held,
        )
        self._owed: Mapping[str, object] = {}
        self._num_batches = self._num_iterations = self._num_said = 0

    def begin(self, state: WorkerState | None) -> None:
        """Continue from `state`, and leave the state at the start."""
        if state is not None:
            if self._side.has_state:
                _dataset().load_state_dict(state["dataset"])
            self._resume(state)
        if self._side.iterable is not None:
            plan = None if state is None else state.get("iterable")
            self._side.iterable.begin_in_worker(plan, self, self._side.exactness)
        self._say_not_exact()
        self._leave()

    def leave_after_batch(self) -> None:
        """Leave the state after another batch."""
        self._num_batches += 1
        self._say_not_exact()
        self._leave()

    def begin_iteration(self) -> None:
        """Note that an iteration over the iterable data set begins."""
        self._num_iterations += 1
        owed, self._owed = self._owed, {}
        self._objects.load_state_dict(owed)  # samples may have been drawn again
        self._say_not_exact()
        self._leave()
        self._ring.note_begin(self._worker, self._num_iterations, self._num_batches)

    def end_iteration(self, record: IterableRecord) -> None:
        """Note that the iterable data set has no more samples."""
        if record.num_left and self._side.leaves_rest:
            self._ring.note_end(self._worker, self._num_batches + 1)
            return
        self._leave()
        self._ring.note_end(self._worker, self._num_batches)

    def _say_not_exact(self) -> None:
        reasons = self._side.exactness.reasons
        if len(reasons) > self._num_said:
            self._ring.say(self._worker, reasons)
            self._num_said = len(reasons)

    def _resume(self, state: WorkerState) -> None:
        missing = _load_worker_state(state, self._generators.held)
        if missing:
            self._side.exactness.refuse(f"A worker can't continue exactly: {lacks_generators(missing)}")
        self._owed = state.get("objects", {})
        for line in self._objects.load_state_dict(self._owed):
            self._side.exactness.refuse(f"A worker continues without {line}")
        now = {**rng_state(), **self._generators.held.state_dict()}
        others = [name for name, one in {**state["rng"], **state["held"]}.items() if now.get(name, one) != one]
        if others:
            self._side.exactness.refuse(
                f"A worker can't continue exactly: read again after the restore, {others[0]} differs"
            )

    def _leave(self) -> None:
        dataset, objects = _dataset() if self._side.has_state else None, self._objects.state_dict()
        packed = self._generators.packed(self._side.iterable, dataset, objects)
        self._ring.put(self._worker, self._num_batches, packed)


def _dataset() -> Any:
    info = get_worker_info()
    return None if info is None else info.dataset


def _held_generators(dataset: object, collate_fn: Callable[[object], object]) -> HeldGenerators:
    roots = {"dataset": dataset, "collate_fn": collate_fn}
    return HeldGenerators({**roots, **users_variables(roots)})


def _handle_signals(ring: WorkerRing, worker: int) -> None:
    # A scheduler or a terminal also signals the workers. The main process still needs them to finish its batch, so
    # they exit only when it tells them to.
    for ignored in _IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)

    def end_if_closing(*_: object) -> None:
        if ring.is_closing(worker):
            os._exit(0)

    signal.signal(signal.SIGTERM, end_if_closing)


def _note_failures(ring: WorkerRing, worker: int) -> None:
    """Let torch's fetchers in this worker note a batch that fails: it reaches no `collate`, and leaves no state."""
    for kind in (_MapDatasetFetcher, _IterableDatasetFetcher):
        setattr(kind, "fetch", _noting_failures(kind.fetch, ring, worker))  # noqa: B010 - mypy refuses an assignment


def _noting_failures(fetch: Callable[..., object], ring: WorkerRing, worker: int) -> Callable[..., object]:
    def noting(fetcher: object, index: object) -> object:
        try:
            return fetch(fetcher, index)
        except StopIteration:
            raise
        except BaseException:
            ring.note_failure(worker)
            raise

    return noting


def unpack_worker_state(blob: bytes) -> WorkerState:
    """Return the state that a worker left in its slot of the ring."""
    # These are our own bytes, from memory that only our workers write.
    state: WorkerState = pickle.loads(blob)
    return state


def _pack(
    held: HeldGenerators,
    iterable: IterableSide | None = None,
    dataset: Any = None,
    *,
    objects: Mapping[str, object] | None = None,
) -> bytes:
    state: dict[str, object] = {"rng": rng_state(), "held": held.state_dict()}
    if iterable is not None:
        state["iterable"] = iterable.record.position()
    if dataset is not None:
        state["dataset"] = dataset.state_dict()
    if objects:
        state["objects"] = objects
    return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)


class _Generators:
    """The generators of a worker, packed again only if something has changed since the last batch.

    Args:
        held: Those that its objects hold.
    """

    def __init__(self, held: HeldGenerators) -> None:
        self.held = held
        self._states: Mapping[str, bytes] | None = None
        self._packed = b""

    def packed(self, iterable: IterableSide | None, dataset: object, objects: Mapping[str, object]) -> bytes:
        """Return the state of the worker, with the parts that are passed, if any."""
        self.held.refresh()  # objects often create their generator on first use
        if objects or iterable is not None or dataset is not None or len(self.held):
            return _pack(self.held, iterable, dataset, objects=objects)
        states = look()
        if states is not self._states:
            self._states, self._packed = states, _pack(self.held)
        return self._packed


def _load_worker_state(state: WorkerState, held: HeldGenerators) -> list[str]:
    missing = held.load_state_dict(state["held"])
    # Restore a device only if this worker uses it. The main process's devices are not the worker's to set.
    in_use = {kind for kind, _ in rng.initialised()}
    states: dict[str, bytes] = state["rng"]
    set_rng_state({n: blob for n, blob in states.items() if not rng.is_device(n) or n.partition(":")[0] in in_use})
    return missing
