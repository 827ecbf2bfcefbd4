"""One fit, from where its training begins to its end: what Lightning's loops do with it between its seams.

In the epoch that a run resumes in, the state is restored, then Lightning's loops do the work that was still owed. This
module does not redo the work of the loops. Lightning's own code closes the batch, finishes the validation run and ends
the epoch, as in an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.state.tensors import has_own_state_dict
from lightning_faulttolerant.supervision.heartbeats import END_OF_EPOCH
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import begin_evaluation_bar, begin_next_bar
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun, zeroed
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method
from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    BOUNDARY,
    EPOCH_END,
    EPOCH_START,
    FINISHED,
    IN_VALIDATION,
    VALIDATION,
    VALIDATION_END,
    position_of,
)
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.save.autosave import Checkpointer
from lightning_faulttolerant.trainer.save.contents import MODULE, overrides_save_hook
from lightning_faulttolerant.trainer.save.run_state import BEFORE_VALIDATION, VALIDATION_RUN, RunState, named_callbacks
from lightning_faulttolerant.trainer.sections import Supervision
from lightning_faulttolerant.trainer.steps.skipped_batches import SkippedBatches
from lightning_faulttolerant.trainer.stopping import Stopping


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
        self._owed = list(resume.owed("pending") or ())
        self._before_validation = resume.saved(BEFORE_VALIDATION)
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
        run_state.objects.reloads.apply_again()
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
            with run.continued(saved, lambda: begin_evaluation_bar(trainer)):
                compat.finish_batch(trainer)
        elif self._where == VALIDATION_END:
            callbacks, module = self._pending()
            compat.end_validation(trainer, callbacks, module=module, before=self._before_validation)
            compat.finish_batch(trainer, validate=False)
        elif self._where == EPOCH_END:
            self._is_ending = True

    def end(self, original: Callable[[], None]) -> None:
        """Replace the fit loop's ``on_advance_end``. Call only the end-of-epoch hooks that are still owed."""
        self._loaders.end_resumed()
        if self._is_ending:
            callbacks, module = self._pending()
            with compat.only(self._trainer, "on_train_epoch_end", callbacks, module=module):
                original()
        else:
            original()
        begin_next_bar(self._trainer)

    def _call(self, hook: str, *args: object) -> None:
        callbacks, module = self._pending()
        compat.run_hooks(self._trainer, hook, callbacks, *args, module=module)

    def _pending(self) -> tuple[list[Callback], bool]:
        named = named_callbacks(compat.callbacks(self._trainer))
        return [callback for name, callback in named.items() if name in self._owed], MODULE in self._owed


