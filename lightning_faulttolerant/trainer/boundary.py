"""The boundary: stop, autosave, and capture, in this order, before the next batch is fetched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import swap_of_validation_undone
from lightning_faulttolerant.trainer.evaluation.compat import num_batches_of
from lightning_faulttolerant.trainer.evaluation.validation import CommonPace
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.position import (
    BOUNDARY,
    IN_VALIDATION,
    VALIDATION,
    TrainerPosition,
    num_evaluated,
    position_of,
)
from lightning_faulttolerant.trainer.ranks.agreement import STOP
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.save.autosave import Checkpointer
from lightning_faulttolerant.trainer.save.capture import Capture, take_capture
from lightning_faulttolerant.trainer.save.contents import overrides_save_hook
from lightning_faulttolerant.trainer.signals import stopped_by
from lightning_faulttolerant.trainer.stopping import Stopping


class Captures:
    """The captures of a fit: copies of the state at a boundary, for saves that come later.

    Args:
        trainer: The trainer that runs the fit.
        checkpointer: Reads the state.
    """

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self._trainer = trainer
        self._run_state = checkpointer.run_state
        self._hook_saves = checkpointer.hook_saves
        self._budget = checkpointer.autosaver.pace.budget
        self.last: Capture | None = None
        self.takes_each = False
        """Whether the state before each batch must be captured, whatever that costs."""
        self._validation_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Return whether the budget allows a capture, or a save needs it."""
        return now >= self._budget.capture_at or self._hook_saves.wants_captures

    def begin_validation(self) -> Capture | None:
        """Capture the start of a validation run, if the last such capture is paid for or a save needs it."""
        if not (self.takes_each or self._budget.now() >= self._validation_at or self._hook_saves.wants_captures):
            return None
        taken = self.take(VALIDATION)
        self._validation_at = self._budget.capture_at
        return taken

    def take(self, where: str) -> Capture:
        """Capture the current state."""
        began = self._budget.now()
        self.last = taken = take_capture(self._run_state, position_of(self._trainer, where))
        self._budget.spend_on_capture(began)
        return taken


class FetchesFromWorkers:
    """The fetches of training batches that come from other processes. Each is noted in `StopSignals.fetch_began`.

    Args:
        loaders: The trainer's loaders.
    """

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self._num_handed_out = -1

    def note_boundary(self) -> None:
        """Note how many index batches are drawn at this boundary."""
        self._num_handed_out = self._loaders.num_handed_out()

    def leave_boundary(self) -> None:
        """Note that something else than a fetch comes next."""
        self._num_handed_out = -1

    def have_not_begun(self) -> bool:
        """Return whether no index was drawn since the boundary."""
        return self._num_handed_out == self._loaders.num_handed_out()


