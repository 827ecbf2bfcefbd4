"""The repetition: batches that an earlier process has run, too, are compared with what it noted of them.

Nothing waits for a device: a batch is read before it is moved there, and what a step returned is read when a copy of it
has arrived.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import Array, c_char
from typing import Any, final
from zlib import crc32

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_faulttolerant.records.batches import BatchLine, BatchRecord
from lightning_faulttolerant.state.tensors import is_readable, shard_of
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION, Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import FIT, TrainerPosition, function_of, loop_of
from lightning_faulttolerant.trainer.run.changes import NamedDifference
from lightning_faulttolerant.trainer.steps.followed import FollowedLoop

_NUM_SAMPLED = 256
_MAX_ITEMS = 64
_MAX_BYTES = 1_360  # of the beginning, of the middle, and of the end of a tensor: 4 kB in all
_Place = tuple[int, ...]
"""The first fields of `BatchLine`, up to the output."""
_NUM_ARGUMENTS = 2  # of a step: the batch and its number; in an evaluation of several loaders, also that of the loader
_SHOWN = (str, int, float)
_PLACE, _ORDER, _CONTENT, _OUTPUT = "place", "order", "content", "output"
_TOLD = {
    _PLACE: "is elsewhere", _ORDER: "has other indices", _CONTENT: "is another batch", _OUTPUT: "has another result"
}  # fmt: skip
OTHER_RESULT = f"repeated.{_OUTPUT}"
"""The name of a difference that the arithmetic alone may have made."""


@final
class Repetition:
    """Notes each batch of a fit or an evaluation, and compares those that were run before.

    The sanity check is not noted.

    Args:
        trainer: The trainer that runs them.
        loaders: The loaders of the run.
        record: The record of this rank.
        is_on: Says whether the run itself is in progress, and not a finder in the middle of it.
        on_end: Called once with the first batch that differs, or with ``None`` when all that is known is repeated.
            Returns whether the run continues.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        record: BatchRecord,
        *,
        is_on: Callable[[], bool],
        on_end: Callable[[Repetition, NamedDifference | None], bool],
    ) -> None:
        self._trainer = trainer
        self._function = function_of(trainer)
        self._record = record
        self._is_on = is_on
        self._on_end = on_end
        self._is_refused = False
        self._last = 0
        self.known: dict[tuple[int, ...], BatchLine] = {}
        """The lines of batches that are still to be repeated, by place."""
        # They stay the same objects, and the trainer's properties take longer to ask.
        self._total = trainer.fit_loop.epoch_loop.batch_progress.total
        self._training = FollowedLoop(trainer.fit_loop.epoch_loop, loaders, TRAIN)
        stage = VALIDATION if self._function == FIT else self._function
        self._evaluation = FollowedLoop(loop_of(trainer), loaders, stage)
        self._epochs = trainer.fit_loop.epoch_progress.current
        self._is_moved = trainer.strategy.root_device.type != "cpu"
        self._moved = self._logged = 0
        self._noted = -1
        self._evaluated = 0
        """How many batches were evaluated since the last training batch."""
        self._pending: deque[tuple[Callable[[], bool], list[Tensor], _Place, int]] = deque()
        self.changed_sources = record.changed
        """The source files of the user's that have changed since the last process."""
        self.num_repeated = 0
        self.num_logged_otherwise = 0
        """How many of these came after other logged values, such as a time."""
        self.repeats_process = 0
        """The process whose batches are repeated."""

    def take_seams(self, patches: Patches) -> None:
        """Begin to note batches."""
        strategy = self._trainer.strategy
        if self._is_moved:  # reading a batch would wait for it once it is there
            patches.wrap(strategy, "batch_to_device", self._wrap_transfer)
        for logger in self._trainer.loggers:
            patches.wrap(logger, "log_metrics", self._wrap_log)
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            patches.wrap(strategy, name, functools.partial(self._wrap_step, is_training=name == "training_step"))
        if self._function == FIT:
            patches.around(self._trainer.fit_loop, "on_run_end", self._around_end)

    def begin(self, position: TrainerPosition, *, is_exact: bool) -> int | None:
        """Begin with the next batch. Return how many batches an earlier process has run from here on.

        ``None`` stands for a place that no process on this machine is known to have reached.

        Args:
            position: Where the state was taken.
            is_exact: Whether the state is the one of that process.
        """
        self._evaluated = position.num_evaluated or 0
        now = self._total.ready, self._evaluated
        is_known = is_exact and max(map(_number_of, self._record.earlier), default=(0, 0)) >= now
        if is_exact:
            after = now if position.num_evaluated is not None else (self._total.ready, math.inf)
            self.known = {one.place: one for one in self._record.earlier if _number_of(one) > after}
        else:
            self._record.clear()
        for loop in (self._training, self._evaluation):
            loop.begin()
        self._last = max((one.number for one in self.known.values()), default=0)
        return len(self.known) if is_known and self._record.process > 1 else None

    def close(self, *, is_finished: bool, is_refused: bool) -> None:
        """Read what is still to come from the device, and close the record.

        Args:
            is_finished: Whether the run is finished.
            is_refused: Whether a rank does not repeat what it did before: then no batch of this process counts.
        """
        self.known = {}
        with contextlib.suppress(RuntimeError):  # the device may be lost
            self.read_arrived()
        if is_refused:
            self._record.forget()
        self._record.close(is_finished=is_finished)

    def _around_end(self, original: Method) -> None:
        self.read_arrived()
        self._end_known()
        original()

    # Called for each batch: after a step, a call costs more than its work.

    def _wrap_transfer(self, original: Method) -> Method:
        def batch_to_device(batch: object, *args: object, **kwargs: object) -> object:
            self._moved = sampled_digest(batch)
            return original(batch, *args, **kwargs)

        return batch_to_device

    def _wrap_step(self, original: Method, *, is_training: bool) -> Method:
        state, is_on, is_moved, write = self._trainer.state, self._is_on, self._is_moved, self._record.write
        order = (self._training if is_training else self._evaluation).order
        total, current, epochs, process = self._total, self._training.current, self._epochs, self._record.process

        def step(*args: Any, **kwargs: object) -> object:
            content = self._moved if is_moved else sampled_digest(args[0])  # the step may change it
            output = original(*args, **kwargs)
            # `order` runs always: what loaders have yielded for a step that is left out is not of the next one.
            number, batch, loader, indices = total.ready, current.ready, 0, order()
            # Some optimizers call the step again.
            is_left_out = number == self._noted if is_training else state.stage is RunningStage.SANITY_CHECKING
            if is_left_out or not is_on():
                return output
            if is_training:
                self._noted, self._evaluated, batch = number, 0, batch - 1
            else:
                self._evaluated += 1
                loader = args[2] if len(args) > _NUM_ARGUMENTS else 0
            logged, self._logged = self._logged, 0
            place = (number, epochs.completed, batch, self._evaluated, loader, process, indices, content)
            loss = output.get("loss") if type(output) is dict else output
            if is_moved or self.known or self._is_refused or not isinstance(loss, Tensor):
                self._note(place, output, logged)
            else:
                write(*place, sampled_digest(loss), logged)
            return output

        return step

    def _wrap_log(self, original: Method) -> Method:
        def log_metrics(*args: object, **kwargs: object) -> object:
            self._logged = sampled_digest(args[0] if args else kwargs.get("metrics"), self._logged)
            return original(*args, **kwargs)  # unchanged: a logger may accept them by name only

        return log_metrics

    def _note(self, place: tuple[int, ...], output: object, logged: int) -> None:
        returned = [output] if isinstance(output, Tensor) else _tensors(output) or self._weight(place[0] + place[3])
        if not self._is_moved or all(one.is_cpu for one in returned):
            self._end((*place, sampled_digest(returned), logged))
            return
        self._pending.append((*_on_the_way(returned), place, logged))
        self.read_arrived(wait=len(self._pending) > _MAX_PENDING)

    def _weight(self, number: int) -> list[Tensor]:
        """Return the beginning of a weight, of another one each time: a step that returns no tensor may train it."""
        weights = [one for one in self._trainer.lightning_module.parameters() if one.requires_grad]
        one = weights[number % len(weights)] if weights else None
        return [] if one is None or not is_readable(one) else [shard_of(one).detach().reshape(-1)[:_NUM_SAMPLED]]

    def read_arrived(self, *, wait: bool = True) -> None:
        """Compare the batches whose outputs have arrived from the device.

        Args:
            wait: Whether to wait for those of all batches.
        """
        while self._pending and (wait or self._pending[0][0]()):
            _, copies, place, logged = self._pending.popleft()
            if wait:
                torch.cuda.synchronize()
            self._end((*place, sampled_digest(copies), logged))

    def _end(self, values: tuple[int, ...]) -> None:
        """Write the line of a batch, unless it is another one than that of an earlier process."""
        if self._is_refused:  # the lines of the earlier process stay
            return
        if not self.known or self._is_same(BatchLine(*values)):
            self._record.write(*values)

    def _is_same(self, line: BatchLine) -> bool:
        if line.number > self._last:
            self._end_known()
        before = self._before(line)
        if before is not None:
            self.repeats_process = before.process
            pairs = ((kind, getattr(before, kind), getattr(line, kind)) for kind in (_ORDER, _CONTENT, _OUTPUT))
            kind = next((kind for kind, then, now in pairs if then and now and then != now), None)
            kind = kind if before.place == line.place else _PLACE
            if kind is None:
                # What was logged right before the first one is not known.
                self.num_logged_otherwise += self.num_repeated > 0 and before.logged != line.logged
                self.num_repeated += 1
                if not self.known:
                    self._on_end(self, None)
            elif self._on_end(self, self._difference(kind, before, line)):
                self.known = {}
                self._record.clear()  # what comes after it differs, too
            else:
                self._is_refused = True
                return False
        return True

    def _difference(self, kind: str, before: BatchLine, now: BatchLine) -> NamedDifference:
        both = (before, now)
        values = [self._place_of(one) if kind == _PLACE else f"{getattr(one, kind):08x}" for one in both]
        told = f"{self._place_of(now)} {_TOLD[kind]} than in process {before.process}"
        return NamedDifference(f"repeated.{kind}", f"{told}: {values[0]} then, {values[1]} now")

    def _place_of(self, line: BatchLine) -> str:
        place = f"batch {line.batch} of epoch {line.epoch}"
        if not line.evaluated:
            return place
        run = f"the validation run after {place}" if self._function == FIT else self._function
        return f"batch {line.evaluated - 1} of {run}"

    def _end_known(self) -> None:
        """Say how many batches of earlier processes did not come."""
        if self.known and not self._is_refused:
            self._on_end(self, None)
        self.known = {}

    def _before(self, line: BatchLine) -> BatchLine | None:
        """Return what an earlier process has run in the place of a batch, or instead of it."""
        found, number = self.known.pop(line.place, None), _number_of(line)
        # A training batch whose number is missing was left out by request.
        following = next((one for one in self.known.values() if one.evaluated or _number_of(one) >= number), None)
        if following is None:
            return found
        if _number_of(following) < number:  # its evaluation had more batches, unless the clock decides when it comes
            return found if getattr(self._trainer, "val_check_batch", 0) is None else following
        is_another = _number_of(following) == number or (line.evaluated and self.num_repeated)
        return following if found is None and is_another else found


