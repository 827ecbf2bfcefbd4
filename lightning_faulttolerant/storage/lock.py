"""Let only one process at a time write into the directory of a run: a lock on a disk, a lease in an object store.

A process that dies, in whatever way, no longer holds the lock.

Locks on a disk are the operating system's locks on open files. They don't conflict within a process, and closing any
descriptor of a file drops the process's lock on it. So a process must know the files that it holds, and never open one
of them again. A fork has the descriptors, but no lock.

Below a URL, no file system can provide a lock. The protocol of the lease and its limits are in
docs/decisions/0015-remote-runs.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar, final

from lightning_faulttolerant.errors import CheckpointError, RunInUseError
from lightning_faulttolerant.processes import is_alive, this_machine
from lightning_faulttolerant.records.lines import open_own, parse_json
from lightning_faulttolerant.storage.local import make_directory
from lightning_faulttolerant.storage.store import is_url, local_path

_logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"

_Lock = TypeVar("_Lock", bound="Lock")


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


os.register_at_fork(after_in_child=_forget_after_fork)


@final
class FileLock:
    """One lock of this thread, against other threads and other processes.

    The file exists while the lock is held. Its size announces to all processes how many bytes the holder is about to
    write elsewhere, if it has no content.

    Args:
        path: The lock's file, in an existing directory.
        opens: Opens the file, as ``os.open`` does.
    """

    def __init__(self, path: str, *, opens: Callable[[str, int, int], int] = os.open) -> None:
        self.path = path
        self.found = b""
        """What the holder has written, if the lock could not be taken."""
        self.error: OSError | None = None
        """Why the file system can't lock, if it can't. The lock counts as taken then."""
        self._opens = opens
        self._descriptor = -1

    def take(self, content: bytes = b"") -> bool:
        """Take the lock if it is free, and return whether it was.

        Args:
            content: What to write into the file.

        Raises:
            OSError: If the file can't be opened or written.
        """
        with _held_lock:
            if self.path in _held:  # opening it again would drop the lock
                self.found = _this_process().encoded()
                return False
            is_free = True
            while is_free:
                descriptor = self._opens(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    is_free = self._is_locked(descriptor)
                    if is_free and self._is_at_its_path(descriptor):
                        os.ftruncate(descriptor, 0)  # removes what a dead holder has written
                        os.write(descriptor, content)
                        _held[self.path] = self._descriptor = descriptor
                        return True
                    self.found = os.read(descriptor, 4096)
                finally:
                    if self._descriptor != descriptor:
                        os.close(descriptor)
            return False

    def _is_locked(self, descriptor: int) -> bool:
        try:
            # A record lock, not flock: data-loading workers inherit the descriptor by fork and may outlive a main
            # process that was killed with SIGKILL. They would keep holding a flock. A record lock belongs to the
            # process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self.error = error
        return True

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:  # its holder has removed it, to release the lock
            return False

    def announce(self, num_bytes: int) -> None:
        """Announce to all processes how many bytes are about to be written."""
        with contextlib.suppress(OSError):  # a full file system without sparse files
            os.ftruncate(self._descriptor, num_bytes)

    def release(self) -> None:
        """Release the lock; does nothing if this object does not hold it, such as in a forked child."""
        with _held_lock:
            if _held.get(self.path) != self._descriptor:
                return
            # Removed while still locked: a waiter at the old file sees that it is gone and takes the new one.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            del _held[self.path]
            os.close(self._descriptor)
            self._descriptor = -1


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
        self._file: FileLock | None = None

    def acquire(self) -> None:
        """Take the lock, or fail without waiting.

        Raises:
            RunInUseError: If another process, or another object in this process, holds it.
            OSError: If the directory can't be written.
        """
        make_directory(self.directory)
        path = os.path.join(os.path.realpath(self.directory), LOCK_NAME)
        file = FileLock(path, opens=open_own)
        if not file.take(_this_process().encoded()):  # another holder may not have written its name yet
            raise RunInUseError(describe_holder(self.directory, _decoded(file.found)))
        if file.error is not None:
            _logger.warning(
                "Can't lock %s (%s). Training continues. Make sure that no second run writes there.",
                self.directory, file.error,
            )  # fmt: skip
        self._file, self._process_id = file, os.getpid()

    def check(self) -> None:
        """Do nothing: the operating system keeps this lock for as long as the process lives, even while it sleeps."""

    def release(self) -> None:
        """Release the lock; does nothing if this object does not hold it, such as in a forked child."""
        if self.is_held and self._file is not None:
            self._process_id = None
            self._file.release()


def describe_holder(directory: Path | str, holder: Holder | None) -> str:
    """Return a message that names the holder of a run's directory, and says why that matters and what to do."""
    this = " (this one)" if holder is not None and holder.is_this_process else ""
    return (
        f"{directory} is in use by {_name(holder)}{this}. Two runs in one directory would overwrite each other's "
        "checkpoints. Wait for that run, stop it, or give this run another directory or run id."
    )