class Training:
    """The training of one fit. It exists once the checkpoint is loaded, and Lightning's loops are about to run.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The fit's loaders.
        checkpointer: Saves the fit.
        resume: Restores the state, if the fit continues from a checkpoint.
        stopping: Stops the fit.
        beginning: Knows the ranks, the history, and what the fit continues from.
        supervision: Is told when the first batch can begin.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        checkpointer: Checkpointer,
        resume: Resume | None,
        *,
        stopping: Stopping,
        beginning: Beginning,
        supervision: Supervision,
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self.checkpointer = checkpointer
        self._resume = resume
        self._stopping = stopping
        self._beginning = beginning
        self._supervision = supervision
        self.captures_each = False
        """Whether the state before each batch must be captured, for a flight recorder."""
        self.skipped: SkippedBatches | None = None
        """The batches that the fit leaves out, if any."""
        self.boundary: Boundary | None = None
        """The work between two batches, from the first batch or validation run on."""
        place = None if resume is None else resume.place_in_epoch
        self._resumed_epoch: ResumedEpoch | None = None
        """The epoch that the resume continues in, until it is over."""
        if resume is not None and place is not None:
            run_state = checkpointer.run_state
            self._resumed_epoch = ResumedEpoch(trainer, resume, loaders, run_state, where=place.where)

    def close(self) -> None:
        """Give back the trainer's limit of steps, and wait for the autosave in progress."""
        if self._resumed_epoch is not None:
            self._resumed_epoch.put_limit_back()
        self.checkpointer.autosaver.close()

    def put_part(self, checkpoint: dict[str, object]) -> None:
        """Put our part into a checkpoint that other code is saving."""
        self.checkpointer.put_part(checkpoint, None if self.boundary is None else self.boundary.captures.last)

    def save_before_batch(self) -> None:
        """Save before the next training batch, unless the first autosave is still to come."""
        if not self.checkpointer.autosaver.pace.is_first:
            self.checkpointer.autosaver.save_unless_saved(position_of(self._trainer, BOUNDARY))

    # What the seams do.

    def run(self, original: Method) -> None:
        """Replace the fit loop's ``run``."""
        self.checkpointer.run_state.objects.after_sanity_check()
        self.checkpointer.run_state.validation.after_sanity_check()
        original()
        self._finish()

    def _finish(self) -> None:
        """Save one autosave that marks the fit as finished, or restore the state of such an autosave."""
        is_pending = self._resume is not None and self._resume.is_pending
        if self._resume is not None and is_pending:
            self._resume.restore(self.checkpointer.run_state)
            compat.set_not_restarting(self._trainer)  # or the next fit would have no sanity check
        self._note_start()
        if self.skipped is not None and not is_pending:
            self.skipped.end()
        if not is_pending:
            self.checkpointer.autosaver.save(position_of(self._trainer, FINISHED))
        self._stopping.stop_if_wanted("after the end of the fit", self.checkpointer.autosaver.pace.unsaved)

    def start(self, original: Method) -> None:
        """Replace the fit loop's ``on_run_start``."""
        if self._resumed_epoch is None:
            original()
        else:
            self._resumed_epoch.start_fit(original)
        run_state = self.checkpointer.run_state
        if self._resume is None:
            run_state.objects.splits.tell()
        run_state.objects.begin()
        if overrides_save_hook(self._trainer) or has_own_state_dict(self._trainer.lightning_module):
            run_state.left_out.begin()
        if self._resume is not None and self._resume.is_after_the_end:
            self._resume.continue_after_the_end()
            self._resume.restore(run_state)
            compat.set_not_restarting(self._trainer)

    def before_epoch(self, original: Method) -> None:
        """Replace the fit loop's ``on_advance_start``."""
        if self._resumed_epoch is not None:
            self._resumed_epoch.put_limit_back()
        original()

    def reset_epoch(self, original: Method) -> None:
        """Replace the epoch loop's ``reset``."""
        if self._resumed_epoch is not None:
            self._resumed_epoch.reset(original)
        else:
            original()

    def start_epoch(self, original: Method, data_fetcher: object) -> None:
        """Replace the epoch loop's ``on_run_start``."""
        if self._resumed_epoch is not None:
            self._resumed_epoch.start(original, data_fetcher)
            return
        with self._loaders.iterated_by_trainer():
            original(data_fetcher)
        if self._resume is not None:
            self._resume.settle()

    def end_epoch(self, original: Method) -> None:
        """Replace the fit loop's ``on_advance_end``."""
        self._supervision.in_section(END_OF_EPOCH)
        resumed, self._resumed_epoch = self._resumed_epoch, None
        if resumed is None:
            original()
        else:
            resumed.end(original)

    def before_first_batch(self) -> None:
        """Pass the boundary before the first training batch of this process."""
        self._make_boundary().before_batch()

    def validate(self, original: Method) -> object:
        """Replace the validation loop's ``run``."""
        boundary, history = self.boundary or self._make_boundary(), self._beginning.history
        history.begin_validation(continues=self.checkpointer.run_state.validation.is_continuing)
        boundary.before_validation()
        history.times.begin_evaluation()
        results = original()
        history.end_validation()
        return results

    def _make_boundary(self) -> Boundary:
        self._note_start()
        self.boundary = Boundary(
            self._trainer,
            loaders=self._loaders,
            checkpointer=self.checkpointer,
            stopping=self._stopping,
            ranks=self._beginning.ranks,
            history=self._beginning.history,
        )
        self.boundary.captures.takes_each = self.captures_each and not self.checkpointer.autosaver.is_sharded
        return self.boundary

    def _note_start(self) -> None:
        report, position = (None, None) if self._resume is None else (self._resume.report, self._resume.position)
        self._supervision.start(position)
        parent = None if self._resume is None else self._resume.parent
        self._beginning.history.start(self._beginning.choice, report, position, parent)