class Boundary:
    """The work between two training batches, and at the start of a validation run.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The trainer's loaders.
        checkpointer: Reads the state for a capture, and writes autosaves.
        stopping: Knows whether all ranks have to stop or save.
        ranks: The ranks that train together.
        history: Receives a sign of life now and then.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        loaders: Loaders,
        checkpointer: Checkpointer,
        stopping: Stopping,
        ranks: Ranks,
        history: HistoryWriter,
    ) -> None:
        self._trainer = trainer
        self._run_state = checkpointer.run_state
        self._autosaver = checkpointer.autosaver
        self._stopping = stopping
        self._agreement = stopping.agreement
        self._ranks = ranks
        self._pace = self._autosaver.pace
        self._budget = self._pace.budget
        self._history = history
        self.workers = FetchesFromWorkers(loaders) if loaders.has_workers() else None
        """The fetches from other processes; ``None`` if this process loads its batches itself."""
        self.captures = Captures(trainer, checkpointer)
        self._common: CommonPace | None = None

    def before_batch(self) -> None:
        """Pass a boundary. If a stop was requested, it is the last."""
        wish = self._agreement.at_boundary()
        if wish is not None:
            self._do_together(wish)
        now = self._budget.now()
        kept_steps = self._pace.kept_steps
        if (now >= self._pace.due_at or kept_steps.is_due() or kept_steps.is_retry_due()) and self._autosaver.is_due():
            self._save_due()
        if self.captures.takes_each or self.captures.is_due(now):
            self.captures.take(BOUNDARY)
        if now >= self._history.due_at:
            self._history.alive()
        if self.workers is not None:
            self.workers.note_boundary()

    def _save_due(self) -> None:
        """Save if every rank knows by itself that a save is due. Otherwise rank 0 requests a common boundary."""
        if self._ranks.num_ranks == 1 or self._pace.is_due_by_steps() or self._pace.is_first:
            self._autosaver.save_due(position_of(self._trainer, BOUNDARY))
        elif self._ranks.rank == 0:
            batch, num_batches = compat.num_completed(self._trainer), self._trainer.num_training_batches
            length = self._trainer.accumulate_grad_batches
            known = int(num_batches) if num_batches != float("inf") else 0
            self._agreement.want_save({"batch": batch, "num_batches": known, "length": length})

    def _do_together(self, wish: str) -> None:
        """Do what the ranks have agreed on for this boundary; a collective."""
        position = position_of(self._trainer, BOUNDARY)
        if wish == STOP:
            self._stop_here(position)
        with self._stopping.signals.saving():
            self._autosaver.save_due(position)
        self._stopping.stop_if_wanted(
            str(position), self._pace.unsaved_at(position)
        )  # one may have been requested during the save

    def _stop_here(self, position: TrainerPosition) -> NoReturn:
        self._stopping.stop_if_refused()
        reason = self._stopping.reason
        place = str(position)
        self._pace.is_ending = True
        if self._stopping.save_fits():
            with self._stopping.signals.saving():
                self._autosaver.save_unless_saved(position)
        else:
            seconds_left = max(self._stopping.signals.grace.seconds_left(), 0)
            place += (
                f". This state is not saved: a save takes {self._autosaver.save_seconds:.1f} seconds, and"
                f" {seconds_left:.1f} seconds of the grace period are left"
            )
        self._stopping.end_together()
        raise stopped_by(reason, place, self._pace.unsaved_at(position))

    def before_validation(self) -> None:
        """Capture the start of a validation run within the budget: a fit that ends inside it may have to repeat it."""
        run, self._common = self._run_state.validation, None
        if not run.is_continuing:
            run.begin()
            capture = self.captures.begin_validation()
            if capture is not None:  # what is lost since the last one counts as lost in the run
                run.lost_before = self._run_state.not_carried(capture.state)
        if self.workers is not None:
            self.workers.leave_boundary()

    def before_validation_batch(self) -> None:
        """Pass a boundary inside a validation run. If the run can't be resumed here, its start is saved instead."""
        if self._agreement.at_validation_batch():
            self._stop_before_validation_batch()
        now = self._budget.now()
        if self._ranks.num_ranks > 1:
            self._save_together_in_validation()
        else:
            if now >= self._pace.due_at:
                self._save_due_in_validation()
            if self.captures.is_due(now):
                self._capture_in_validation()
        if now >= self._history.due_at:
            self._history.alive()
        run = self._run_state.validation
        if run.is_ahead:
            run.note_fetch()

    def save_before_validation_batch(self) -> None:
        """Save here, whether or not an autosave is due, if the fit can continue before this batch; a collective."""
        if not self._is_too_early() and self._stopping.all_can(self._can_continue_here()):
            self._save_in_validation(self._autosaver.save_unless_saved)

    def _stop_before_validation_batch(self) -> None:
        if self._stopping.all_can(self._can_continue_here()):
            self.captures.last = None  # the start of the run is older than what is saved now
            with swap_of_validation_undone(self._trainer):
                self._stop_here(position_of(self._trainer, IN_VALIDATION))
        if self.captures.last is not None:
            self._stop_in_validation(self.captures.last)

    def _is_too_early(self) -> bool:
        """Return whether nothing is saved yet: a fit that begins writes its first autosave between training batches."""
        return self._pace.is_first and not self._run_state.validation.is_continuing

    def _saves_in_validation(self) -> bool:
        """Return whether this run has autosaves."""
        return not self._autosaver.counts_steps and not self._is_too_early()

    def _save_due_in_validation(self) -> None:
        """Save if an autosave is due by time."""
        if self._saves_in_validation() and self._autosaver.is_due() and self._can_continue_here():
            self._save_in_validation()

    def _save_in_validation(self, save: Callable[[TrainerPosition], None] | None = None) -> None:
        with swap_of_validation_undone(self._trainer):
            (save or self._autosaver.save_due)(position_of(self._trainer, IN_VALIDATION))
        self.captures.last = None  # it is older than the autosave

    def _save_together_in_validation(self) -> None:
        """Save before a batch that all ranks reach, if an autosave is due by rank 0's clock; a collective."""
        if not self._saves_in_validation():
            return
        batch = num_evaluated(self._trainer)
        if self._common is None:
            num_batches = num_batches_of(compat.validation_loop(self._trainer))
            self._common = CommonPace(self._ranks, batch, num_batches)
        if not self._common.is_here(batch):
            return
        is_due = self._ranks.rank == 0 and self._budget.now() >= self._pace.due_at and self._autosaver.is_due()
        if self._ranks.from_first("due", is_due) and self._stopping.all_can(self._can_continue_here()):
            self._save_in_validation()
        self._common.meet_again(batch, self._pace.due_at - self._budget.now())

    def _can_continue_here(self, taken: Capture | None = None) -> bool:
        """Return whether a fit could continue before this batch of the validation run. If not, it repeats the run.

        Args:
            taken: A capture of this instant, if there is one.
        """
        run = self._run_state.validation
        if run.can_be_resumed and taken is None:
            run.check_loaders()
        if run.can_be_resumed:
            run.check_objects(self._run_state.not_carried(None if taken is None else taken.state))
        return run.can_be_resumed

    def _capture_in_validation(self) -> None:
        if self._run_state.validation.can_be_resumed:
            before = self.captures.last
            try:
                with swap_of_validation_undone(self._trainer):
                    taken = self.captures.take(IN_VALIDATION)
            except NotExactError as error:  # a loader can't report its place
                self._run_state.validation.repeat(str(error))
                return
            if not self._can_continue_here(taken):
                self.captures.last = before

    def _stop_in_validation(self, capture: Capture) -> None:
        self._pace.is_ending = True
        with self._stopping.signals.saving():
            is_over = self._save_capture(capture)
        if is_over:
            self._stopping.end_together()
            place = f"{capture.position}. The next start repeats it: {self._run_state.validation.reason}"
            raise stopped_by(self._stopping.reason, place, self._pace.unsaved_at(capture.position))

    def is_settled(self, position: TrainerPosition) -> bool:
        """Return whether a stop at this position has nothing left to save."""
        pace = self._pace
        return self._stopping.is_too_late or pace.saved == position or bool(pace.unsaved_at(position))

    def save_interrupted(self) -> bool:
        """Save what can be saved of a run that an exception ended. Return whether a save was tried.

        Nothing is saved if parameters have moved since the last capture: the last autosave is still correct.
        """
        self._pace.is_ending = True
        if self._ranks.num_ranks > 1 or self._stopping.refusal is not None:  # the others may be anywhere
            return False
        if self._is_waiting_for_workers():
            self._autosaver.save(position_of(self._trainer, BOUNDARY))
            return True
        capture = self.captures.last
        if capture is None or capture.position == self._pace.saved:
            return False
        return self._save_capture(capture)

    def write_incident(self, name: str, ranks: Ranks) -> str:
        """Write the last capture to a file of an incident, and return why that is not possible; else an empty text.

        Args:
            name: The name of the file.
            ranks: Gather the states of all ranks, without a collective.

        Raises:
            Exception: If the file can't be written.
        """
        if self._autosaver.is_sharded:
            return "the strategy saves in shards"
        if overrides_save_hook(self._trainer):
            return "on_save_checkpoint, or the data module's state_dict, would add values of a later moment"
        if self.captures.last is None:
            return "no state was captured after the last autosave"
        save = partial(self._autosaver.write_incident, name=name, ranks=ranks)
        if not self._save_capture(self.captures.last, save, agree=bool):
            return "parameters or optimizer states have changed since"
        return ""

    def _save_capture(
        self,
        capture: Capture,
        save: Callable[[Capture], None] | None = None,
        *,
        agree: Callable[[bool], bool] | None = None,
    ) -> bool:
        """Save `capture` if parameters and optimizer states have not changed since. Return whether a save was tried.

        None is tried if user code overrides ``on_save_checkpoint``, or the data module's ``state_dict``: they would add
        values of now, not of then.
        """
        as_they_are: AbstractContextManager[None] = nullcontext()
        is_swapped = capture.position.where in (VALIDATION, IN_VALIDATION)
        swapped_back = [swap_of_validation_undone(self._trainer)] if is_swapped else []
        for weights in (as_they_are, *swapped_back):
            with weights:
                can = not overrides_save_hook(self._trainer) and capture.is_current(self._trainer)
                if (agree or self._stopping.all_can)(can):
                    (save or self._autosaver.save_capture)(capture)
                    return True
        return False

    def _is_waiting_for_workers(self) -> bool:
        # Until the batch arrives, nothing has happened since the boundary: not even an index was drawn.
        if self.workers is None or not compat.fetches_at_the_boundary(self._trainer):
            return False
        return self._stopping.signals.broke_fetch and self.workers.have_not_begun()
