"""When the next autosave and the next capture may come. Together they take at most a given share of the time.

The cost of a save is measured over the recent saves. The first save of a process does not count: much of its work is
done only once. Soon after the start, saves come more often than the budget allows, at intervals that double until they
reach the budget's. So a run that is killed often still advances, and any other run pays for only a few more saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean

from lightning_faulttolerant.clock import perf_counter

_NUM_RECENT = 8
# Half the time of a start: a run that is always killed after three times the time of a start has saved before.
_SHARE_OF_START = 0.5
_MAX_SOON_SECONDS = 30.0
# The first interval is at least this many saves long, so that a slow store does not take all of the time at first.
_MIN_SAVES = 4


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
        self._clock = clock
        self._first: float | None = None
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_intervals = 0
        self._warm_up_at = self._paced_at = self._latest_at = float("-inf")
        self.save_at = float("-inf")
        """The time from which a save is allowed."""
        self.capture_at = float("-inf")
        """The time from which a capture is allowed."""

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()

    def begin(self, start_seconds: float) -> None:
        """Note that training begins.

        Args:
            start_seconds: The seconds since the start of the process.
        """
        if self._share < 1:
            self._soon_seconds = min(_SHARE_OF_START * start_seconds, _MAX_SOON_SECONDS)

    def begin_saved(self) -> None:
        """Note that an earlier process has already saved the state in which training begins."""
        self.save_at = self._warm_up_at = self._paced_at = self._latest_at = self._clock() + self._soon_seconds

    def spend_on_save(self, began: float) -> float:
        """Note that training has waited for a save from `began` until now. Return the number of seconds."""
        seconds = self._clock() - began
        if self._first is None:
            self._first = seconds
        else:
            self._recent.append(seconds)
        self._num_intervals += 1
        self._set_save_at(seconds, typical=fmean(self._recent) if self._recent else self._first)
        return seconds

    def spend_on_failure(self, began: float, num_failures: int) -> None:
        """Note that training has waited from `began` until now for a save that failed. Intervals double again.

        Args:
            began: When the save began.
            num_failures: The number of failed saves in a row, this one included.
        """
        seconds = self._clock() - began
        self._num_intervals = num_failures
        self._set_save_at(seconds, typical=max(seconds, fmean(self._recent or [self._first or 0.0])))

    def spend_on_capture(self, began: float) -> None:
        """Note that a capture was taken from `began` until now."""
        now = self._clock()
        seconds = now - began
        self.capture_at = now + seconds * (1 - self._capture_share) / self._capture_share
        if self._paces_saves:
            self._paced_at = min(self._paced_at + seconds / self._share, self._latest_at)
            self.save_at = min(self._warm_up_at, self._paced_at)

    def _set_save_at(self, seconds: float, *, typical: float) -> None:
        now = self._clock()
        wait = typical * (1 - self._share) / self._share
        self._paced_at = now + wait
        # Captures that must be taken at each boundary may be expensive: saves still have half of the budget.
        self._latest_at = now + 2 * wait
        first_interval = max(self._soon_seconds, _MIN_SAVES * seconds)
        self._warm_up_at = now + first_interval * 2.0 ** min(self._num_intervals - 1, 60)
        self.save_at = min(self._warm_up_at, self._paced_at)
