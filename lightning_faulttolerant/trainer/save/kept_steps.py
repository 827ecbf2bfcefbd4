"""When an autosave is due that is kept for good: at each multiple of `keep_every` steps, in whichever process."""

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
        self._last: int | None = None
        self._kept: TrainerPosition | None = None

    def is_due(self) -> bool:
        """Return whether a multiple was reached since the last save. All ranks return the same."""
        if self._every is None:
            return False
        if self._last is None:  # the fit begins, or continues: earlier multiples are done
            self._last = self._num_multiples()
        return self._num_multiples() > self._last

    def note_taken(self, position: TrainerPosition) -> None:
        """Note that a state is taken, for a save."""
        self._kept = position if position.where != FINISHED and self.is_due() else None

    def note_save(self) -> None:
        """Note that the state is saved, or can't be."""
        if self._every is not None:
            self._last = self._num_multiples()

    def keeps(self, position: TrainerPosition) -> bool:
        """Return whether the autosave of the state that was taken last, at `position`, is kept for good."""
        return self._kept is not None and self._kept == position

    def _num_multiples(self) -> int:
        assert self._every is not None
        steps, batches = self._trainer.global_step, self._trainer.fit_loop.epoch_loop.batch_progress.total.completed
        counts_steps = steps > 0 or self._trainer.lightning_module.automatic_optimization
        return (steps if counts_steps else batches) // self._every
