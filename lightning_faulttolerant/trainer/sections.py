"""The sections of a fit or an evaluation: what a supervising process learns of them, and the time that they take.

The process is ``lightning-faulttolerant run``, or a watcher that this one starts, if `HangWatch` asks
for it. If there is neither, nothing is done. It learns what this one is doing, its autosaves, and its failure, with the
batch in which the exception was raised.

The time that this rank spends itself on data, steps, evaluation, and saves tells which ranks are slow. Only Python's
clock is read, a few times a batch: no device is synchronized, and no rank waits for another. The times of all ranks
travel with the states that a save gathers anyway.

A step counts without its backward pass, and without DDP's copy of the buffers before its forward pass: there, ranks
wait for each other. On a GPU, a step is what Python does until it has queued the work: a GPU that is itself slow can't
be told from here.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import RanksLostError, TrainingStopped
from lightning_faulttolerant.loader.iteration import Iteration
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.records.history import NUM_SAVES, OwnSeconds, SlowRank, slow_ranks
from lightning_faulttolerant.supervision import heartbeats as kinds
from lightning_faulttolerant.supervision.heartbeats import (
    Heartbeat,
    Saved,
    TrainingFailure,
    forget_failure,
    write_failure,
)
from lightning_faulttolerant.supervision.watch import ExitSignal, StackHandler, start_watcher
from lightning_faulttolerant.trainer.compat import num_completed, step_fetches
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION, Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import FIT, TrainerPosition, function_of, loop_of, num_evaluated
from lightning_faulttolerant.trainer.ranks.compat import SYNC_BUFFERS
from lightning_faulttolerant.trainer.settings import Options

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class OwnTimes:
    """The times of one rank in one fit. The code around fetches writes `fetch_began` and `data` itself, for speed."""

    __slots__ = (
        "_began",
        "_evaluation",
        "_evaluation_began",
        "_latest",
        "_save",
        "_taken",
        "_together",
        "data",
        "data_taken",
        "fetch_began",
        "slow",
        "steps",
    )

    def __init__(self) -> None:
        self.fetch_began = 0.0
        """When the fetch in progress began; 0 if there is none."""
        self.data = 0.0
        """How long training has waited for data."""
        self.data_taken = 0.0
        """How long it had waited for data when the last state was taken."""
        self.steps = 0.0
        """How long the batches took, each from its fetch to the end of its step; with several ranks."""
        self.slow: tuple[SlowRank, ...] = ()
        """The ranks that were slow over the last three saves, on rank 0."""
        self._evaluation = self._evaluation_began = self._save = self._together = 0.0
        self._began = perf_counter()
        self._taken: OwnSeconds = (0.0, 0.0, 0.0, 0.0)
        self._latest: deque[tuple[Sequence[OwnSeconds], float]] = deque(maxlen=NUM_SAVES)

    def begin_evaluation(self) -> None:
        """Note that a validation run begins or continues."""
        self._evaluation_began = perf_counter() - self._save

    def end_evaluation(self) -> None:
        """Note that its last batch is done. What follows may wait for other ranks."""
        if self._evaluation_began:
            self._evaluation += perf_counter() - self._save - self._evaluation_began
        self._evaluation_began = 0.0

    def timed(self, work: Callable[[], _T]) -> _T:
        """Do a part of a save for which this rank waits for no other, and return its result."""
        began = perf_counter()
        try:
            return work()
        finally:
            self._save += perf_counter() - began

    def apart(self, original: Method) -> Method:
        """Return a method whose time is no part of a step: ranks wait for each other in it."""

        def together(*args: object, **kwargs: object) -> object:
            began = perf_counter()
            result = original(*args, **kwargs)
            self._together += perf_counter() - began
            return result

        return together

    def take(self) -> OwnSeconds:
        """Return what this rank has spent itself since the last call."""
        now = (self.data, max(self.steps - self.data - self._together, 0.0), self._evaluation, self._save)
        before, self._taken = self._taken, now
        return tuple(one - other for one, other in zip(now, before, strict=True))  # type: ignore[return-value]

    def hear(self, of_ranks: Sequence[OwnSeconds]) -> None:
        """Receive what all ranks have spent since the last save, on rank 0."""
        began, self._began = self._began, perf_counter()
        if not any(own[:3] != (0.0, 0.0, 0.0) for own in of_ranks):
            return  # the first save of a fit comes before its first batch
        self._latest.append((of_ranks, self._began - began))
        self.slow = ()
        if len(self._latest) == NUM_SAVES:
            sums = [
                tuple(map(math.fsum, zip(*own, strict=True))) for own in zip(*(o for o, _ in self._latest), strict=True)
            ]
            self.slow = slow_ranks(sums, math.fsum(seconds for _, seconds in self._latest))  # type: ignore[arg-type]


def follow_steps(trainer: Trainer, patches: Patches, times: OwnTimes) -> None:
    """Measure steps and backward passes, if there are other ranks to compare with.

    Args:
        trainer: The trainer that runs the fit.
        patches: Undoes it.
        times: Receives the times.
    """

    def advancing(original: Method) -> Method:
        def advance(data_fetcher: object) -> None:
            began = perf_counter()
            original(data_fetcher)
            times.steps += perf_counter() - began

        return advance

    if trainer.world_size > 1:
        patches.wrap(trainer.fit_loop.epoch_loop, "advance", advancing)
        patches.wrap(trainer.strategy, "backward", times.apart)


def follow_buffers(trainer: Trainer, patches: Patches, times: OwnTimes) -> None:
    """Measure how long DDP copies buffers before each forward pass, once it exists.

    Args:
        trainer: The trainer that runs the fit.
        patches: Undoes it.
        times: Receives the times.
    """
    if isinstance(trainer.strategy.model, DistributedDataParallel):
        patches.wrap(trainer.strategy.model, SYNC_BUFFERS, times.apart)


def failure_of(trainer: Trainer, loaders: Loaders, exception: BaseException, *, has_begun: bool) -> TrainingFailure:
    """Return what the supervisor needs to know of an exception that ends a fit or an evaluation.

    Args:
        trainer: The trainer that runs it.
        loaders: Its loaders.
        exception: The exception.
        has_begun: Whether the first batch has begun.
    """
    function = function_of(trainer)
    is_evaluating = has_begun and (function != FIT or trainer.validating)
    batch = num_completed(trainer) if function == FIT else 0
    stage = TRAIN if not is_evaluating else VALIDATION if function == FIT else function
    progress = (loop_of(trainer) if is_evaluating else trainer.fit_loop.epoch_loop).batch_progress.current
    is_fetching = progress.ready == progress.completed  # the next one is ready once it is fetched
    evaluated = progress.ready - (0 if is_fetching else 1) if is_evaluating else None
    samples: dict[str, list[object]] = {}
    if has_begun and not (stage == TRAIN and (loaders.prefetches.is_on or step_fetches(trainer))):
        samples = dict(_samples(loaders, stage, is_fetching=is_fetching))
    return TrainingFailure(
        kind=type(exception).__name__,
        text=str(exception),
        function=function,
        epoch=trainer.current_epoch if function == FIT else 0,
        batch=batch if has_begun else None,
        evaluated=evaluated,
        samples=samples,
        rank=trainer.global_rank,
        time=time.time(),
        is_lost=isinstance(exception, RanksLostError),
    )


def _samples(loaders: Loaders, stage: str, *, is_fetching: bool) -> Iterator[tuple[str, list[object]]]:
    """Yield the indices of the batch in progress for each loader that has an index sampler."""
    for place, tracker in loaders.trackers.items():
        if not place.startswith(stage) or not isinstance(tracker, TrackedLoader) or tracker.is_gone:
            continue
        iteration = tracker.iteration
        indices = iteration and _indices(iteration, iteration.num_out - (0 if is_fetching else 1))
        if indices:
            yield place, indices


def _indices(iteration: Iteration, number: int) -> list[object] | None:
    """Return the indices of a batch of an iteration, if they are still known."""
    batch: Any = iteration.record.batch(number)
    if batch is None:
        return None
    if hasattr(batch, "tolist"):
        batch = batch.tolist()
    listed = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    return [index if isinstance(index, (int, str)) else repr(index)[:200] for index in listed]


_LAST = 2**62


class Supervision:
    """The side of a fit or an evaluation on which it is supervised.

    Args:
        trainer: The trainer that runs it.
        options: The callback's options.
        loaders: Its loaders.
    """

    def __init__(self, trainer: Trainer, options: Options, loaders: Loaders) -> None:
        self._trainer = trainer
        self._options = options
        self._loaders = loaders
        # They stay the same objects when a fit is resumed, and the trainer's properties take longer to ask.
        self._epochs = trainer.fit_loop.epoch_progress.current
        self._batches = trainer.fit_loop.epoch_loop.batch_progress.current
        self._directory = os.environ.get(kinds.DIRECTORY_VARIABLE, "")
        if not os.path.isdir(self._directory):
            self._directory = ""
        self.is_in_run = bool(self._directory)
        """Whether ``lightning-faulttolerant run`` has started this process."""
        self.heartbeat: Heartbeat | None = None
        """The heartbeat; ``None`` if nobody watches."""
        self.number = 0
        """The number of the fit or evaluation in its script."""
        self.has_begun = False
        """Whether the first batch has begun."""
        self._stacks: StackHandler | None = None
        self._exit_signal: ExitSignal | None = None

    @property
    def _hang(self) -> int:
        return kinds.HANG_NAMES.index(self._options.action or "")

    def begin(self) -> None:
        """Note that the fit or evaluation begins, if the supervisor is known already."""
        if self.is_in_run:
            forget_failure(self._directory)
            self._open(self._directory, "")

    @property
    def wants_watcher(self) -> bool:
        """Whether this run has to start a watcher itself."""
        return not self.is_in_run and self._hang in (kinds.REPORT, kinds.STOP)

    def connect(self, number: int, directory: str, token: str) -> None:
        """Note what all ranks know after they are connected.

        Args:
            number: The number of the fit or evaluation in its script.
            directory: The directory of the run, or its URL.
            token: A unique text that all ranks share, in the name of the directory for heartbeats.
        """
        self.number = number
        if self.is_in_run:
            self._open(self._directory, directory)
        elif self.wants_watcher and token:
            name = str(kinds.shared_memory() / f"{kinds.PREFIX}{token}")
            self._open(name, directory)
            if self.heartbeat is not None and self._hang == kinds.STOP:
                self._exit_signal = ExitSignal()
            if self._trainer.local_rank == 0 and os.path.isdir(name):
                _start(name)

    def _open(self, name: str, directory: str) -> None:
        """Open the heartbeat. Without it, this process is not watched, on which no collective depends."""
        self._directory = name
        try:
            self._describe(name, directory)
        except OSError as error:
            _log.warning("A hang of this process is not noticed, because its heartbeat can't be written: %s", error)
            kinds.close_heartbeat(name)
            self.heartbeat = None

    def _describe(self, name: str, directory: str) -> None:
        if not self.is_in_run:
            os.makedirs(name, mode=0o700, exist_ok=True)
        before, self.heartbeat = self.heartbeat, kinds.heartbeat_in(name)
        timeout = int(1000 * (self._options.timeout or 0))
        rank, num_ranks = self._trainer.global_rank, self._trainer.world_size
        self.heartbeat.describe(
            rank=rank, num_ranks=num_ranks, hang=self._hang, hang_timeout_ms=timeout, directory=directory
        )
        if self.heartbeat is not before:
            self.in_batch(kinds.SETUP)
        if self._stacks is None and self._hang != kinds.OFF:
            self._stacks = StackHandler(name)

    # What the fit or the evaluation is doing.

    def in_section(self, section: int) -> None:
        """Note that a section begins."""
        if self.heartbeat is not None:
            self.heartbeat.begin(section)

    def in_batch(self, section: int = kinds.TRAINING_BATCH) -> None:
        """Note that a training batch begins."""
        if self.heartbeat is not None:
            self.heartbeat.begin_batch(section, self._epochs.completed, self._batches.completed)

    def in_evaluation_batch(self) -> None:
        """Note that a batch of an evaluation begins."""
        if self.heartbeat is not None:
            epoch, batch, evaluated = self._epochs.completed, self._batches.completed, num_evaluated(self._trainer)
            self.heartbeat.begin_batch(kinds.EVALUATION_BATCH, epoch, batch, evaluated)

    def start(self, position: TrainerPosition | None) -> None:
        """Note that the first batch begins, and the position that it resumes from. Later calls do nothing."""
        if self.has_begun:
            return
        self.has_begun = True
        self.in_batch(kinds.FIRST_BATCH)
        if position is not None:
            self.saved(position)

    def saved(self, position: TrainerPosition, path: str = "") -> None:
        """Note that an autosave exists."""
        if self.heartbeat is not None:
            self.heartbeat.note_saved(_in_order(self.number, position))

    # The end.

    def fail(self, exception: BaseException) -> None:
        """Tell the supervisor which exception ends this process."""
        self.in_section(kinds.TEARDOWN)
        if not self.is_in_run or isinstance(exception, (TrainingStopped, KeyboardInterrupt)):
            return
        try:
            failure = failure_of(self._trainer, self._loaders, exception, has_begun=self.has_begun)
            write_failure(self._directory, failure)
        except Exception:  # noqa: BLE001 - the user must see the original exception
            _log.exception("The exception that ends this process could not be reported to the run's supervisor.")

    def close(self) -> None:
        """Give everything back. May be called twice."""
        for handler in (self._stacks, self._exit_signal):
            if handler is not None:
                handler.close()
        self._stacks = self._exit_signal = None
        self.in_section(kinds.OUTSIDE)
        if self.heartbeat is not None and not self.is_in_run:
            kinds.close_heartbeat(self._directory)  # its watcher ends when no process has any
        self.heartbeat = None


def _start(name: str) -> None:
    """Start the watcher. Without one, the run is not worse off than without the argument."""
    try:
        start_watcher(name)
    except (OSError, NotImplementedError) as error:  # not each system can start a process in a new session
        _log.warning("The watcher for hangs could not be started, so a hang is not noticed: %s", error)
        shutil.rmtree(name, ignore_errors=True)


def _in_order(number: int, position: TrainerPosition) -> Saved:
    if position.is_finished:
        return number, _LAST, 0, 0
    evaluated = position.num_evaluated  # a validation run comes before the boundary after it
    return number, position.epoch, position.batch, _LAST if evaluated is None else evaluated
