"""Do again what may go well the next time: how often, after which pauses, and what is not worth it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_faulttolerant.streaming.cache.patience import pause
from lightning_faulttolerant.streaming.cache.remote import is_final

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 30.0
# The disk here, not the network: it will be as full the next time.
_OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# Of its own: a draw from the generators of the run would change its results.
_jitter = random.Random()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """How a download is tried.

    Args:
        retry: How often it is tried again after the first time; 0 is once in all.
        timeout_seconds: For each attempt, whatever the other side does.
    """

    retry: int = 2
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.retry, bool) or not isinstance(self.retry, int) or self.retry < 0:
            raise ValueError(f"download_retry is {self.retry!r}: give how often to try again, 0 or more.")
        if not self.timeout_seconds > 0:
            raise ValueError(f"download_timeout is {self.timeout_seconds!r}: give a number of seconds above 0.")

    @property
    def longest_seconds(self) -> float:
        """How long all of them and the pauses between them may take."""
        return sum(self.timeout_seconds + _longest_pause(number) for number in range(self.retry + 1))

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Return what an attempt returns, the first that goes well.

        Args:
            attempt: Keeps its own time.

        Raises:
            FailedError: With the number of attempts and the last error as its cause.
            ImportError: At once.
        """
        number = 0
        while True:
            try:
                return attempt()
            except ImportError:
                raise  # a package for a compression or a hash
            except Exception as error:
                number += 1
                if number > self.retry or is_final(error) or getattr(error, "errno", None) in _OF_THIS_DISK:
                    raise FailedError(number) from error
            pause(_longest_pause(number - 1) * _jitter.uniform(0.5, 1.0))


class FailedError(Exception):
    """No attempt went well; the cause is the error of the last.

    Args:
        num_attempts: How many there were.
    """

    def __init__(self, num_attempts: int) -> None:
        super().__init__(num_attempts)
        self.num_attempts = num_attempts

    def __str__(self) -> str:
        times = "attempt" if self.num_attempts == 1 else "attempts"
        cause = self.__cause__
        return f"{self.num_attempts} {times}, the last: {type(cause).__name__}: {cause}"


def _longest_pause(number: int) -> float:
    return min(_FIRST_PAUSE_SECONDS * 2.0**number, _LAST_PAUSE_SECONDS)