def _number_of(line: BatchLine) -> tuple[int, int]:
    return line.number, line.evaluated


_MAX_PENDING = 8


def _tensors(output: object) -> list[Tensor]:
    """Return the loss that a step returned: what is next to it may depend on the clock. Without one, all tensors."""
    if isinstance(output, Mapping):
        output = [output["loss"]] if output.get("loss") is not None else [*output.values()]
    return [one for one in output if isinstance(one, Tensor)] if isinstance(output, (list, tuple)) else []


def _on_the_way(returned: list[Tensor]) -> tuple[Callable[[], bool], list[Tensor]]:
    """Copy tensors from a device, without a wait. Return what says whether they have arrived, and the copies."""
    if any(one.device.type not in ("cpu", "cuda") or not is_readable(one) for one in returned):
        return lambda: True, []
    copies = [
        torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
        for one in map(_few_of, returned)
    ]
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query, copies


def _few_of(tensor: Tensor) -> Tensor:
    """Return of a large tensor what is at its beginning, middle, and end: a copy of all of it would take time."""
    flat, num = tensor.detach().reshape(-1), _MAX_BYTES // tensor.element_size()
    middle = len(flat) // 2
    return flat if len(flat) <= 3 * num else torch.cat((flat[:num], flat[middle : middle + num], flat[-num:]))


