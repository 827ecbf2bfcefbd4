"""When the next autosave of a fit is due, and what happened to the earlier ones."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.compat import num_begun_in_all
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.run.history import HistoryWriter, seconds_of_process
from lightning_faulttolerant.trainer.save.budget import Budget
from lightning_faulttolerant.trainer.save.outage import Outage
from lightning_faulttolerant.trainer.save.step_count import StepCount
from lightning_faulttolerant.trainer.settings.options import Options


class Pace:
    """Decides when a save is due, and notes each save.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options, which set the pace.
        history: The history, which notes when nothing can be saved.
        speaks: Whether this rank logs that.
    """

    def __init__(self, trainer: Trainer, options: Options, history: HistoryWriter, *, speaks: bool) -> None:
        self._trainer = trainer
        self._options = options
        self._history = history
        self._outage = Outage(history, speaks=speaks)
        self.budget = Budget(options.overhead_budget, paces_saves=options.is_paced)
        """Decides when the next save and the next capture may come."""
        every = options.every_n_train_steps
        self._step_count = None if every is None else StepCount(trainer, every)
        self._last: TrainerPosition | None = None
        """Where the last save was taken. It may be done, in progress, or failed."""
        self._due_at = float("-inf")
        self.is_urgent = False
        """Whether the next boundary must check, because a write in the background has failed."""
        self.is_ending = False
        """Whether the fit ends with the next save. The code that ends the fit then reports a failure."""
        self.saved: TrainerPosition | None = None
        """Where the last written and verified autosave was taken."""
        self.failed: tuple[TrainerPosition, str] | None = None
        """If the last save failed: where it was taken, and why it could not be written."""
        self._num_begun: dict[TrainerPosition | None, int] = {}
        """How many batches of all epochs had begun when the last states were taken."""

        self.now = self.budget.now
        """Returns the time of the clock, for the arguments called `began`."""
        self.taken_at = self.now()
        """When the state of the last save was taken, by the same clock."""

    @property
    def is_first(self) -> bool:
        """Whether this fit has no save yet, done or in progress."""
        return self._last is None

    @property
    def due_at(self) -> float:
        """The time of the clock until which no autosave is due. A boundary need not check before."""
        if self.is_urgent:
            return float("-inf")
        return self.budget.save_at if self._options.is_paced else self._due_at

    def is_due(self) -> bool:
        """Return whether a save is due at this boundary, if none is in progress. The first boundary's always is."""
        if self._last is None:
            return True
        if self._step_count is not None:
            return self._step_count.is_due()
        return self.budget.now() >= self.due_at

    def begin(self) -> None:
        """Note that training begins."""
        self.budget.begin(seconds_of_process())

    def begin_saved(self, position: TrainerPosition) -> None:
        """Note that training begins with a state that an earlier process has already saved."""
        self.saved = self._history.saved = position
        self.note_taken(position)
        self.budget.begin_saved()
        self._set_due(position)

    def note_taken(self, position: TrainerPosition, taken_at: float | None = None) -> None:
        """Note that a state is taken, for a save.

        Args:
            position: The position of the state.
            taken_at: When it was taken, if it is a capture. Default: now.
        """
        self.taken_at = self.now() if taken_at is None else taken_at
        self._num_begun = {self.saved: self._num_begun.get(self.saved, 0), position: num_begun_in_all(self._trainer)}

    def note_waited(self, position: TrainerPosition, began: float) -> float:
        """Note that training has waited for a save from `began` until now. Return the number of seconds."""
        self.failed = None
        self._set_due(position)
        seconds = self.budget.spend_on_save(began)
        self._history.note_wait(seconds)
        return seconds

    def note_written(self) -> None:
        """Note that a save is written. The thread that writes in the background calls this, too."""
        self._outage.end()

    def note_failure(self, position: TrainerPosition, failure: str, began: float) -> None:
        """Note that a save could not be written.

        Args:
            position: Where its state was taken.
            failure: Why it failed.
            began: When training began to wait for it.
        """
        self.failed, self.is_urgent = (position, failure), False
        self._outage.note(failure, position, self.saved, is_last=self.is_ending)
        self.budget.spend_on_failure(began, self._outage.num_failures)
        if position != self._last:  # a save in the background noted it when it began
            self._set_due(position)

    @property
    def unsaved(self) -> str:
        """The message about the last save, if it failed: why, and how much older the previous autosave is."""
        if self.failed is None:
            return ""
        number = num_begun_in_all(self._trainer) - self._num_begun.get(self.saved, 0)
        older = f"{number} batch{'es' if number != 1 else ''} older"
        return f"The state could not be saved: {self.failed[1]}. The last autosave, {self.saved}, is {older}"

    def unsaved_at(self, position: TrainerPosition) -> str:
        """Return that message if the save of `position` has failed, or an empty string."""
        return self.unsaved if self.failed is not None and self.failed[0] == position else ""

    def _set_due(self, position: TrainerPosition) -> None:
        interval = self._options.train_time_interval
        self._last = position
        if self._step_count is not None:
            self._step_count.note_save()
        if interval is not None:
            self._due_at = self.budget.now() + interval.total_seconds()
