"""The one place where a boundary happens: stop, autosave, capture, in this order, before the next batch is fetched."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import swap_of_validation_undone
from lightning_faulttolerant.trainer.autosave import Autosaver
from lightning_faulttolerant.trainer.budget import Budget
from lightning_faulttolerant.trainer.capture import Capture, RunState
from lightning_faulttolerant.trainer.hook_saves import HookSaves
from lightning_faulttolerant.trainer.position import BOUNDARY, VALIDATION, position_of
from lightning_faulttolerant.trainer.ranks.group import Ranks
from lightning_faulttolerant.trainer.save_hook import overrides_save_hook
from lightning_faulttolerant.trainer.stop import Agreement, StopSignals, stopped_by
from lightning_faulttolerant.trainer.strategy import Loaders


class Boundary:
    """What is done between two training batches, and at the start of a validation run.

    Args:
        trainer: Whose fit it is.
        loaders: Its loaders.
        run_state: Reads the state for a capture.
        autosaver: Writes autosaves.
        stop: The stop signals.
        agreement: How the ranks agree on a stop.
        ranks: Those ranks.
        overhead_budget: Share of the time that captures may take.
        hook_saves: Knows whether somebody needs one at each boundary all the same.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        loaders: Loaders,
        run_state: RunState,
        autosaver: Autosaver,
        stop: StopSignals,
        agreement: Agreement,
        ranks: Ranks,
        overhead_budget: float,
        hook_saves: HookSaves,
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._run_state = run_state
        self._autosaver = autosaver
        self._stop = stop
        self._agreement = agreement
        self._ranks = ranks
        self._budget = Budget(overhead_budget)
        self._hook_saves = hook_saves
        self.fetches_from_workers = loaders.has_workers()
        """Whether batches come from other processes: each fetch is to be noted, in `StopSignals.fetch_began`."""
        self._handed_out = -1
        self.capture: Capture | None = None

    def before_batch(self) -> None:
        """Pass a boundary. In a run that is asked to stop it is the last."""
        signum = self._agreement.stop_signal(self._stop.requested)
        if signum is not None:
            self._save_for_stop()
            raise stopped_by(signum, str(position_of(self._trainer, BOUNDARY)))
        now = self._budget.now()
        if self._is_due(now):
            self._autosaver.save_due(position_of(self._trainer, BOUNDARY))
        if now >= self._budget.next_at or self._hook_saves.wants_captures:
            began = self._budget.now()
            self.capture = self._run_state.capture(position_of(self._trainer, BOUNDARY))
            self._budget.spend(began)
        if self.fetches_from_workers:
            self._handed_out = self._loaders.num_handed_out()

    def _is_due(self, now: float) -> bool:
        is_due = now >= self._autosaver.due_at and self._autosaver.is_due()
        return is_due if self._autosaver.counts_steps else bool(self._ranks.from_first("due", is_due))

    def before_validation(self) -> None:
        """Keep the state of the start of a validation run: whatever ends the run inside it resumes from there."""
        self.capture = self._run_state.capture(position_of(self._trainer, VALIDATION))
        self._handed_out = -1

    def before_validation_batch(self) -> None:
        """Stop inside a validation run, if it was asked for and the run's start can be saved."""
        signum = self._agreement.stop_signal(self._stop.requested)
        if signum is not None and self.capture is not None:
            with self._stop.saving():
                is_saved = self._save_capture(self.capture)
            if is_saved:
                raise stopped_by(signum, str(self.capture.position))
        self._stop.fetch_began = time.monotonic()

    def save_interrupted(self) -> bool:
        """Save what can be saved of a run that an exception ended; return whether a state was saved.

        Nothing is saved where parameters have moved since the last capture: the last autosave is a right state.
        """
        if self._ranks.num_ranks > 1:  # the others may be anywhere
            return False
        if self._is_waiting_for_workers():
            self._autosaver.save(position_of(self._trainer, BOUNDARY))
            return True
        if self.capture is None or self.capture.position == self._autosaver.saved:
            return False
        return self._save_capture(self.capture)

    def _save_capture(self, capture: Capture) -> bool:
        """Save `capture`, if what it needs of now is as it was then; return whether it was saved.

        It is not where somebody overrides ``on_save_checkpoint``: what it adds would be of now, not of the capture.
        """
        if overrides_save_hook(self._trainer):
            return False
        as_they_are: AbstractContextManager[None] = nullcontext()
        swapped_back = [swap_of_validation_undone(self._trainer)] if capture.position.where == VALIDATION else []
        for weights in (as_they_are, *swapped_back):
            with weights:
                if capture.is_current(self._trainer):
                    self._autosaver.save_capture(capture)
                    return True
        return False

    def _is_waiting_for_workers(self) -> bool:
        # Until its batch arrives nothing has happened behind the boundary: no index was drawn either.
        if not compat.fetches_at_the_boundary(self._trainer):
            return False
        return self._stop.broke_fetch and self._handed_out == self._loaders.num_handed_out()

    def _save_for_stop(self) -> None:
        with self._stop.saving():
            self._autosaver.save_unless_saved(position_of(self._trainer, BOUNDARY))
