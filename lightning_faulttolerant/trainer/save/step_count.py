"""When an autosave is due by `every_n_train_steps`: it counts optimizer steps, or batches if nothing counts steps.

Lightning's ``global_step`` counts the steps of automatic optimization, and in manual optimization the steps of the
optimizers that ``self.optimizers()`` returns. It does not change if a module steps the raw optimizer, or trains without
an optimizer as pyro's SVI does. Then an autosave is due after the same number of finished batches without a step.
"""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.log import tell


class StepCount:
    """Counts what has been done since the last autosave.

    Args:
        trainer: The trainer that runs the fit.
        every_n_steps: The number of steps after which an autosave is due.
    """

    def __init__(self, trainer: Trainer, every_n_steps: int) -> None:
        self._trainer = trainer
        self._every_n_steps = every_n_steps
        self._last: tuple[int, int] | None = None
        self._has_told = False

    def note_save(self) -> None:
        """Note that the current state is saved."""
        self._last = self._now()

    def is_due(self) -> bool:
        """Return whether an autosave is due. All ranks return the same: they do the same steps and batches."""
        if self._last is None:  # the fit continues from an autosave of this same place
            self.note_save()
        assert self._last is not None
        (last_step, last_batch), (step, batch) = self._last, self._now()
        if step != last_step or self._trainer.lightning_module.automatic_optimization:
            return step - last_step >= self._every_n_steps
        is_due = batch - last_batch >= self._every_n_steps
        if is_due and not self._has_told:
            self._has_told = True
            tell(
                f"every_n_train_steps={self._every_n_steps} counts finished batches in this fit: global_step stays at"
                f" {step}, since Lightning counts no steps of raw optimizers."
            )
        return is_due

    def _now(self) -> tuple[int, int]:
        return self._trainer.global_step, self._trainer.fit_loop.epoch_loop.batch_progress.total.completed
