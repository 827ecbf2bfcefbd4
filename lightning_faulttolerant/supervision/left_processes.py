"""The processes that an ended process has left in its session, such as data-loading workers without a parent.

A worker ends when its parent is gone, but not if the parent was killed while it started the worker: torch's check
compares the parent with the one that the worker found first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from lightning_faulttolerant.processes import in_sessions

_ENDS_WITHIN_SECONDS = 2.0


def end_left(leaders: Iterable[int]) -> None:
    """End what is left in the sessions of processes that have ended: by SIGTERM, and by SIGKILL two seconds later.

    Args:
        leaders: The processes, each the leader of its session.
    """
    sessions = set(leaders)
    left = in_sessions(sessions)
    for process_id in left:
        _send(process_id, signal.SIGTERM)
        _send(process_id, signal.SIGCONT)  # a stopped process handles its signals when it continues
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = in_sessions(sessions)
    for process_id in left:
        _send(process_id, signal.SIGKILL)


def _send(process_id: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)
