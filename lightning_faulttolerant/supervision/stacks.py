"""Signals that work whatever Python is doing: one lets C code write the Python stacks, the other ends the process.

`faulthandler` needs no GIL for the stacks. Data-loading workers that are forked inherit both the handler and its file.

The handler that ends the process with a documented exit code is the C library's ``_exit`` itself. It gets the number of
the signal as its argument, which so becomes the exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, final

from lightning_faulttolerant.processes import is_running, parents_and_states, with_children

SIGNAL: int | None = signal.SIGRTMAX - 6 if hasattr(signal, "SIGRTMAX") else None
"""The signal that lets a process write its stacks; ``None`` if the system has no signals to spare."""
_PREFIX = "stacks-"
_ANSWERS_WITHIN_SECONDS = 1.0
_COMPLETE_AFTER_SECONDS = 0.1
# Functions in which a rank waits for the others.
_COLLECTIVE = ("torch/distributed/", "_engine_run_backward", "lightning_faulttolerant/trainer/ranks/")
_LOOKS_ON = "lightning_faulttolerant/trainer/ranks/watch.py"


@final
class StackHandler:
    """Lets a watcher read the stacks of this process, from `__init__` to `close`.

    Args:
        directory: The directory that the watcher reads.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._file: IO[bytes] | None = None
        if SIGNAL is not None and signal.getsignal(SIGNAL) is signal.SIG_DFL:
            self._file = open(stacks_path(directory, os.getpid()), "ab")  # noqa: SIM115 - closed in `close`
            faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    def close(self) -> None:
        """Give the signal back. May be called twice."""
        if self._file is not None and SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
            self._file.close()
            self._file = None


def stacks_path(directory: str | os.PathLike[str], process_id: int) -> Path:
    """Return the file into which a process and its workers write their stacks."""
    return Path(directory) / f"{_PREFIX}{process_id}"


def stacks_of(process_id: int, path: Path, state: str) -> str:
    """Return the stacks of a process, or why there are none.

    Args:
        process_id: The process.
        path: The file that it writes to.
        state: Its state, as ``/proc`` names it.
    """
    if state in "Tt":
        return "stopped by a signal; it can't write its stacks"
    if SIGNAL is None or not _catches(process_id, SIGNAL):
        return "it has no handler that writes its stacks"
    begin = _size(path)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, SIGNAL)
    deadline, size, since = time.monotonic() + _ANSWERS_WITHIN_SECONDS, begin, time.monotonic()
    while time.monotonic() < deadline and not (size > begin and time.monotonic() - since > _COMPLETE_AFTER_SECONDS):
        time.sleep(0.01)
        if (now := _size(path)) != size:
            size, since = now, time.monotonic()
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").strip() or "it did not write its stacks"
    return "it did not write its stacks"


def waits_for_others(stacks: str) -> bool:
    """Return whether the innermost function of a thread waits for other ranks."""
    threads = [text for text in stacks.split("\n\n") if _LOOKS_ON not in text]
    heads = [text.strip().splitlines()[1:4] for text in threads]
    return any(part in line for head in heads for line in head for part in _COLLECTIVE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _catches(process_id: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal. It would end one that has none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


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
