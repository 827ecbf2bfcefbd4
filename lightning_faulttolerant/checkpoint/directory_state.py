"""The state of one directory of a series, and whether a process is still writing it."""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_faulttolerant.checkpoint.contents import verify_directory
from lightning_faulttolerant.checkpoint.manifest import read_manifest
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.processes import is_alive, this_machine
from lightning_faulttolerant.storage.atomic_file import ABANDONED_AFTER_SECONDS

# The directories that this process began and did not end, by path. A series that is gone after an error writes no more.
being_written: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class State(Enum):
    """The state of a directory, by its manifest."""

    COMMITTED = "committed"  # its manifest says so; it need not verify
    BEGUN = "begun"
    EMPTY = "empty"  # no manifest, no file
    FOREIGN = "foreign"  # files, and no manifest: written by other software, or by cycling_utils


def state_of(path: Path) -> State:
    """Return the state of a directory; a missing one is empty.

    Args:
        path: The directory.

    Raises:
        OSError: If it can't be checked.
    """
    try:
        return State.COMMITTED if read_manifest(path).is_committed else State.BEGUN
    except CheckpointError:
        return State.COMMITTED  # damaged, or of a newer version: verifying reports it
    except (FileNotFoundError, NotADirectoryError):
        return State.FOREIGN if _has_files(path) else State.EMPTY
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return State.COMMITTED


def _has_files(path: Path) -> bool:
    try:
        return any(names for _, _, names in walk(path))
    except FileNotFoundError:  # its writer is deleting it
        return False


def walk(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a directory from the bottom up; one that can't be listed is an error, not an empty one.

    Args:
        path: The directory; links in it are not followed.

    Raises:
        OSError: If a directory can't be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    return os.walk(path, topdown=False, onerror=fail)


def has_all_files(path: Path) -> bool:
    """Return whether the files that a manifest names exist with the right sizes, without reading them.

    Args:
        path: The directory.
    """
    try:
        verify_directory(path, contents=False)
    except CheckpointError:
        return False
    return True


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of an uncommitted directory is gone.

    Args:
        path: A directory that was begun.
    """
    try:
        owner = read_manifest(path).owner or {}
        paths = [os.path.join(folder, name) for folder, _, names in walk(path) for name in (".", *names)]
        last_change = max(os.lstat(changed).st_mtime for changed in paths)
    except FileNotFoundError:  # its writer is at work, or another process is deleting it
        return False
    if owner.get("hostname") != _hostname() or owner.get("machine", "") != this_machine():
        return time.time() - last_change > ABANDONED_AFTER_SECONDS
    process_id = owner.get("process_id")
    if process_id == os.getpid():  # or an earlier process with the same id, as in containers
        return str(path) not in being_written
    return not (isinstance(process_id, int) and is_alive(process_id))


def this_process() -> dict[str, str | int]:
    """Describe this process, as the owner of a directory."""
    return {"hostname": _hostname(), "machine": this_machine(), "process_id": os.getpid()}


def _hostname() -> str:
    return socket.gethostname().replace("/", "_")
