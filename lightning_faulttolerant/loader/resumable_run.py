"""The position of a user's loop in its loader: the followed copy, its states, and how it resumes from one.

A batch counts as consumed when it has been yielded. The random states of the process belong to the position. They are
restored when a state is loaded. If the state is from the middle of an epoch, they are restored again right before the
next batch.

The state can be JSON. A value that JSON can't hold becomes a dict with one key that names its kind. All bytes are one
text, under `POOL`.

The epoch that a loop passes to its samplers' ``set_epoch``, continued when a new process counts from 0.

A user's loop usually passes the right epoch after a resume. Fabric counts the iterations of its process, so its first
one would be epoch 0 again, with the order of epoch 0.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import FingerprintMismatchError, NotExactError
from lightning_faulttolerant.loader.index_side import SOLE_RANK
from lightning_faulttolerant.loader.iteration import Iteration
from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.samplers import sampler_name
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.samplers.order import RankPlace
from lightning_faulttolerant.state.packing import POOL, blob_to_tensor, pack_blobs, tensor_to_blob, unpack_blobs
from lightning_faulttolerant.state.rng import rng_state, set_rng_state


class SamplerEpochs:
    """The epochs that are set on the samplers of one loader.

    Args:
        samplers: All samplers that may have ``set_epoch``.
    """

    def __init__(self, samplers: Sequence[object]) -> None:
        found = {id(s): s for s in samplers if callable(getattr(s, "set_epoch", None)) and hasattr(s, "__dict__")}
        self._samplers = list(found.values())
        self._setters: list[_SetEpoch] = []

    @property
    def is_listening(self) -> bool:
        """Whether it intercepts the samplers' ``set_epoch``."""
        return bool(self._setters)

    def state_dict(self) -> list[int | None]:
        """Return the epoch of each sampler."""
        return [getattr(sampler, "epoch", None) for sampler in self._samplers]

    def listen(self) -> None:
        """Record the epochs that are set on the samplers from now on."""
        self.leave()
        self._setters = [_SetEpoch(sampler) for sampler in self._samplers]
        for setter, sampler in zip(self._setters, self._samplers, strict=True):
            vars(sampler)["set_epoch"] = setter

    def leave(self) -> None:
        """Restore the samplers' own ``set_epoch``."""
        for sampler in self._samplers:
            vars(sampler).pop("set_epoch", None)
        self._setters = []

    @contextlib.contextmanager
    def uncorrected(self) -> Iterator[None]:
        """Let the code that handles states set the samplers' epochs without correction."""
        for setter in self._setters:
            setter.corrects = False
        try:
            yield
        finally:
            for setter in self._setters:
                setter.corrects = True

    def continue_from(self, epochs: Sequence[int | None], begun: Sequence[int | None], *, begins_next: bool) -> None:
        """Bring the samplers to their epochs when an iteration begins.

        Args:
            epochs: The epochs that `state_dict` returned.
            begun: The epochs at the start of the last iteration: a sampler may advance on its own after the end.
            begins_next: Whether this iteration is the one after that, and not its rest.
        """
        continues = False
        for setter, epoch, of_last in zip(self._setters, epochs, begun, strict=False):
            if epoch is not None and of_last is not None:
                setter.continue_from(epoch, expected=of_last + begins_next)
                continues = continues or setter.offset > 0
        if not continues:
            self.leave()


