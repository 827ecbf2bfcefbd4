"""When the next autosave of a fit is due, and what happened to the earlier ones.

`Budget`: autosaves and captures together take at most a given share of the time. The cost of a save is measured over
the recent saves. The first save of a process does not count: much of its work is done only once. Soon after the start,
saves come more often than the budget allows, at intervals that double until they reach the budget's. So a run that is
killed often still advances, and any other run pays for only a few more saves. Once the run has failed, the interval
follows from its failures instead (`best_interval`), unless the user has set the share.

`every_n_train_steps` counts optimizer steps, or batches if nothing counts steps. Lightning's ``global_step`` counts the
steps of automatic optimization, and in manual optimization the steps of the optimizers that ``self.optimizers()``
returns. It does not change if a module steps the raw optimizer, or trains without an optimizer as pyro's SVI does. Then
an autosave is due after the same number of finished batches without a step.

A time when nothing can be saved, because a disk is full or a store can't be reached. Training continues.

The outage is logged once when it begins and once when it is over, and is noted in the history of the run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.records.history_parser import Failures, best_interval
from lightning_faulttolerant.trainer.compat import num_begun_in_all
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.run.history import HistoryWriter, seconds_of_process
from lightning_faulttolerant.trainer.save.kept_steps import KeptSteps
from lightning_faulttolerant.trainer.settings import Options

_log = logging.getLogger(__name__)


def described(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


class Outage:
    """Counts consecutive saves that fail, and knows the last of them.

    Args:
        history: The history that notes the outage.
        speaks: Whether this rank logs it.
    """

    def __init__(self, history: HistoryWriter, *, speaks: bool) -> None:
        self._history = history
        self._speaks = speaks
        self._since = 0.0
        self._text = ""
        self.num_failures = 0
        """The number of saves that have failed since the last success."""
        self.failed: tuple[TrainerPosition, str] | None = None
        """If the last save failed: where it was taken, and why it could not be written. The pace sets it."""

    def note(
        self, failure: str, position: TrainerPosition, saved: TrainerPosition | None, *, is_last: bool = False
    ) -> None:
        """Note that a save has failed.

        Args:
            failure: Why it failed.
            position: The position of the state that was to be saved.
            saved: The position of the last autosave.
            is_last: Whether the fit ends now. Other code then reports the failure.
        """
        self.num_failures += 1
        is_first = self.num_failures == 1
        self._text, self._since = failure, time.time() if is_first else self._since
        self._tell(None, self.num_failures)
        if is_first and self._speaks and not is_last:
            what = "No autosave exists yet." if saved is None else f"The last autosave, {saved}, stays."
            _log.warning(
                "The state %s could not be saved: %s. %s The run continues, and each due save tries again.",
                position, failure, what,
            )  # fmt: skip

    def end(self) -> None:
        """Note that a save has succeeded. The thread that writes in the background calls this, too."""
        num_failures, self.num_failures = self.num_failures, 0
        if not num_failures:
            return
        until = time.time()
        if self._speaks:
            _log.warning(
                "Autosaves can be written again. %s had failed in %.0f seconds.",
                "1 save" if num_failures == 1 else f"{num_failures} saves", until - self._since,
            )  # fmt: skip
        self._tell(until, num_failures)

    def _tell(self, until: float | None, num_failures: int) -> None:
        self._history.unsaved(since=self._since, until=until, tries=num_failures, text=self._text)


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
        now = self._now()
        if self._last is None:  # the fit continues from an autosave of this same place
            self._last = now
        (last_step, last_batch), (step, batch) = self._last, now
        if step != last_step or self._trainer.lightning_module.automatic_optimization:
            return step - last_step >= self._every_n_steps
        is_due = batch - last_batch >= self._every_n_steps
        if is_due and not self._has_told:
            self._has_told = True
            tell(
                f"every_n_train_steps={self._every_n_steps} counts finished batches in this fit: global_step stays at "
                f"{step}, because Lightning doesn't count the steps of raw optimizers."
            )
        return is_due

    def _now(self) -> tuple[int, int]:
        return self._trainer.global_step, self._trainer.fit_loop.epoch_loop.batch_progress.total.completed


_NUM_RECENT = 8
# Half the time of a start: a run that is always killed after three times the time of a start has saved before.
_SHARE_OF_START = 0.5
_MAX_SOON_SECONDS = 30.0
# The first interval is at least this many saves long, so that a slow store does not take all of the time at first.
_MIN_SAVES = 4


class _Costs:
    """How long training has waited for each save."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)

    def note(self, seconds: float) -> None:
        """Note a save that was written."""
        if self._first is None:
            self._first = seconds
        else:
            self._recent.append(seconds)

    def typical(self, first: float | None = None) -> float:
        """Return the seconds of a save.

        Args:
            first: The seconds that count while only the first save is known. Default: those of the first save.
        """
        return fmean(self._recent or [first or self._first or 0.0])


