"""Ends worker processes without the main process treating their end as a fault."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def default_sigchld() -> Iterator[None]:
    """Ignore the deaths of child processes."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except (ValueError, AttributeError):  # not the main thread, or the signal doesn't exist on this platform
        handler = None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def end_children(process_ids: Sequence[int], *, timeout_seconds: float) -> None:
    """End those children of these process ids that still exist; kill those that don't exit in time."""
    children = {child.pid: child for child in multiprocessing.active_children()}
    found = [children[process_id] for process_id in process_ids if process_id in children]
    if not found:
        return
    # torch's SIGCHLD handler raises in the main process when a worker is killed.
    with default_sigchld():
        for child in found:
            child.terminate()
        deadline = time.monotonic() + timeout_seconds
        for child in found:
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.join(timeout_seconds)
