"""What a fit or an evaluation tells the process that supervises it: what it is doing, its autosaves, and its failure.

That process is ``lightning-faulttolerant run``, or a watcher that this one starts, if `FaultTolerance(hang=...)` asks
for it. If there is neither, nothing is done. A failure names the batch in which the exception was raised.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import RanksLostError, TrainingStopped
from lightning_faulttolerant.loader.iteration import Iteration
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.supervision import marks as kinds
from lightning_faulttolerant.supervision.failures import TrainingFailure, forget_failure, write_failure
from lightning_faulttolerant.supervision.marks import Marks, Saved
from lightning_faulttolerant.supervision.stacks import ExitSignal, StackHandler
from lightning_faulttolerant.supervision.watch import start_watcher
from lightning_faulttolerant.trainer.compat import num_completed, step_fetches
from lightning_faulttolerant.trainer.evaluation.compat import num_evaluated
from lightning_faulttolerant.trainer.functions import FIT, function_of, loop_of
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION, Loaders
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.settings.options import Options


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
    record = iteration.record
    begin = record.handed_out - len(record.recent)
    if not begin <= number < record.handed_out:
        return None
    batch = record.recent[number - begin]
    if hasattr(batch, "tolist"):
        batch = batch.tolist()
    listed = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    return [index if isinstance(index, (int, str)) else repr(index)[:200] for index in listed]


_log = logging.getLogger(__name__)
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
        self.marks: Marks | None = None
        """The marks; ``None`` if nobody watches."""
        self.number = 0
        """The number of the fit or evaluation in its script."""
        self.has_begun = False
        """Whether the first batch has begun."""
        self._stacks: StackHandler | None = None
        self._exit_signal: ExitSignal | None = None

    @property
    def _hang(self) -> int:
        return kinds.HANG_NAMES.index(self._options.hang or "")

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
            token: A unique text that all ranks share, in the name of the directory for the marks.
        """
        self.number = number
        if self.is_in_run:
            self._open(self._directory, directory)
        elif self.wants_watcher and token:
            name = str(kinds.shared_memory() / f"{kinds.PREFIX}{token}")
            self._open(name, directory)
            if self.marks is not None and self._hang == kinds.STOP:
                self._exit_signal = ExitSignal()
            if self._trainer.local_rank == 0 and os.path.isdir(name):
                _start(name)

    def _open(self, name: str, directory: str) -> None:
        """Open the marks. Without them this process is not watched, on which no collective depends."""
        self._directory = name
        try:
            self._mark(name, directory)
        except OSError as error:
            _log.warning("A hang of this process is not noticed, because its marks can't be written: %s", error)
            kinds.close_marks(name)
            self.marks = None

    def _mark(self, name: str, directory: str) -> None:
        if not self.is_in_run:
            os.makedirs(name, mode=0o700, exist_ok=True)
        before, self.marks = self.marks, kinds.marks_in(name)
        timeout = int(1000 * (self._options.hang_timeout or 0))
        rank, num_ranks = self._trainer.global_rank, self._trainer.world_size
        self.marks.describe(
            rank=rank, num_ranks=num_ranks, hang=self._hang, hang_timeout_ms=timeout, directory=directory
        )
        if self.marks is not before:
            self.in_batch(kinds.SETUP)
        if self._stacks is None and self._hang != kinds.OFF:
            self._stacks = StackHandler(name)

    # What the fit or the evaluation is doing.

    def in_section(self, section: int) -> None:
        """Note that a section begins."""
        if self.marks is not None:
            self.marks.begin(section)

    def in_batch(self, section: int = kinds.TRAINING_BATCH) -> None:
        """Note that a training batch begins."""
        if self.marks is not None:
            self.marks.begin_batch(section, self._epochs.completed, self._batches.completed)

    def in_evaluation_batch(self) -> None:
        """Note that a batch of an evaluation begins."""
        if self.marks is not None:
            epoch, batch, evaluated = self._epochs.completed, self._batches.completed, num_evaluated(self._trainer)
            self.marks.begin_batch(kinds.EVALUATION_BATCH, epoch, batch, evaluated)

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
        if self.marks is not None:
            self.marks.note_saved(_in_order(self.number, position))

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
            _log.exception("The supervisor of this run could not be told of an exception.")

    def close(self) -> None:
        """Give everything back. May be called twice."""
        for handler in (self._stacks, self._exit_signal):
            if handler is not None:
                handler.close()
        self._stacks = self._exit_signal = None
        self.in_section(kinds.OUTSIDE)
        if self.marks is not None and not self.is_in_run:
            kinds.close_marks(self._directory)  # its watcher ends when no process has any
        self.marks = None


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
