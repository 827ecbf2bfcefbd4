"""Work on a storage that may hang itself, such as a network file system: nobody waits long for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

STORAGE_ANSWERS_WITHIN_SECONDS = 5.0


def begin(work: Callable[[], None]) -> threading.Thread:
    """Begin work in a thread, which does not keep the process from its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def done_within(seconds: float, work: Callable[[], None]) -> bool:
    """Do work in a thread; return whether it was done in time. If not, it continues there.

    Args:
        seconds: How long to wait for it.
        work: The work.
    """
    thread = begin(work)
    thread.join(seconds)
    return not thread.is_alive()
