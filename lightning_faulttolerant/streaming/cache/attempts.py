"""Repeats operations that may succeed the next time: how often, after which pauses, and which errors are final."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_faulttolerant.streaming.cache.remote import is_final
from lightning_faulttolerant.streaming.cache.timeouts import pause

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 30.0
# Errors of the local disk, not of the network: the disk will be as full the next time.
_OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# A separate generator: a draw from the run's generators would change its results.
_jitter = random.Random()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The policy for download attempts.

    Args:
        retry: How often a download is tried again after the first attempt. 0 is a single attempt.
        timeout_seconds: The limit for each attempt, whatever the other side does.
    """

    retry: int = 2
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.retry, bool) or not isinstance(self.retry, int) or self.retry < 0:
            raise ValueError(f"download_retry is {self.retry!r}. Pass the number of further attempts, 0 or more.")
        if not self.timeout_seconds > 0:
            raise ValueError(f"download_timeout is {self.timeout_seconds!r}. Pass a number of seconds above 0.")

    @property
    def longest_seconds(self) -> float:
        """The longest possible time of all attempts and the pauses between them."""
        return sum(self.timeout_seconds + _longest_pause(number) for number in range(self.retry + 1))

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Return the result of the first attempt that succeeds.

        Args:
            attempt: The function to call. It keeps its own time limit.

        Raises:
            FailedError: With the number of attempts, and the last error as its cause.
            ImportError: Immediately.
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
    """No attempt succeeded. The cause is the error of the last attempt.

    Args:
        num_attempts: The number of attempts.
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