@dataclass(kw_only=True, slots=True)
class _Due:
    """From when the next save is allowed, by the same clock."""

    warm_up: float = float("-inf")
    paced: float = float("-inf")
    latest: float = float("-inf")


class Budget:
    """Decides when a save and a capture are due from what the earlier ones cost.

    Args:
        share: The share of the whole time, validation included, in (0, 1]; 1 means no limit.
        paces_saves: Whether the budget also decides when to save. If not, captures have all of the budget. If so,
            captures have at most half of it, and saves have the rest.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        share: float,
        *,
        paces_saves: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._share = share
        self._paces_saves = paces_saves
        self._capture_share = share / 2 if paces_saves and share < 1 else share
        self._soon_seconds = 0.0
        self.failures = Failures()
        """The failures that decide how often to save; none as long as the share does."""
        self._began = clock()
        self._clock = clock
        self._costs = _Costs()
        self._num_intervals = 0
        self._due = _Due()
        self.save_at = float("-inf")
        """The time from which a save is allowed."""
        self.capture_at = float("-inf")
        """The time from which a capture is allowed."""

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()

    def begin(self, start_seconds: float, failures: Failures | None = None) -> None:
        """Note that training begins.

        Args:
            start_seconds: The seconds since the start of the process.
            failures: The failures of the run so far. If there are any, they decide how often to save.
        """
        self._began = self._clock()
        self.failures = failures or self.failures
        if self._share < 1:
            self._soon_seconds = min(_SHARE_OF_START * start_seconds, _MAX_SOON_SECONDS)

    def begin_saved(self) -> None:
        """Note that an earlier process has already saved the state in which training begins."""
        wait = self._soon_seconds
        if self.failures.number and self.failures.save_seconds is not None:
            wait = min(wait, self._wait(self.failures.save_seconds))
        self.save_at = at = self._clock() + wait
        self._due = _Due(warm_up=at, paced=at, latest=at)

    def spend_on_save(self, began: float) -> float:
        """Note that training has waited for a save from `began` until now. Return the number of seconds."""
        seconds = self._clock() - began
        self._costs.note(seconds)
        self._num_intervals += 1
        first = self.failures.save_seconds if self.failures.number else None
        self._set_save_at(seconds, typical=self._costs.typical(first))
        return seconds

    def spend_on_failure(self, began: float, num_failures: int) -> None:
        """Note that training has waited from `began` until now for a save that failed. Intervals double again.

        Args:
            began: When the save began.
            num_failures: The number of failed saves in a row, this one included.
        """
        seconds = self._clock() - began
        self._num_intervals = num_failures
        self._set_save_at(seconds, typical=max(seconds, self._costs.typical()))

    def spend_on_capture(self, began: float) -> None:
        """Note that a capture was taken from `began` until now. If it came early, the next one waits for both."""
        now = self._clock()
        seconds = now - began
        self.capture_at = max(now, self.capture_at) + seconds * (1 - self._capture_share) / self._capture_share
        if self._paces_saves and not self.failures.number:
            due = self._due
            due.paced = min(due.paced + seconds / self._share, due.latest)
            self.save_at = min(due.warm_up, due.paced)

    def _set_save_at(self, seconds: float, *, typical: float) -> None:
        now = self._clock()
        wait = self._wait(typical)
        first_interval = max(self._soon_seconds, _MIN_SAVES * seconds)
        self._due = due = _Due(
            warm_up=now + first_interval * 2.0 ** min(self._num_intervals - 1, 60),
            paced=now + wait,
            # Captures that must be taken at each boundary may be expensive: saves still have half of the budget.
            latest=now + 2 * wait,
        )
        self.save_at = min(due.warm_up, due.paced)

    @property
    def longest_wait(self) -> float:
        """How long to wait for a save after the warm-up; 0 as long as its cost is not known."""
        return self._wait(self._costs.typical(self.failures.save_seconds))

    def _wait(self, save_seconds: float) -> float:
        """Return how long to wait after a save for the next one, after the warm-up."""
        if self.failures.number:
            return best_interval(
                save_seconds, self.failures.mean_seconds_between(max(self._clock() - self._began, 0.0))
            )
        return save_seconds * (1 - self._share) / self._share


class _Requested:
    """When a save is due by the arguments of the callback that set the interval.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        every = options.every_n_train_steps
        self.steps = None if every is None else StepCount(trainer, every)
        self._interval = options.train_time_interval
        self.due_at = float("-inf")

    def note_save(self, now: float) -> None:
        if self.steps is not None:
            self.steps.note_save()
        if self._interval is not None:
            self.due_at = now + self._interval.total_seconds()


