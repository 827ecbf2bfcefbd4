"""Ending worker processes without the main process taking their end for a fault."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def default_sigchld() -> Iterator[None]:
    """Let children die unnoticed."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except (ValueError, AttributeError):  # not the main thread, or no such signal here
        handler = None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
