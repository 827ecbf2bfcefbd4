"""The Python stacks of processes that do not answer: a signal lets C code write them, whatever Python is doing.

`faulthandler` needs no GIL for it. Data-loading workers that are forked inherit both the handler and its file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO, final

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