LEASE_SECONDS = 30.0
"""A holder that has not renewed for this time is taken for dead."""
RENEWALS_PER_LEASE = 3
_LOOKS_PER_LEASE = 30

# Tokens with the process that holds them: after a fork the child has a copy of the entry, but not the lock.
_tokens: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The content of the lock's file or object."""

    hostname: str
    process_id: int
    token: str = ""
    num_renewals: int = 0
    machine: str = ""

    @property
    def is_this_process(self) -> bool:
        """Whether it is this process, or an earlier one with the same id."""
        return (self.hostname, self.process_id) == (socket.gethostname(), os.getpid())

    def encoded(self) -> bytes:
        """Return the content as bytes."""
        return json.dumps(asdict(self)).encode()


def _this_process(token: str = "") -> Holder:
    return Holder(hostname=socket.gethostname(), process_id=os.getpid(), token=token, machine=this_machine())


@final
class RunLease(Lock):
    """A lock that keeps other processes out of a run's directory in an object store, like a local ``RunLock``.

    The lock is the object ``run.lock``, and a thread renews it. Another process may take over a lock that was not
    renewed for ``lease_seconds``, so a holder that was asleep may have lost it. Call ``check`` before anything is
    published.

    Args:
        url: The directory of the run.
        lease_seconds: How long a silent holder is believed to be alive.
    """

    def __init__(self, url: str, *, lease_seconds: float = LEASE_SECONDS) -> None:
        from lightning_faulttolerant.storage.remote import RemoteStore  # fsspec, which local runs don't need

        self.url = url
        self._store = RemoteStore(url)
        self._lease_seconds = lease_seconds
        self._held = Holder(hostname="", process_id=0)
        self._is_over = threading.Event()
        self._thread = threading.Thread()

    def acquire(self) -> None:
        """Take the lock. Wait for the length of a lease if it is unknown whether its holder is alive.

        Raises:
            RunInUseError: If it is held.
            OSError: If the URL can't be written.
        """
        us = _this_process(secrets.token_hex(16))
        found = self._store.read(LOCK_NAME)
        if found is None:
            try:
                self._store.create(LOCK_NAME, us.encoded())
            except FileExistsError:  # another process was faster
                found = self._store.read(LOCK_NAME) or b""
        if found is not None:
            self._wait_for_silence(found)
            self._store.replace(LOCK_NAME, us.encoded())
        self._demand_token(us.token)
        self._held, self._process_id = us, os.getpid()
        _tokens[us.token] = os.getpid()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(self._is_over,), name="run-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise unless this object still holds the lock.

        Raises:
            RunInUseError: If another process has taken it over, or it was removed.
            OSError: If that can't be checked.
        """
        if not self.is_held:
            raise RunInUseError(
                f"This process doesn't hold the lock of {self.url}. Two runs in one directory would overwrite it."
            )
        self._demand_token(self._held.token)

    def release(self) -> None:
        """Release the lock; does nothing if this object does not hold it, such as in a forked child."""
        if not self.is_held:
            return
        self._is_over.set()
        self._thread.join(self._lease_seconds)
        self._process_id = None
        _tokens.pop(self._held.token, None)
        with contextlib.suppress(OSError):
            holder = _decoded(self._store.read(LOCK_NAME) or b"")
            if holder is not None and holder.token == self._held.token:
                self._store.delete(LOCK_NAME)

    def _wait_for_silence(self, found: bytes) -> None:
        holder = _decoded(found)
        if holder is not None and _is_surely_dead(holder):
            _logger.info("%s was locked by %s, which has died. This run takes it over", self.url, _name(holder))
            return
        if holder is not None and _is_ours(holder):
            raise RunInUseError(describe_holder(self.url, holder))
        _logger.warning(
            "%s is locked by %s. If that process does not renew its lock within %g s, this run takes it over.",
            self.url, _name(holder), self._lease_seconds,
        )  # fmt: skip
        deadline = time.monotonic() + self._lease_seconds
        while time.monotonic() < deadline:
            time.sleep(self._lease_seconds / _LOOKS_PER_LEASE)
            now = self._store.read(LOCK_NAME)
            if now is None:
                return  # released
            if now != found:
                raise RunInUseError(describe_holder(self.url, _decoded(now)))
        _logger.warning("This run takes over %s: its lock was not renewed by %s", self.url, _name(holder))

    def _demand_token(self, token: str) -> None:
        holder = _decoded(self._store.read(LOCK_NAME) or b"")
        if holder is None:
            raise RunInUseError(
                f"The lock of this run, {self._store.path(LOCK_NAME)}, has been removed. Another run may write there "
                "now, and the two would overwrite each other's checkpoints. Nothing was written. Start this run again."
            )
        if holder.token != token:
            raise RunInUseError(
                f"{describe_holder(self.url, holder)} It has taken over the directory, "
                "because this process did not renew its lock in time. Nothing was written."
            )

    def _renew(self, is_over: threading.Event) -> None:
        num_renewals = 0
        while not is_over.wait(self._lease_seconds / RENEWALS_PER_LEASE):
            num_renewals += 1
            if not self._renew_once(num_renewals):
                return  # lost: the next check reports it

    def _renew_once(self, num_renewals: int) -> bool:
        try:
            holder = _decoded(self._store.read(LOCK_NAME) or b"")
            if holder is None or holder.token != self._held.token:
                return False
            self._store.replace(LOCK_NAME, replace(self._held, num_renewals=num_renewals).encoded())
        except (OSError, CheckpointError) as error:
            _logger.debug("The lock of %s could not be renewed. The next attempt follows: %s", self.url, error)
        return True


def _decoded(content: bytes) -> Holder | None:
    try:
        holder = Holder(**parse_json(content))
    except (ValueError, TypeError):
        return None
    return holder if isinstance(holder.process_id, int) else None


def _is_surely_dead(holder: Holder) -> bool:
    if (holder.hostname, holder.machine) != (socket.gethostname(), this_machine()) or _is_ours(holder):
        return False
    # Our own process id without a lock of ours: the number was given again, as in a restarted container.
    return holder.process_id == os.getpid() or not is_alive(holder.process_id)


def _is_ours(holder: Holder) -> bool:
    return _tokens.get(holder.token) == os.getpid()


def _name(holder: Holder | None) -> str:
    return f"process {holder.process_id} on {holder.hostname}" if holder is not None else "a process on an unknown host"


def open_lock(path: str | os.PathLike[str]) -> Lock:
    """Return the lock of a directory, local or in an object store; it is not taken yet.

    Args:
        path: A directory, or the URL of one.
    """
    if not is_url(path):
        return RunLock(Path(local_path(path)))
    return RunLease(os.fspath(path))
