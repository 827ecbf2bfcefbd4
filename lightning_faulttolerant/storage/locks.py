"""The lock of a run's directory, of the kind that the directory needs."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_faulttolerant.storage.lock import Lock, RunLock
from lightning_faulttolerant.storage.store import is_url, local_path


def open_lock(path: str | os.PathLike[str]) -> Lock:
    """Return the lock of a directory, local or in an object store; it is not taken yet.

    Args:
        path: A directory, or the URL of one.
    """
    if not is_url(path):
        return RunLock(Path(local_path(path)))
    from lightning_faulttolerant.storage.lease import RunLease

    return RunLease(os.fspath(path))
