"""A deadline that is known in advance: when to stop, so that the state is saved in time without any signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

RESERVE_SECONDS = 10.0
"""What is kept free before a deadline, besides the time for a save and for a batch: for the end of the process."""
_SAVE_FACTOR = 1.2


def checked_deadline(deadline: datetime | timedelta | None) -> float | None:
    """Return a deadline as seconds since 1970.

    Args:
        deadline: When; a ``datetime`` without a time zone is in local time, a ``timedelta`` counts from now.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is a ``timedelta`` that is not positive.
    """
    if deadline is None:
        return None
    if isinstance(deadline, timedelta):
        if deadline <= timedelta(0):
            raise ValueError(f"deadline must be positive if it is a timedelta, got {deadline}.")
        return time.time() + deadline.total_seconds()
    if not isinstance(deadline, datetime):
        raise TypeError(f"deadline must be a datetime or a timedelta, got {deadline!r}.")
    return deadline.timestamp()


class Deadline:
    """Knows when a run has to stop to be saved before its deadline.

    That is before it by the time of a save, the longest time between two batches so far, of training or validation,
    and `RESERVE_SECONDS`.

    Args:
        at: The deadline, in seconds since 1970.
        save_seconds: Gives how long a save takes, from those before.
        progress: Gives what changes with every batch.
        clock: Gives seconds since 1970.
    """

    def __init__(
        self,
        at: float,
        *,
        save_seconds: Callable[[], float],
        progress: Callable[[], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.at = at
        self._save_seconds = save_seconds
        self._progress = progress
        self._clock = clock
        self._seen: object = progress()
        self._seen_at: float | None = None
        self._longest = 0.0

    def seconds_left(self) -> float:
        """Return the time until the deadline."""
        return self.at - self._clock()

    def is_near(self) -> bool:
        """Return whether it is time to stop; to be asked a few times a second."""
        now = self._clock()
        seen = self._progress()
        if seen != self._seen:
            if self._seen_at is not None:
                self._longest = max(self._longest, now - self._seen_at)
            self._seen, self._seen_at = seen, now
        return now >= self.at - RESERVE_SECONDS - _SAVE_FACTOR * self._save_seconds() - self._longest
