"""The repetition: batches that an earlier process has trained, too, are compared with what it noted of them.

Nothing waits for a device: a batch is read before it is moved there, and what a step returned is read when a copy of it
has arrived.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, final
from zlib import crc32

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.records.batches import BatchLine, BatchRecord
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches

_log = logging.getLogger(__name__)
_NUM_SAMPLED = 256
_MAX_ITEMS = 64
_MAX_BYTES = 1_360  # of the beginning, of the middle, and of the end of a tensor: 4 kB in all
_Place = tuple[int, int, int, int, int, int]
_SHOWN = (str, int, float)
_NOTHING = (0, 0)
_MASK = 0xFFFF_FFFF
ORDER, CONTENT, OUTPUT = "order", "content", "output"
_TOLD = {ORDER: "has other indices", CONTENT: "is another batch", OUTPUT: "has another result"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBatch:
    """A batch that differs from the one that an earlier process has trained in its place.

    Args:
        kind: What differs first: `ORDER`, `CONTENT`, or `OUTPUT`.
        now: What this process notes of it.
        before: What the earlier process noted.
    """

    kind: str
    now: BatchLine
    before: BatchLine

    def __str__(self) -> str:
        saved, now = (getattr(one, self.kind) for one in (self.before, self.now))
        return (
            f"repeated.{self.kind}: batch {self.now.batch} of epoch {self.now.epoch} {_TOLD[self.kind]} than in "
            f"process {self.before.process}: {saved:08x} then, {now:08x} now"
        )


@final
class Repetition:
    """Notes each training batch of a fit, and compares those that were trained before.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The fit's loaders.
        record: The record of this rank.
        is_on: Says whether the fit trains, and not a finder in the middle of it.
        compares: Whether this process continues exactly where an earlier one was.
        on_end: Called once with the first batch that differs, or without one when all that is known is repeated.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        record: BatchRecord,
        *,
        is_on: Callable[[], bool],
        compares: bool,
        on_end: Callable[[Repetition, OtherBatch | None], None],
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._noted_places: list[list[Any]] = []
        self._record = record
        self._is_on = is_on
        self._compares = compares
        self._on_end = on_end
        # They stay the same objects, and the trainer's properties take longer to ask.
        self._total = trainer.fit_loop.epoch_loop.batch_progress.total
        self._current = trainer.fit_loop.epoch_loop.batch_progress.current
        self._epochs = trainer.fit_loop.epoch_progress.current
        self._process = record.process
        self._fetched = _NOTHING
        self._noted = -1
        self._pending: deque[tuple[Callable[[], bool], list[Tensor], _Place]] = deque()
        self.num_repeated = 0
        self.repeats_process = 0
        """The process whose batches are repeated."""

    def take_seams(self, patches: Patches) -> None:
        """Begin to note batches."""
        patches.wrap(self._trainer.strategy, "batch_to_device", self._wrap_transfer)
        patches.wrap(self._trainer.strategy, "training_step", self._wrap_step)

    def begin(self, *, is_exact: bool) -> int:
        """Begin with the next batch. Return how many batches an earlier process has trained from here on.

        Args:
            is_exact: Whether the state is the one of that process.
        """
        self._compares &= is_exact
        if not is_exact:
            self._record.clear()
        self._find_trackers()
        self._order()  # from here on, what moves counts
        return self._record.num_from(self._total.ready) if self._compares else 0

    @property
    def changed_sources(self) -> list[str]:
        """The source files of the user's that have changed since that process."""
        return self._record.changed

    def close(self, *, is_finished: bool) -> None:
        """Read what is still to come from the device, and close the record."""
        self._compares = False
        with contextlib.suppress(RuntimeError):  # the device may be lost
            self._read_arrived(wait=True)
        self._record.close(is_finished=is_finished)

    # Called for each batch: after a step, each function and each attribute costs more than its work.

    def _wrap_transfer(self, original: Method) -> Method:
        state = self._trainer.state

        def batch_to_device(batch: object, *args: object, **kwargs: object) -> object:
            if state.stage is RunningStage.TRAINING:
                self._fetched = self._order(), sampled_digest(batch)  # just fetched, they are in the processor's cache
            return original(batch, *args, **kwargs)

        return batch_to_device

    def _wrap_step(self, original: Method) -> Method:
        def training_step(*args: object, **kwargs: object) -> object:
            output = original(*args, **kwargs)
            if self._is_on():
                self._note(output)
            return output

        return training_step

    def _note(self, output: object) -> None:
        number = self._total.ready - 1
        if number == self._noted:  # some optimizers call the step again
            return
        self._noted, (order, content), self._fetched = number, self._fetched, _NOTHING
        place = (number, self._process, self._epochs.completed, self._current.ready - 1, order, content)
        returned = [output] if isinstance(output, Tensor) else _tensors(output)
        for tensor in returned:
            if not tensor.is_cpu:
                self._pending.append((*_on_the_way(returned), place))
                self._read_arrived(wait=len(self._pending) > _MAX_PENDING)
                return
        self._end(BatchLine(*place, output=sampled_digest(returned)))

    def _find_trackers(self) -> None:
        """Find the training loaders that have indices. Of each, its last iteration and number of batches are noted."""
        followed = self._loaders.trackers.items()
        training = [one for place, one in followed if place.startswith(TRAIN) and isinstance(one, TrackedLoader)]
        known = {id(noted[0]): noted for noted in self._noted_places}
        self._noted_places = [known.get(id(one), [one, None, 0]) for one in training if not one.is_gone]

    def _order(self) -> int:
        """Return a checksum of the indices of the loaders that have yielded a batch since the last call."""
        if not self._current.ready:  # the first batch of an epoch
            self._find_trackers()
        found = 0
        for noted in self._noted_places:
            tracker, before, num_before = noted
            iteration = tracker.iteration
            if iteration is not None and iteration.num_out != (num_before if iteration is before else 0):
                noted[1], noted[2] = iteration, iteration.num_out
                found = 31 * found + _hash_of(iteration.record.batch(iteration.num_out - 1))
        return found & _MASK

    def _read_arrived(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][0]()):
            _, copies, place = self._pending.popleft()
            if wait:
                torch.cuda.synchronize()
            self._end(BatchLine(*place, output=sampled_digest(copies)))

    def _end(self, line: BatchLine) -> None:
        """Compare a batch with the same one of an earlier process, and write its line."""
        before = self._record.line(line.number) if self._compares else None
        if before is None or before.process == line.process or (before.epoch, before.batch) != (line.epoch, line.batch):
            self._finish(None)
        else:
            self.repeats_process = before.process
            pairs = ((kind, getattr(before, kind), getattr(line, kind)) for kind in _TOLD)
            kind = next((kind for kind, then, now in pairs if then and now and then != now), None)
            if kind is None:
                self.num_repeated += 1
            else:
                self._finish(OtherBatch(kind=kind, now=line, before=before))
                self._record.clear()  # what comes after it differs, too
        self._record.write(line)

    def _finish(self, other: OtherBatch | None) -> None:
        if self._compares:
            self._compares = False
            self._on_end(self, other)