def sampled_digest(value: object, digest: int = 0) -> int:
    """Return a checksum of the values in a batch; of a large tensor, of those at its beginning, middle, and end."""
    if isinstance(value, Tensor):
        try:
            if value.is_cpu and value.is_contiguous() and (num_bytes := value.nbytes) <= _MAX_BYTES:
                address = value.data_ptr()  # 0 if it has no memory
                return crc32(_bytes(num_bytes).from_address(address), digest) if address else digest
            return _of_others(value, digest)
        except (RuntimeError, TypeError):  # it is sparse or nested
            return digest
    if isinstance(value, (list, tuple)):
        for one in value[:_MAX_ITEMS]:
            digest = sampled_digest(one, digest)
        return digest
    if isinstance(value, Mapping):
        return sampled_digest([*value.values()], digest)
    return crc32(repr(value).encode("utf-8", "surrogatepass"), digest) if isinstance(value, _SHOWN) else digest


@functools.cache  # making a type takes as long as a checksum
def _bytes(num: int) -> type[Array[c_char]]:
    return c_char * num


def _of_others(tensor: Tensor, digest: int) -> int:
    """Return a checksum of a tensor that is large, has gaps, or is elsewhere."""
    if not tensor.is_cpu:
        return digest
    if not tensor.is_contiguous():
        step = -(-tensor.numel() // _NUM_SAMPLED)
        tensor = tensor.detach()[:: min(step, len(tensor))].contiguous()
    num_bytes, address = tensor.nbytes, tensor.data_ptr()
    if num_bytes <= 3 * _MAX_BYTES:
        return crc32(_bytes(num_bytes).from_address(address), digest) if address else digest
    for at in (0, num_bytes // 2, num_bytes - _MAX_BYTES):
        digest = crc32(_bytes(_MAX_BYTES).from_address(address + at), digest)
    return digest
