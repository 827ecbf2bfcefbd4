"""One fit, from where its training begins to its end: what Lightning's loops do with it between its seams."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer

from lightning_faulttolerant.supervision.marks import END_OF_EPOCH
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.hangs.supervision import Supervision
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method
from lightning_faulttolerant.trainer.position import BOUNDARY, FINISHED, position_of
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.resume.resumed_epoch import ResumedEpoch
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.save.checkpointer import Checkpointer
from lightning_faulttolerant.trainer.skips.skipped_batches import SkippedBatches
from lightning_faulttolerant.trainer.stop.stopping import Stopping

_EPOCHS_WITH_GENERATORS = 100
"""In so many epochs, the history has the states of samplers' own generators. It must not become too long."""


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
        run_state.objects.tell_drawn() if self._resume is None else self._resume.put_back_drawn()
        run_state.objects.begin()
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
        self.note_order(is_over=True)
        resumed, self._resumed_epoch = self._resumed_epoch, None
        if resumed is None:
            original()
        else:
            resumed.end(original)

    def note_order(self, *, is_over: bool = False) -> None:
        """Note in the history in which order the epoch in progress has its samples.

        Args:
            is_over: Whether it has no further batch.
        """
        epoch, limit = self._trainer.current_epoch, self._trainer.num_training_batches
        num_batches = int(limit) if math.isfinite(limit) else None
        if is_over:
            num_batches = compat.num_completed(self._trainer) or num_batches
        orders = self._loaders.orders(keeps_generators=epoch < _EPOCHS_WITH_GENERATORS)
        self._beginning.history.order(epoch, orders, num_batches)

    def before_batch(self) -> None:
        """Pass the boundary before a training batch."""
        (self.boundary or self._make_boundary()).before_batch()

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
        can_write = self._beginning.ranks.num_ranks == 1 and not self.checkpointer.autosaver.is_sharded
        self.boundary.captures.takes_each = self.captures_each and can_write
        return self.boundary

    def _note_start(self) -> None:
        report, position = (None, None) if self._resume is None else (self._resume.report, self._resume.position)
        self._supervision.start(position)
        parent = None if self._resume is None else self._resume.parent
        self._beginning.history.start(self._beginning.choice, report, position, parent)
