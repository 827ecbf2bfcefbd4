"""What the session of a fit and that of an evaluation have in common: what they hold, how they begin, how they end.

If an exception ends them, what can still be saved is saved, and the exception is never hidden.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_faulttolerant.errors import NotExactError, NotRepeatedError, TrainingStopped
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.supervision.heartbeats import END_OF_EPOCH, SETUP
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.identity.starts import start_of_process
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches, then
from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition, function_of, position_of
from lightning_faulttolerant.trainer.process import is_manual
from lightning_faulttolerant.trainer.ranks.strategies import apart_from_earlier_ranks
from lightning_faulttolerant.trainer.resume.proof import Proving
from lightning_faulttolerant.trainer.resume.repeating import edited, repetition_of
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from lightning_faulttolerant.trainer.sections import Supervision
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.signals import say_unsaved
from lightning_faulttolerant.trainer.steps.repetition import Repetition
from lightning_faulttolerant.trainer.steps.replay import replay_of, without_saves
from lightning_faulttolerant.trainer.stopping import Stopping


def end_interrupted(
    trainer: Trainer,
    boundary: Boundary | None,
    autosaver: Autosaver,
    exception: BaseException,
    beginning: Beginning,
) -> None:
    """Save what can be saved of a fit that an exception ended, and report it.

    Args:
        trainer: The trainer that runs the fit.
        boundary: The object that saves the fit, or ``None`` if nothing is to be saved.
        autosaver: The fit's autosaver. It may still be writing in the background.
        exception: The exception that ended the fit.
        beginning: Knows what the fit started from, and where it saves.
    """
    autosaver.settle()
    position = position_of(trainer, BOUNDARY)
    has_trained = position.epoch or position.batch
    if isinstance(exception, NotExactError) and beginning.source is None and not has_trained:
        autosaver.set_aside()  # the mended script would be refused: its settings may differ
        return
    is_stop = isinstance(exception, TrainingStopped)
    if boundary is not None and not (is_stop and boundary.is_settled(position)):
        _save(boundary, autosaver, exception)
    if isinstance(exception, TrainingStopped):
        tell_stopped(exception, autosaver.pace.saved, beginning)


def tell_stopped(exception: TrainingStopped, saved: TrainerPosition | None, beginning: Beginning) -> None:
    """Print what is saved of a stopped run, what to type, and where its files are."""
    if isinstance(exception, NotRepeatedError):  # the rank that found it has said what to type
        return
    start, directory = start_of_process(sys.argv, os.environ), beginning.place.directory
    # Somebody typed the command of a launcher or of a job, not that of this process.
    is_unknown = start.is_one_of_many or not os.environ.keys().isdisjoint({"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"})
    command = "run the same command again" if is_unknown else f"type: {start.command.line()}"
    place = "" if saved is not None else f" from {beginning.source or 'the beginning'}"
    what = "This start has saved nothing" if saved is None else f"The state {saved} is saved"
    tell(f"{exception.reason}. {what} in {directory}. To continue{place}, {command}")


def _save(boundary: Boundary, autosaver: Autosaver, exception: BaseException) -> None:
    name, pace = type(exception).__name__, autosaver.pace
    try:
        is_tried = boundary.save_interrupted()
    except Exception as error:  # noqa: BLE001 - the user must see the original exception, and the last autosave exists
        rank_zero_warn(f"{name}: the state could not be saved: {error!r}. The last autosave stays.")
        return
    unsaved = pace.unsaved if is_tried else ""
    if isinstance(exception, TrainingStopped):
        say_unsaved(exception, unsaved)
        return
    kept = f"the state {pace.saved} is saved" if is_tried else f"the last autosave, {pace.saved}, stays"
    kept = "no autosave has been written since this start" if pace.saved is None else kept
    tell(f"{name}: {unsaved or kept}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """The functions that a session calls.

    Args:
        saved: Called with the position and the path of each autosave that is written and verified.
        skipped: Called with epoch and batch of each training batch that is left out, once it is loaded.
    """

    saved: list[Callable[[TrainerPosition, str], None]]
    skipped: list[Callable[[int, int], None]] = field(default_factory=list)


class AnySession(ABC):
    """Everything that this package keeps for the length of one function of the Trainer.

    Args:
        trainer: The trainer that runs it.
        options: The callback's options.
        strict: Whether a loader that can't be resumed exactly is an error; ``None`` if it is only noted.
    """

    def __init__(self, trainer: Trainer, options: Options, *, strict: bool | None) -> None:
        self.trainer = trainer
        self._replay = replay_of(trainer, options.script)
        given = options  # by these, a replay finds the run
        if self._replay is not None:
            options = without_saves(options)
        self._options = options
        seeds = options.worker_rng == "per_sample"
        exactness = Exactness(strict=strict)
        self.loaders = Loaders(trainer, exactness, manual=is_manual(), is_per_sample=seeds)
        self._supervision = Supervision(trainer, options, self.loaders)
        self.stopping = Stopping(trainer, options)
        self._patches = Patches()
        self._files = RunFiles(trainer, self._patches)
        self._beginning = Beginning(trainer, given, self._files, function=function_of(trainer))
        self._notes_fetches = False
        """Whether the fetches of the evaluation in progress are noted."""
        self._repetition: Repetition | None = None
        self.is_open = self._has_finished = False
        self.listeners = Listeners(saved=[self._supervision.saved])

    @property
    @abstractmethod
    def report(self) -> ResumeReport | None:
        """The report of what was restored, if this run resumed."""

    def begin(self) -> None:
        """Choose what the run resumes from. Call this before loggers open their files and callbacks are set up."""
        self._supervision.begin()
        if self._replay is not None:
            self._replay.protect()
        self.choose()
        if self._replay is not None:
            self._replay.redirect()
        if self._beginning.is_connected:
            self._supervise()
        else:
            self._patches.around(self.trainer.strategy, "setup_environment", apart_from_earlier_ranks)
            self._patches.wrap(self.trainer.strategy, "setup_environment", then(self.connect))

    def choose(self) -> None:
        """Open the run on rank 0, and choose there."""
        self._beginning.begin()

    def connect(self) -> None:
        """Connect the ranks, and send the choice to all of them; a collective."""
        self.stopping.connect(self._beginning.connect())
        self._supervise()

    def _supervise(self) -> None:
        place = self._beginning.place
        self._supervision.connect(place.number, place.directory, place.token)

    @abstractmethod
    def open(self, callback: Callback) -> None:
        """Take over the seams. `callback` is the callback that opens this session."""

    @abstractmethod
    def put_part(self, checkpoint: dict[str, object]) -> None:
        """Put our part into a checkpoint that other code is saving."""

    def finish(self) -> None:
        """End a run that finished."""
        self._has_finished = True
        self._beginning.end_fit()
        self._tell_end(None)

    def interrupt(self, exception: BaseException) -> None:
        """End a run that raised an exception. Save what can be saved, and never hide the exception."""
        self._supervision.fail(exception)
        self.stopping.interrupt(exception)
        try:
            self._save_interrupted(exception)
            self.stopping.requeue(exception)
        finally:
            self.loaders.close_workers()
            compat.end_fetching(self.trainer)
            self._tell_end(exception)

    def save_before_batch(self) -> None:  # noqa: B027 - not every session can
        """Save before the next training batch, where a drill requests it; a collective."""

    def save_before_evaluation_batch(self) -> None:  # noqa: B027 - not every session can
        """Save before the next batch of an evaluation, where a drill requests it, if the run can continue there."""

    @abstractmethod
    def _save_interrupted(self, exception: BaseException) -> None:
        """Save what can still be saved, and report where the run continues."""

    def _tell_end(self, exception: BaseException | None) -> None:
        """Report how the run ended; this may wait for a store. Give everything back whatever happens."""
        try:
            self._beginning.end(exception)
        finally:
            self.close()

    def close(self) -> None:
        """Give everything back. A second call does nothing more."""
        with contextlib.ExitStack() as closing:  # each is called, whatever another one raises, and the last one first
            closing.callback(self._supervision.close)  # or what the script does next would count as a hang
            closing.callback(self._beginning.close)
            closing.callback(self._close_own)
            if self._repetition is not None:
                is_refused = self.stopping.refusal is not None
                closing.callback(self._repetition.close, is_finished=self._has_finished, is_refused=is_refused)
            closing.callback(self._files.put_back)
            closing.callback(self.loaders.put_back)
            closing.callback(self.loaders.release_workers)
            closing.callback(self.stopping.close)
            closing.callback(self._patches.undo)  # they wrap those of `Stopping`

    def _note_batches(self, proving: Proving | None, *, is_on: Callable[[], bool] = lambda: True) -> list[str]:
        """Note each batch from now on, and compare those that an earlier process has run, too.

        Args:
            proving: Takes what is repeated, if an earlier process of the run is continued.
            is_on: Says whether the run itself is in progress, and not a finder in the middle of it.

        Returns:
            A line that names the source files of the user's that have changed since the last process, if any.
        """
        if self._replay is None and DRILL_VARIABLE not in os.environ:  # a drill compares its ledgers
            place, patches = self._beginning.place, self._patches
            self._repetition = repetition_of(
                self.trainer, self.loaders, place, proving, self.stopping, patches, life=self._files.mark, is_on=is_on
            )
        return [] if self._repetition is None else edited(self._repetition)

    def _refuse_other_batches(self) -> None:
        """Stop before a save if a rank has found that a repeated batch is another one; a collective."""
        if self._repetition is not None:
            self._repetition.read_arrived()
        self.stopping.stop_if_refused()

    def _begin_fetch(self) -> None:
        """Note that the evaluation in progress fetches a batch."""
        self.stopping.signals.fetch_began = time.monotonic()
        self.loaders.begin_fetch()

    def _wrap_after_evaluation_fetch(self, original: Method) -> Method:
        def after_fetch() -> None:
            if self._notes_fetches:
                self.loaders.end_fetch()
                self.stopping.signals.fetch_began = None
            original()

        return after_fetch

    def _around_evaluation_end(self, original: Method) -> object:
        self._supervision.in_section(self._around_evaluation)
        return original()

    @property
    def _around_evaluation(self) -> int:
        """The section before the first and after the last batch of an evaluation."""
        return SETUP if self.trainer.sanity_checking else END_OF_EPOCH

    @abstractmethod
    def _close_own(self) -> None:
        """Give back what only this kind of session has."""
