"""A signal that ends a process with a documented exit code, whatever Python is doing.

The handler is the C library's ``_exit`` itself, so that it needs no GIL. It gets the number of the signal as its
argument, which so becomes the exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import final

from lightning_faulttolerant.processes import is_running, parents_and_states, with_children

HANG_EXIT_CODE = 60
"""The exit code of a process that a watcher has ended because it hung, and the number of the signal for that."""
_ENDS_WITHIN_SECONDS = 2.0


@final
class ExitSignal:
    """Handles the signal from `__init__` to `close`. Only Linux has signals to spare for it."""

    def __init__(self) -> None:
        self._previous: int | None = None
        self._is_handled = sys.platform == "linux" and signal.getsignal(HANG_EXIT_CODE) is signal.SIG_DFL
        if self._is_handled:
            library = _library()
            self._previous = library.signal(HANG_EXIT_CODE, ctypes.cast(library._exit, ctypes.c_void_p))

    def close(self) -> None:
        """Give the signal back. May be called twice."""
        if self._is_handled:
            self._is_handled = False
            _library().signal(HANG_EXIT_CODE, self._previous)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return library


def end_hung(process_ids: Iterable[int]) -> None:
    """End processes with `HANG_EXIT_CODE`, and kill their descendants, and those that do not end in time."""
    hung = set(process_ids)
    parents, _ = parents_and_states()
    family = with_children(hung, parents)
    for process_id in hung:
        _send(process_id, HANG_EXIT_CODE if sys.platform == "linux" else signal.SIGKILL)
        _send(process_id, signal.SIGCONT)  # a stopped process handles its signals when it continues
    for process_id in family - hung - {os.getpid()}:  # a watcher is a child of the process that it watches
        _send(process_id, signal.SIGKILL)
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while time.monotonic() < deadline and any(map(is_running, hung)):
        time.sleep(0.02)
    for process_id in filter(is_running, hung):
        _send(process_id, signal.SIGKILL)


def _send(process_id: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)
