"""When an autosave is due that is kept for good: at each multiple of `keep_every` steps, in whichever process.

If the save of a multiple fails, the next one that succeeds is kept instead. It is tried again 1, 2, 4, ... steps later:
the next save that is due anyway may be that of the next multiple.
"""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.position import FINISHED, TrainerPosition


class KeptSteps:
    """Finds the multiples of a number of steps.

    It counts what ``every_n_train_steps`` counts: optimizer steps, and finished batches if Lightning counts no steps.

    Args:
        trainer: The trainer that runs the fit.
        every: The number of steps; ``None`` if no autosave is kept for good.
    """

    def __init__(self, trainer: Trainer, every: int | None) -> None:
        self._trainer = trainer
        self._every = every
        self._num_begun: int | None = None
        """How many multiples had been reached by the last state whose save was begun. All ranks have the same."""
        self._num_saved = 0
        """How many multiples had been reached by the last state that is saved."""
        self._taken: tuple[TrainerPosition, int] | None = None
        """Where the last state was taken, and how many multiples had been reached there."""
        self._retry_at: int | None = None
        """The number of steps at which a multiple whose save has failed is tried again."""
        self._num_failures = 0

    def is_due(self) -> bool:
        """Return whether a multiple was reached since the last save was begun. All ranks return the same."""
        if self._every is None:
            return False
        num_reached = self._num_reached()
        return num_reached > self._num_begun_or(num_reached)

    def is_retry_due(self) -> bool:
        """Return whether the save of a multiple has failed and must be tried again now. Only rank 0 knows for sure."""
        return self._retry_at is not None and self._num_steps() >= self._retry_at

    def note_taken(self, position: TrainerPosition) -> None:
        """Note that a state is taken, for a save.

        Args:
            position: Its position. The state may be a capture from before the current step.
        """
        if self._every is not None:
            self._num_begun_or(self._num_reached())
            self._taken = position, self._num_reached(position)
            self._retry_at = None

    def note_save(self, position: TrainerPosition) -> None:
        """Note that the save of the state that was taken last, at `position`, has begun, or can't be done."""
        if self._num_begun is not None:
            self._num_begun = max(self._num_begun, self._num_taken(position))

    def note_failed(self, position: TrainerPosition) -> None:
        """Note that the save of the state that was taken last, at `position`, has failed."""
        if self.keeps(position):
            self._retry_at = self._num_steps() + 2 ** min(self._num_failures, 30)
            self._num_failures += 1

    def note_written(self, position: TrainerPosition) -> None:
        """Note that this save is written. The thread that writes in the background calls this, too."""
        self._num_saved = max(self._num_saved, self._num_taken(position))
        self._num_failures = 0

    def keeps(self, position: TrainerPosition) -> bool:
        """Return whether the autosave of the state that was taken last, at `position`, is kept for good."""
        return position.where != FINISHED and self._num_taken(position) > self._num_saved

    def _num_begun_or(self, num_reached: int) -> int:
        if self._num_begun is None:  # the fit begins, or continues: earlier multiples are done
            self._num_begun = self._num_saved = num_reached
        return self._num_begun

    def _num_taken(self, position: TrainerPosition) -> int:
        return self._taken[1] if self._taken is not None and self._taken[0] == position else 0

    def _num_reached(self, position: TrainerPosition | None = None) -> int:
        """Return how many multiples were reached at a position, by default now."""
        return 0 if self._every is None else self._num_steps(position) // self._every

    def _num_steps(self, position: TrainerPosition | None = None) -> int:
        """Return how many steps were done at a position, by default now."""
        trainer, progress = self._trainer, self._trainer.fit_loop.epoch_loop.batch_progress
        if trainer.global_step > 0 or trainer.lightning_module.automatic_optimization:
            return trainer.global_step if position is None else position.global_step
        if position is None:
            return int(progress.total.completed)
        if position.epoch != trainer.current_epoch:  # a capture of an earlier epoch: how long that was is not known
            return 0
        return int(progress.total.completed - progress.current.completed + position.batch)