class _Taken:
    """The states that were taken last, for saves.

    Args:
        trainer: The trainer that runs the fit.
        at: The time of the clock.
    """

    def __init__(self, trainer: Trainer, at: float) -> None:
        self._trainer = trainer
        self.at = at
        """When the last one was taken."""
        self._num_begun: dict[TrainerPosition | None, int] = {}
        """How many batches of all epochs had begun then."""

    def note(self, position: TrainerPosition, at: float, *, saved: TrainerPosition | None) -> None:
        self.at = at
        self._num_begun = {saved: self._num_begun.get(saved, 0), position: num_begun_in_all(self._trainer)}

    def num_after(self, position: TrainerPosition | None) -> int:
        """Return how many batches have begun since the state of `position` was taken."""
        return num_begun_in_all(self._trainer) - self._num_begun.get(position, 0)


class Pace:
    """Decides when a save is due, and notes each save.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options, which set the pace.
        history: The history, which notes when nothing can be saved.
        speaks: Whether this rank logs that.
    """

    def __init__(self, trainer: Trainer, options: Options, history: HistoryWriter, *, speaks: bool) -> None:
        self._options = options
        self._history = history
        self._outage = Outage(history, speaks=speaks)
        self.budget = Budget(options.overhead_budget, paces_saves=options.is_paced)
        """Decides when the next save and the next capture may come."""
        self._requested = _Requested(trainer, options)
        self.kept_steps = KeptSteps(trainer, options.keep_every)
        """Knows when an autosave is due that is kept for good."""
        self._last: TrainerPosition | None = None
        """Where the last save was taken. It may be done, in progress, or failed."""
        self.is_urgent = False
        """Whether the next boundary must check, because a write in the background has failed."""
        self.is_ending = False
        """Whether the fit ends with the next save. The code that ends the fit then reports a failure."""
        self.saved: TrainerPosition | None = None
        """Where the last written and verified autosave was taken."""
        self._taken = _Taken(trainer, self.now())
        self._has_told = False

    def now(self) -> float:
        """Return the time of the clock, for the arguments called `began`."""
        return self.budget.now()

    @property
    def taken_at(self) -> float:
        """When the state of the last save was taken, by the same clock."""
        return self._taken.at

    @property
    def is_first(self) -> bool:
        """Whether this fit has no save yet, done or in progress."""
        return self._last is None

    @property
    def due_at(self) -> float:
        """The time of the clock until which no autosave is due. A boundary need not check before."""
        at = self.budget.save_at if self._options.is_paced else self._requested.due_at
        return float("-inf") if self.is_urgent else at

    def is_due(self) -> bool:
        """Return whether a save is due at this boundary, if none is in progress. The first boundary's always is."""
        if self._last is None or self.kept_steps.is_retry_due():
            return True
        if self._requested.steps is not None:
            return self.is_due_by_steps()
        return self.kept_steps.is_due() or self.budget.now() >= self.due_at

    def is_due_by_steps(self) -> bool:
        """Return whether a save is due after so many steps. All ranks return the same."""
        steps = self._requested.steps
        return self.kept_steps.is_due() or (steps is not None and steps.is_due())

    def begin(self) -> None:
        """Note that training begins."""
        failures = self._history.failures() if self._options.follows_failures else None
        self.budget.begin(seconds_of_process(), failures)

    def begin_saved(self, position: TrainerPosition) -> None:
        """Note that training begins with a state that an earlier process has already saved."""
        self.saved = self._history.saved = position
        self.note_taken(position)
        self.budget.begin_saved()
        self._set_due(position)
        self._has_told = self._tell_repeated()

    def note_taken(self, position: TrainerPosition, taken_at: float | None = None) -> None:
        """Note that a state is taken, for a save.

        Args:
            position: The position of the state.
            taken_at: When it was taken, if it is a capture. Default: now.
        """
        self._taken.note(position, self.now() if taken_at is None else taken_at, saved=self.saved)
        self._history.note_taken()
        self.kept_steps.note_taken(position)

    def note_waited(self, position: TrainerPosition, began: float) -> float:
        """Note that training has waited for a save from `began` until now. Return the number of seconds."""
        self._outage.failed = None
        self._set_due(position)
        seconds = self.budget.spend_on_save(began)
        self._history.note_wait(seconds)
        self._has_told = self._has_told or self._tell_repeated()
        return seconds

    def note_written(self, series: AutosaveSeries | None, path: str, position: TrainerPosition, *, seconds: float,
                     taken: float, is_in_background: bool = False) -> None:  # fmt: skip
        """Note that a save is written. The thread that writes in the background calls this, too.

        Args:
            series: Knows the size of the autosave.
            path: The path of the autosave.
            position: The position of its state.
            seconds: How many seconds training waited for it.
            taken: When its state was taken, by the same clock.
            is_in_background: Whether it was written in the background.
        """
        self._history.autosave(series, path, position, seconds=seconds, taken=taken, is_in_background=is_in_background)
        self._outage.end()

    def note_failure(self, position: TrainerPosition, failure: str, began: float) -> None:
        """Note that the save of `position`, for which training has waited since `began`, could not be written."""
        self._outage.failed, self.is_urgent = (position, failure), False
        self.kept_steps.note_failed(position)
        self._outage.note(failure, position, self.saved, is_last=self.is_ending)
        self.budget.spend_on_failure(began, self._outage.num_failures)
        if position != self._last:  # a save in the background noted it when it began
            self._set_due(position)

    @property
    def num_after_saved(self) -> int:
        """How many batches have begun since the state of the last autosave was taken."""
        return self._taken.num_after(self.saved)

    @property
    def unsaved(self) -> str:
        """The message about the last save, if it failed: why, and how much older the previous autosave is."""
        failed = self._outage.failed
        if failed is None:
            return ""
        number = self.num_after_saved
        older = f"{number} batch{'es' if number != 1 else ''} older"
        return f"The state could not be saved: {failed[1]}. The last autosave, {self.saved}, is {older}"

    def unsaved_at(self, position: TrainerPosition) -> str:
        """Return that message if the save of `position` has failed, or an empty string."""
        failed = self._outage.failed
        return self.unsaved if failed is not None and failed[0] == position else ""

    def _tell_repeated(self) -> bool:
        """Print how much of the training a kill repeats at most. Return whether that is known yet."""
        steps, interval = self._options.every_n_train_steps, self._options.train_time_interval
        seconds = self.budget.longest_wait if interval is None else interval.total_seconds()
        if steps is None and not seconds:
            return False
        most = f"about {max(1, round(seconds))} s" if steps is None else f"{steps} step{'s' if steps > 1 else ''}"
        tell(f"A kill repeats at most {most} of training; every_n_train_steps changes that.")
        return True

    def _set_due(self, position: TrainerPosition) -> None:
        self._last = position
        self.kept_steps.note_save(position)
        self._requested.note_save(self.now())
