"""Waits for a limited time, in a way that another thread can end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.05

# Each thread has its own context, and begins with an empty one.
_stop: ContextVar[threading.Event | None] = ContextVar("_stop", default=None)


class StoppedError(BaseException):
    """This thread no longer needs to wait. It is not a data error, so handlers of data errors don't catch it."""


@contextlib.contextmanager
def stoppable(stop: threading.Event) -> Iterator[None]:
    """Let an event end the waits in the block, with a StoppedError.

    Args:
        stop: Set by another thread.
    """
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def pause(seconds: float) -> None:
    """Sleep.

    Raises:
        StoppedError: If this thread is stopped.
    """
    stop = _stop.get()
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise StoppedError


def result_in_time(future: concurrent.futures.Future[Result], timeout_seconds: float) -> Result:
    """Return the result of a future.

    Args:
        future: It is cancelled, if possible, when it is given up.
        timeout_seconds: The longest time that it may take.

    Raises:
        TimeoutError: If it takes longer.
        StoppedError: If this thread is stopped.
        Exception: What the future raises.
    """
    stop, deadline = _stop.get(), time.monotonic() + timeout_seconds
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0 or (stop is not None and stop.is_set()):
            future.cancel()
            if left <= 0:
                raise TimeoutError(f"it has not ended in {timeout_seconds:g} s")
            raise StoppedError
        concurrent.futures.wait([future], left if stop is None else min(left, _LOOK_SECONDS))
    return future.result()