_MAX_PENDING = 8


def _tensors(output: object) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _on_the_way(returned: list[Tensor]) -> tuple[Callable[[], bool], list[Tensor]]:
    """Copy tensors from a device, without a wait. Return what says whether they have arrived, and the copies."""
    if any(tensor.device.type not in ("cpu", "cuda") for tensor in returned):
        return lambda: True, []
    copies = [
        torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one.detach(), non_blocking=True)
        for one in returned
    ]
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query, copies


def sampled_digest(value: object, digest: int = 0) -> int:
    """Return a checksum of the values in a batch; of a large tensor, of those at its beginning, middle, and end."""
    if isinstance(value, Tensor):
        return _of_tensor(value, digest)
    kind = type(value)
    if kind is list or kind is tuple:
        for one in value[:_MAX_ITEMS]:  # type: ignore[index]
            digest = sampled_digest(one, digest)
        return digest
    if isinstance(value, Mapping):
        return sampled_digest([*value.values()], digest)
    if isinstance(value, (list, tuple)):  # a named tuple
        return sampled_digest([*value], digest)
    return crc32(repr(value).encode("utf-8", "surrogatepass"), digest) if isinstance(value, _SHOWN) else digest


def _of_tensor(tensor: Tensor, digest: int) -> int:
    try:
        if not tensor.is_cpu:
            return digest
        if not tensor.is_contiguous():
            step = -(-tensor.numel() // _NUM_SAMPLED)
            tensor = tensor.detach()[:: min(step, len(tensor))].contiguous()
        num_bytes, address = tensor.nbytes, tensor.data_ptr()
    except (RuntimeError, TypeError):  # it is sparse or nested
        return digest
    if not address:  # it has no memory
        return digest
    if num_bytes <= 3 * _MAX_BYTES:
        return crc32(string_at(address, num_bytes), digest)
    for at in (0, num_bytes // 2, num_bytes - _MAX_BYTES):
        digest = crc32(string_at(address + at, _MAX_BYTES), digest)
    return digest


def _hash_of(indices: object) -> int:
    """Return a hash of an index batch that is the same in each process, or 0 if it is not a list of integers."""
    is_plain = type(indices) is list and set(map(type, indices)) == {int}
    return hash(tuple(indices)) if is_plain else hash(indices) if type(indices) is int else 0  # type: ignore[arg-type]