class _SetEpoch:
    """Stands in for a sampler's ``set_epoch``."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = weakref.ref(sampler)
        self._last: int | None = None
        self.offset = 0
        self.corrects = True

    def __call__(self, epoch: int) -> None:
        if self.corrects:
            self._last = epoch
            epoch += self.offset
        self._set(epoch)

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled or copied sampler has its own ``set_epoch`` again.
        return getattr, (self._sampler(), "set_epoch")

    def continue_from(self, epoch: int, *, expected: int) -> None:
        """Set the epoch to `expected` if the last one set is smaller. If none was set, set `epoch`."""
        if self._last is None:
            if getattr(self._sampler(), "epoch", None) != epoch:
                self._set(epoch)
        elif self._last < expected:
            self.offset = expected - self._last
            self._set(expected)

    def _set(self, epoch: int) -> None:
        sampler = self._sampler()
        if sampler is not None:
            type(sampler).set_epoch(sampler, epoch)


_VERSION = 2
_DISTRIBUTED = " over DistributedSampler"  # also Fabric's wrapper of a user's sampler


class LoaderRun:
    """The run of a loop over one loader, through all its epochs.

    Args:
        loader: The loader, which is not modified.
        seeds: The seeds of the samples. With them, the workers' random states are not captured.
    """

    def __init__(self, loader: DataLoader[object], *, seeds: SampleSeeds | None = None) -> None:
        plain = copy.copy(loader)
        plain.__class__ = DataLoader  # the user's `__iter__` runs before this, not after
        self._tracker = TrackedLoader(plain, rank_place=_place(), seeds=seeds)
        self.followed = self._tracker.copy_of(plain)
        # torch terminates workers that don't exit by themselves. They obey only if they know that they are not needed.
        weakref.finalize(self, self._tracker.release_workers)
        self._fingerprint = _fingerprint(plain, is_per_sample=seeds is not None)
        inner = getattr(plain.batch_sampler, "sampler", None)
        self._epochs = SamplerEpochs([plain.batch_sampler, inner, plain.sampler])
        self._handed: weakref.ref[_Handed] | None = None
        self._iteration: Iteration | None = None
        self._begun_epochs: list[int | None] | None = None
        """The samplers' epochs when the last iteration began, if one has begun."""
        self.has_iterated = False
        """Whether this process has begun an iteration."""
        self._epoch = 0
        self._loaded: dict[str, Any] | None = None
        self.is_entangled = False
        self._asked_at: int | None = None

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended."""
        return self._epoch

    # The positions.

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the current random states, in types that a checkpoint may hold."""
        if self._loaded is not None and self._loaded["in_epoch"]:
            return to_json({**copy.deepcopy(self._loaded), "version": _VERSION})
        self._check_untangled()
        iteration = self._iteration
        consumed = None if iteration is None else iteration.num_out
        self._asked_at = consumed
        epochs = self._epochs.state_dict() if self._loaded is None else self._loaded["sampler_epochs"]
        self._tracker.held.search()  # finds generators created since
        return to_json(
            {
                "version": _VERSION,
                "fingerprint": self._fingerprint,
                "epoch": self._epoch,
                "in_epoch": consumed is not None,
                "has_begun": self._begun_epochs is not None,
                "sampler_epochs": epochs,
                "begun_epochs": epochs if self._begun_epochs is None else self._begun_epochs,
                "loader": self._tracker.state_dict(consumed, iteration),
                "rng": rng_state(),
                "held": self._tracker.held.state_dict(),
            }
        )

    def load_state_dict(self, state_dict: Mapping[str, object], *, restores_rng: bool = True) -> None:
        """Let the next iteration continue from a position of `state_dict`.

        Args:
            state_dict: The state.
            restores_rng: Whether to restore the random states of this process immediately.

        Raises:
            NotExactError: If the state can't be continued from.
            FingerprintMismatchError: If it is the state of another loader.
            ValueError: If it is not a state of a loader.
        """
        state = _unpacked(state_dict)
        if state.get("version") != _VERSION:
            raise NotExactError(
                f"The state of a ResumableDataLoader has version {state.get('version')}, but this package reads "
                f"version {_VERSION}. Install the package that saved it."
            )
        _compare(state["fingerprint"], self._fingerprint, may_get_sampler=True)
        self._abandon()
        self._tracker.load_state_dict(state["loader"])
        self._loaded, self._epoch = state, state["epoch"]
        self._begun_epochs = list(state["begun_epochs"]) if state["has_begun"] else None
        self._iteration = self._handed = None
        self.is_entangled = False
        self._epochs.listen()
        if restores_rng:
            self._restore(state)

    def _abandon(self) -> None:
        """Stop the batches of an iterator that user code still holds: it began at another position."""
        handed = None if self._handed is None else self._handed()
        if handed is not None:
            handed.abandon()

    def _restore(self, state: Mapping[str, Any]) -> None:
        missing = self._tracker.held.load_state_dict(state["held"])
        if missing:
            raise NotExactError(
                f"The generator {', '.join(missing)} does not exist, so its state can't be restored. Its draws would "
                "differ from the uninterrupted run. Create it before it is first used."
            )
        set_rng_state(state["rng"])

    def _check_untangled(self) -> None:
        if self.is_entangled:
            raise NotExactError(
                "Two iterations over one ResumableDataLoader are in progress, but a state has the position of one. "
                "Create a loader for each of them."
            )

    # The iterations.

    def iterate(self) -> Iterator[object]:
        """Begin an iteration, or continue the one that was loaded."""
        state = self._loaded if self._iteration is None else None
        is_rest = state is not None and state["in_epoch"]
        if not is_rest:
            self._loaded = None  # this iteration has nothing to restore
        if state is None:
            self._leave()
        else:
            _compare(state["fingerprint"], self._fingerprint)
            begins_next = state["has_begun"] and not is_rest
            self._epochs.continue_from(state["sampler_epochs"], state["begun_epochs"], begins_next=begins_next)
        with self._epochs.uncorrected():
            batches = iter(self.followed)
        self._begun_epochs = self._epochs.state_dict()
        self._iteration, self._asked_at = self._tracker.iteration, None
        self.has_iterated = True
        handed = _Handed(self, batches)
        self._handed = weakref.ref(handed)
        return handed

    def _leave(self) -> None:
        """Count an epoch that was left before its end."""
        if self._iteration is None:
            return
        if self._asked_at == self._iteration.num_out and not self._has_none_left(self._iteration):
            raise NotExactError(
                f"A state was taken after batch {self._asked_at} of epoch {self._epoch}, where the loop then left "
                "that epoch and began the next one. A run that continues from this state would continue with the rest "
                "of the epoch. Call end_epoch() of the loader at the end of the epoch, before you take its state."
            )
        self._epoch += 1

    def _has_none_left(self, iteration: Iteration) -> bool:
        try:
            return iteration.num_out >= len(self.followed)
        except TypeError:  # it has no length
            return False

    def end_epoch(self) -> None:
        """End the current epoch here."""
        if self._iteration is None:
            raise NotExactError(
                "end_epoch() was called while no epoch was in progress. Call it in the loop over the loader, or after "
                "a break from it."
            )
        handed = None if self._handed is None else self._handed()
        if handed is not None:
            handed.has_ended = True
        self._epoch += 1
        self._iteration = self._loaded = None

    def fetch(self, handed: _Handed, batches: Iterator[object]) -> Any:
        """Return the next batch of an iteration."""
        self._before_fetch(handed)
        if not self._epochs.is_listening:
            return next(batches)
        with self._epochs.uncorrected():
            return next(batches)

    def _before_fetch(self, handed: _Handed) -> None:
        if not self.is_latest(handed):
            self.is_entangled = True
        elif self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._restore(state)

    def is_latest(self, handed: _Handed) -> bool:
        """Return whether `handed` is the latest iteration."""
        return self._handed is not None and self._handed() is handed

    def end(self, handed: _Handed) -> None:
        """Count the epoch of an iteration that has finished."""
        if self.is_latest(handed):
            self._epoch += 1
            self._iteration = None

    def workers_of(self) -> WorkerRing | None:
        """Return the ring of the newest iteration's workers, if they are to end with the iteration."""
        workers = None if self._iteration is None else self._iteration.workers
        return None if workers is None or self.followed.persistent_workers else workers.ring


