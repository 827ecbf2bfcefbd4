"""Let only one process at a time write below a URL, where no file system can provide a lock.

The protocol and its limits are in docs/decisions/0015-remote-runs.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import final

from lightning_faulttolerant.errors import CheckpointError, RunInUseError
from lightning_faulttolerant.processes import is_alive, this_machine
from lightning_faulttolerant.storage.lock import LOCK_NAME, Lock, describe_holder
from lightning_faulttolerant.storage.remote import RemoteStore

_logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""A holder that has not renewed for this time is taken for dead."""
RENEWALS_PER_LEASE = 3
_LOOKS_PER_LEASE = 30

# Tokens with the process that holds them: after a fork the child has a copy of the entry, but not the lock.
_tokens: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """The content of the lock object."""

    hostname: str
    process_id: int
    token: str
    num_renewals: int = 0
    machine: str = ""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


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
        self.url = url
        self._store = RemoteStore(url)
        self._lease_seconds = lease_seconds
        self._held = _Holder(hostname="", process_id=0, token="")
        self._is_over = threading.Event()
        self._thread = threading.Thread()

    def acquire(self) -> None:
        """Take the lock. Wait for the length of a lease if it is unknown whether its holder is alive.

        Raises:
            RunInUseError: If it is held.
            OSError: If the URL can't be written.
        """
        us = _Holder(
            hostname=socket.gethostname(),
            process_id=os.getpid(),
            token=secrets.token_hex(16),
            machine=this_machine(),
        )
        found = self._store.read(LOCK_NAME)
        if found is None:
            try:
                self._store.create(LOCK_NAME, us.encoded())
            except FileExistsError:  # another process was faster
                self._wait_for_silence(self._store.read(LOCK_NAME) or b"")
                self._store.replace(LOCK_NAME, us.encoded())
        else:
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
                f"{self.url} is not held by this process. Two runs in one directory would overwrite it."
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
            _logger.info("%s was held by %s, which has died: it is taken over", self.url, _name(holder))
            return
        if holder is not None and _is_ours(holder):
            raise RunInUseError(describe_holder(self.url, holder.hostname, holder.process_id))
        _logger.warning(
            "%s is held by %s. If it is not renewed within %g s, it is taken over.",
            self.url, _name(holder), self._lease_seconds,
        )  # fmt: skip
        deadline = time.monotonic() + self._lease_seconds
        while time.monotonic() < deadline:
            time.sleep(self._lease_seconds / _LOOKS_PER_LEASE)
            now = self._store.read(LOCK_NAME)
            if now is None:
                return  # released
            if now != found:
                holder = _decoded(now)
                hostname, process_id = (holder.hostname, holder.process_id) if holder else ("an unknown host", None)
                raise RunInUseError(describe_holder(self.url, hostname, process_id))
        _logger.warning("%s was not renewed by %s: it is taken over", self.url, _name(holder))

    def _demand_token(self, token: str) -> None:
        holder = _decoded(self._store.read(LOCK_NAME) or b"")
        if holder is None:
            raise RunInUseError(
                f"The lock of this run, {self._store.path(LOCK_NAME)}, has been removed. Another run may write there "
                "now, and the two would overwrite each other's checkpoints. Nothing was written. Start this run again."
            )
        if holder.token != token:
            raise RunInUseError(
                f"{describe_holder(self.url, holder.hostname, holder.process_id)} It has taken over the directory, "
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
            _logger.debug("%s could not be renewed. The next attempt follows: %s", self.url, error)
        return True


def _decoded(content: bytes) -> _Holder | None:
    try:
        return _Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _is_surely_dead(holder: _Holder) -> bool:
    if (holder.hostname, holder.machine) != (socket.gethostname(), this_machine()) or _is_ours(holder):
        return False
    # Our own process id without a lock of ours: the number was given again, as in a restarted container.
    return holder.process_id == os.getpid() or not is_alive(holder.process_id)


def _is_ours(holder: _Holder) -> bool:
    return _tokens.get(holder.token) == os.getpid()


def _name(holder: _Holder | None) -> str:
    return f"process {holder.process_id} on {holder.hostname}" if holder is not None else "somebody"
