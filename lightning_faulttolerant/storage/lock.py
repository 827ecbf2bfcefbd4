"""Let only one process at a time write into the directory of a run.

A process that dies, in whatever way, no longer holds the lock.

These are the operating system's locks on open files. They don't conflict within a process, and closing any descriptor
of a file drops the process's lock on it. So a process must know the files that it holds, and never open one of them
again. A fork has the descriptors, but no lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TypeVar, final

from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.storage.atomic_file import make_directory

_logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"

_Lock = TypeVar("_Lock", bound="Lock")

# The directories that this process holds. The value is its id: after a fork the child has the entry, but not the lock.
_holders: dict[str, int] = {}
_holders_lock = threading.Lock()


class Lock(ABC):
    """A lock that keeps other processes out of a run's directory; also a context manager."""

    _process_id: int | None = None
    """The process that took it, while it is held."""

    @property
    def is_held(self) -> bool:
        """Whether this object took the lock in this process; False in a forked child of the holder."""
        return self._process_id == os.getpid()

    @abstractmethod
    def acquire(self) -> None:
        """Take the lock, or raise ``RunInUseError``."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``RunInUseError`` if another process has taken it over."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; does nothing if this object does not hold it, such as in a forked child."""

    def __enter__(self: _Lock) -> _Lock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@final
class RunLock(Lock):
    """A lock that keeps other processes, and other ``RunLock`` objects of this one, out of a run's directory.

    The lock is ``run.lock`` in the directory. It holds the host name and process id of the holder for the error
    message, and is removed on release. If the file system can't lock, a warning is logged and the run continues
    unprotected.

    Args:
        directory: The directory of the run; created on ``acquire`` if it is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory, RunLock(Path(directory)) as lock:
        ...     lock.is_held
        True
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._key = ""
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock, or fail without waiting.

        Raises:
            RunInUseError: If another process, or another object in this process, holds it.
            OSError: If the directory can't be written.
        """
        make_directory(self.directory)
        key = os.path.realpath(self.directory)
        with _holders_lock:
            if _holders.get(key) == os.getpid():
                raise RunInUseError(describe_holder(self.directory, socket.gethostname(), os.getpid()))
            descriptor = _open_locked(self.directory)
            self._key, self._descriptor, self._process_id = key, descriptor, os.getpid()
            _holders[key] = os.getpid()

    def check(self) -> None:
        """Do nothing: the operating system keeps this lock for as long as the process lives, even while it sleeps."""

    def release(self) -> None:
        """Release the lock; does nothing if this object does not hold it, such as in a forked child."""
        if not self.is_held:
            return
        with _holders_lock:
            # Removed while still locked: a process waiting at the old file sees that it is gone and takes the new one.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._key, LOCK_NAME))
            os.close(self._descriptor)
            self._process_id = None
            del _holders[self._key]


def _open_locked(directory: Path) -> int:
    path = directory / LOCK_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, directory)
            if is_still_at(path, descriptor):
                _write_holder(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        is_locked = try_lock(descriptor)
    except OSError as error:
        _warn_unprotected(directory, str(error))
        return
    if not is_locked:
        hostname, process_id = _read_holder(descriptor)
        raise RunInUseError(describe_holder(directory, hostname, process_id))


def _warn_unprotected(directory: Path, reason: str) -> None:
    _logger.warning(
        "Can't lock %s (%s). Training continues. Make sure that no second run writes there.", directory, reason
    )


def _write_holder(descriptor: int) -> None:
    holder = json.dumps({"hostname": socket.gethostname(), "process_id": os.getpid()})
    os.truncate(descriptor, 0)
    os.write(descriptor, holder.encode())


def _read_holder(descriptor: int) -> tuple[str, int | None]:
    try:
        holder = json.loads(os.read(descriptor, 4096))
        return str(holder["hostname"]), int(holder["process_id"])
    except (ValueError, KeyError, TypeError):  # the process holds the lock, but has not written its name yet
        return "an unknown host", None


def describe_holder(directory: Path | str, hostname: str, process_id: int | None) -> str:
    """Return a message that names the holder of a run's directory, and says why that matters and what to do."""
    who = f"process {process_id} on {hostname}" if process_id is not None else f"a process on {hostname}"
    if process_id == os.getpid() and hostname == socket.gethostname():
        who += " (this one)"
    return (
        f"{directory} is in use by {who}. Two runs in one directory would overwrite each other's checkpoints. Wait "
        "for that run, stop it, or give this run another directory or run id."
    )


if sys.platform != "win32":
    import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file, and return False if another process holds it.

    Raises:
        OSError: If the file system, or the operating system, can't lock.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "Windows has no POSIX locks")
    try:
        # A record lock, not flock: data-loading workers inherit the descriptor by fork and may outlive a main process
        # that was killed with SIGKILL. They would keep holding a flock. A record lock belongs to the process.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def is_still_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Return whether an open file is the one at a path. Its holder may have removed it, to release the lock."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