class _Handed(Iterator[object]):
    """Yields the batches of one iteration."""

    def __init__(self, run: LoaderRun, batches: Iterator[object]) -> None:
        self._run = run
        self._batches = batches
        self._ring = run.workers_of()
        self.has_ended = self._is_abandoned = False

    def __next__(self) -> Any:
        if self.has_ended:
            raise StopIteration
        if self._is_abandoned:
            raise NotExactError(
                "A state was loaded into a ResumableDataLoader after this iterator over it was created. Its batches "
                "would not belong to the state. Create a new iterator: load the state right before the loop begins."
            )
        try:
            return self._run.fetch(self, self._batches)
        except StopIteration:
            self.has_ended = True
            self._run.end(self)
            raise

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)  # such as the workers of torch's iterator

    def abandon(self) -> None:
        """Yield no more batches, and release the workers."""
        self._is_abandoned = True
        self._close_workers()
        self._batches = iter(())

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterators have a length

    def __del__(self) -> None:
        self._close_workers()

    def _close_workers(self) -> None:
        if self._ring is not None:
            self._ring.close()


def _place() -> RankPlace:
    """Return this rank among all."""
    if dist.is_available() and dist.is_initialized():
        return RankPlace(rank=dist.get_rank(), num_replicas=dist.get_world_size())
    return SOLE_RANK


