"""A deadline that is known in advance: when to stop, so that the state is saved in time without a signal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta

RESERVE_SECONDS = 10.0
"""The time kept free for the end of the process, besides the time for a save and for a batch."""
_SAVE_FACTOR = 1.2
_DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def checked_deadline(deadline: datetime | timedelta | str | None) -> float | None:
    """Return a deadline as seconds since 1970.

    Args:
        deadline: The deadline. A ``datetime`` without a time zone is in local time, a ``timedelta`` counts from now. A
            string is either of them as Python prints it.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is a ``timedelta`` that is not positive, or a string that is neither.
    """
    if deadline is None:
        return None
    if isinstance(deadline, str):
        deadline = _parsed(deadline)
    if isinstance(deadline, timedelta):
        if deadline <= timedelta(0):
            raise ValueError(f"deadline must be positive if it is a timedelta, got {deadline}.")
        return time.time() + deadline.total_seconds()
    if not isinstance(deadline, datetime):
        raise TypeError(f"deadline must be a datetime or a timedelta, got {deadline!r}.")
    return deadline.timestamp()


def duration(text: str) -> timedelta | None:
    """Return `text`, such as ``0:05:00`` or ``2 days, 4:00:00``, as a duration; ``None`` if it is not one."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = found.groups()
    return timedelta(days=int(days or 0), hours=int(hours), minutes=int(minutes), seconds=float(seconds))


def _parsed(text: str) -> datetime | timedelta:
    """Return `text` as a time or a duration: configuration files have no type for either."""
    from_now_on = duration(text)
    if from_now_on is not None:
        return from_now_on
    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text))  # Python 3.10 does not know the Z
    except ValueError:
        raise ValueError(
            f"deadline is {text!r}, which is neither a time such as '2026-12-31 18:30:00+01:00' nor a time from now on"
            " such as '4:00:00' or '2 days, 4:00:00'."
        ) from None


class Deadline:
    """Knows when a run has to stop to be saved before its deadline.

    The time in between is that of a save, plus the longest time between two batches so far, of training or validation,
    plus `RESERVE_SECONDS`.

    Args:
        at: The deadline, in seconds since 1970.
        save_seconds: Returns how long a save takes, known from earlier saves.
        progress: Returns a value that changes with every batch.
        clock: Returns the time, in seconds since 1970.
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
        """Return whether it is time to stop. Call this a few times a second."""
        now = self._clock()
        seen = self._progress()
        if seen != self._seen:
            if self._seen_at is not None:
                self._longest = max(self._longest, now - self._seen_at)
            self._seen, self._seen_at = seen, now
        return now >= self.at - RESERVE_SECONDS - _SAVE_FACTOR * self._save_seconds() - self._longest
