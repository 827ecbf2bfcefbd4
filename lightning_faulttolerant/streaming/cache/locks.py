"""Lets only one process of a machine at a time fetch a shard. A process that dies in any way releases its locks.

A lock only saves work. Published files are complete without it, because publishing is one ``os.replace``. Where a file
system can't lock (some network file systems), and on Windows, each process fetches for itself.

A forked child, above all a data-loading worker, holds no locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import final

from lightning_faulttolerant.storage.lock import is_still_at, try_lock
from lightning_faulttolerant.streaming.cache.downloads import pause

_logger = logging.getLogger(__name__)

_FIRST_LOOK_SECONDS = 0.002
_LAST_LOOK_SECONDS = 0.05


@final
class ProcessLock:
    """A lock between the threads of one process. A forked child finds it open, even if the parent held it.

    It is pickled as an open lock.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._process_id != os.getpid():
            # The fork did not copy the thread that holds it.
            self._process_id, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()


# The descriptors of the locks that this process holds.
_held: dict[str, int] = {}
_held_lock = ProcessLock()


def _forget_after_fork() -> None:
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_after_fork)


@final
class FileLock:
    """One lock of this thread, against other threads and other processes.

    The file exists while the lock is held. It has no content. Its size announces to all processes how many bytes the
    holder is about to write elsewhere.

    Args:
        path: The lock's file, in an existing directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self, timeout_seconds: float) -> bool:
        """Take the lock, or give up after a time.

        Args:
            timeout_seconds: How long to try; 0 tries once.
        """
        deadline = time.monotonic() + timeout_seconds
        seconds = _FIRST_LOOK_SECONDS
        while not self._take():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pause(min(seconds, left))
            seconds = min(2 * seconds, _LAST_LOOK_SECONDS)
        return True

    def announce(self, num_bytes: int) -> None:
        """Announce to all processes how many bytes are about to be written."""
        with contextlib.suppress(OSError):  # a full file system without sparse files
            os.ftruncate(self._descriptor, num_bytes)

    def release(self) -> None:
        """Release the lock."""
        with _held_lock:
            if _held.get(self.path) != self._descriptor:
                return  # forked since
            # Removed while still locked: a waiter at the old file sees that it is gone and takes the new one.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            del _held[self.path]
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self) -> bool:
        with _held_lock:
            if self.path in _held:
                return False
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except PermissionError:
                if os.path.exists(self.path):
                    return False  # another user's
                raise
            if not (_lock(descriptor) and is_still_at(self.path, descriptor)):
                os.close(descriptor)
                return False
            _held[self.path] = self._descriptor = descriptor
            self.announce(0)  # removes the announcement of a dead holder
            return True


@contextlib.contextmanager
def locked(path: str, timeout_seconds: float) -> Iterator[FileLock | None]:
    """Hold a lock in a block; yield None if it could not be taken in time.

    Args:
        path: The lock's file, in an existing directory.
        timeout_seconds: How long to wait for it.
    """
    lock = FileLock(path)
    if not lock.acquire(timeout_seconds):
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()


def is_abandoned(path: str) -> bool:
    """Return whether a lock's file is the leftover of a dead process. In that case, remove it."""
    lock = FileLock(path)
    if not lock.acquire(0):
        return False
    lock.release()
    return True


def _lock(descriptor: int) -> bool:
    try:
        return try_lock(descriptor)
    except OSError as error:
        _logger.debug("A cache directory can't be locked (%s): each process fetches for itself.", error)
        return True