def _fingerprint(loader: DataLoader[object], *, is_per_sample: bool) -> dict[str, Any]:
    is_iterable = isinstance(loader.dataset, IterableDataset)
    place = _place()
    return {
        "data set": type(loader.dataset).__name__,
        "number of samples": None if is_iterable or not hasattr(loader.dataset, "__len__") else len(loader.dataset),
        "batch size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": sampler_name(loader),
        "worker_rng": "per_sample" if is_per_sample else "capture",
        "number of workers": None if is_per_sample else loader.num_workers,
        "rank": place.rank,
        "number of ranks": place.num_replicas,
    }


def _unpacked(state_dict: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"This is not a state of a ResumableDataLoader: it is {state_dict!r}.")
    if not {POOL, "version"} <= state_dict.keys():
        raise ValueError(f"This is not a state of a ResumableDataLoader: it has {sorted(state_dict, key=str)}.")
    return from_json(state_dict)


def _compare(saved: Mapping[str, Any], now: Mapping[str, Any], *, may_get_sampler: bool = False) -> None:
    """Raise if a state is of another loader.

    Args:
        saved: The fingerprint in the state.
        now: The loader's fingerprint.
        may_get_sampler: Whether Fabric may still insert a distributed sampler, if there are several ranks.
    """
    names = [name for name in now if saved.get(name) != now[name]]
    if may_get_sampler and now["number of ranks"] > 1 and _DISTRIBUTED in str(saved.get("sampler")):
        names = [name for name in names if name != "sampler"]
    differences = [f"{name} {saved.get(name)!r} then, {now[name]!r} now" for name in names]
    if differences:
        raise FingerprintMismatchError(
            f"The state belongs to another ResumableDataLoader: {'; '.join(differences)}. Its batches would differ "
            "from the uninterrupted run. Continue with the same data and arguments, and give each rank its own state."
        )


_TENSOR, _TUPLE, _PAIRS = "<tensor>", "<tuple>", "<pairs>"


def to_json(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `state` that ``json.dumps`` and ``torch.load(weights_only=True)`` accept."""
    packed = pack_blobs({name: _encoded(part) for name, part in state.items()})
    data = base64.b64encode(tensor_to_blob(packed[POOL]["data"])).decode("ascii")
    return {**packed, POOL: {**packed[POOL], "data": data}}


def from_json(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state in `packed`, a result of `to_json`."""
    data = blob_to_tensor(base64.b64decode(packed[POOL]["data"]))
    pooled = {**packed, POOL: {**packed[POOL], "data": data}}
    return {name: _decoded(part) for name, part in unpack_blobs(pooled).items()}


def _encoded(value: object) -> Any:
    if isinstance(value, dict):
        if len(value) != 1 and all(type(key) is str for key in value):
            return {key: _encoded(child) for key, child in value.items()}
        return {_PAIRS: [[_encoded(key), _encoded(child)] for key, child in value.items()]}
    if isinstance(value, list):
        return [_encoded(child) for child in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(child) for child in value]}
    if type(value) is Tensor and value.layout is torch.strided and not (value.is_quantized or value.requires_grad):
        name = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [name, list(value.shape), str(value.device), tensor_to_blob(value.cpu())]}
    return value


def _decoded(value: object) -> Any:
    if isinstance(value, list):
        return [_decoded(child) for child in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_PAIRS}:
        return {_decoded(key): _decoded(child) for key, child in value[_PAIRS]}
    if value.keys() == {_TUPLE}:
        return tuple(_decoded(child) for child in value[_TUPLE])
    if value.keys() == {_TENSOR}:
        return _tensor(*value[_TENSOR])
    return {key: _decoded(child) for key, child in value.items()}


def _tensor(dtype: str, shape: list[int], device: str, blob: bytes) -> Tensor:
    flat = blob_to_tensor(blob).view(getattr(torch, dtype)) if blob else torch.empty(0, dtype=getattr(torch, dtype))
    return flat.reshape(shape).to(device)
