"""The epoch that a run resumes in: the state is restored, then Lightning's loops do the work that was still owed.

This module does not redo the work of the loops. Lightning's own code closes the batch, finishes the validation run and
ends the epoch, as in an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun, zeroed
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    EPOCH_END,
    EPOCH_START,
    IN_VALIDATION,
    VALIDATION,
    VALIDATION_END,
)
from lightning_faulttolerant.trainer.resume.progress_bar import begin_evaluation, begin_next
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.save.hook_saves import MODULE
from lightning_faulttolerant.trainer.save.run_state import VALIDATION_RUN, RunState, named_callbacks


class ResumedEpoch:
    """Starts one epoch in its middle, or at one of its ends.

    Args:
        trainer: The trainer that runs the fit.
        resume: The resume that restores the state.
        loaders: The fit's loaders.
        run_state: Restores the state of the fit.
        where: Where in the epoch the checkpoint was taken.
    """

    def __init__(self, trainer: Trainer, resume: Resume, loaders: Loaders, run_state: RunState, *, where: str) -> None:
        self._trainer = trainer
        self._resume = resume
        self._loaders = loaders
        self._run_state = run_state
        self._where = where
        self._owed = list(resume.owed("behind") or ())
        self._before_validation = resume.owed("before_validation")
        self._is_ending = False
        # A validation run or the end of the epoch may still be owed when all steps are done.
        self.put_limit_back = compat.lift_step_limit(trainer)

    def start_fit(self, original: Callable[[], None]) -> None:
        """Replace the fit loop's ``on_run_start``. While it runs, `current_epoch` is what it is without a resume."""
        progress: Any = self._trainer.fit_loop.epoch_progress.current
        processed, completed = progress.processed, progress.completed
        if self._where == EPOCH_END:
            progress.processed += 1
        original()
        progress.processed, progress.completed = processed, completed

    def reset(self, original: Callable[[], None]) -> None:
        """Replace the epoch loop's reset. The counters need it only for an epoch that is just starting."""
        if self._where == EPOCH_START:
            compat.set_not_restarting(self._trainer)
            original()

    def start(self, original: Callable[[object], None], data_fetcher: object) -> None:
        """Replace the epoch loop's ``on_run_start``, and do the work that is owed before the next batch."""
        trainer, loaders, run_state = self._trainer, self._loaders, self._run_state
        if self._where != EPOCH_START or self._resume.saved("loaders").get("combined") is not None:
            self._resume.fit_in()
        state = self._resume.saved("loaders")
        loaders.load_own(state.get("own", {}))
        if self._where == EPOCH_START and state.get("combined") is None:
            loaders.stop_holding_back()
            self._resume.restore(run_state)
            self._call("on_train_epoch_start")
            with loaders.iterated_by_trainer():
                original(data_fetcher)
            compat.set_not_restarting(trainer)
            return
        if self._where != EPOCH_END:
            loaders.renew(state)
        with loaders.iterated_by_trainer():
            original(data_fetcher)
        loaders.stop_holding_back()
        compat.load_fetcher(trainer, state.get("combined"))
        run, saved = run_state.validation, self._resume.saved(VALIDATION_RUN)
        if self._where == IN_VALIDATION:
            run.prepare(saved)
        self._resume.restore(run_state)
        compat.set_not_restarting(trainer)
        with self._resume.as_due():
            self._finish(run, saved)

    def _finish(self, run: ValidationRun, saved: Mapping[str, object]) -> None:
        trainer = self._trainer
        if self._where == EPOCH_START:
            self._call("on_train_epoch_start")
        elif self._where == BATCH_END:
            self._call("on_train_batch_end", None, None, trainer.fit_loop.batch_idx)
            compat.close_batch(trainer)
            compat.finish_batch(trainer)
        elif self._where == VALIDATION:
            with zeroed(trainer):
                compat.finish_batch(trainer)
        elif self._where == IN_VALIDATION:
            with run.continued(saved, lambda: begin_evaluation(trainer)):
                compat.finish_batch(trainer)
        elif self._where == VALIDATION_END:
            callbacks, module = self._pending()
            compat.end_validation(trainer, callbacks, module=module, before=self._before_validation)
            compat.finish_batch(trainer, validate=False)
        elif self._where == EPOCH_END:
            self._is_ending = True

    def end(self, original: Callable[[], None]) -> None:
        """Replace the fit loop's ``on_advance_end``. Call only the end-of-epoch hooks that are still owed."""
        if self._is_ending:
            callbacks, module = self._pending()
            with compat.only(self._trainer, "on_train_epoch_end", callbacks, module=module):
                original()
        else:
            original()
        begin_next(self._trainer)

    def _call(self, hook: str, *args: Any) -> None:
        callbacks, module = self._pending()
        compat.run_hooks(self._trainer, hook, callbacks, *args, module=module)

    def _pending(self) -> tuple[list[Callback], bool]:
        named = named_callbacks(compat.callbacks(self._trainer))
        return [callback for name, callback in named.items() if name in self._owed], MODULE in self._owed
