"""Names of files that are being written, from which everybody can tell whose they are, and when they are left over."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator

from lightning_faulttolerant.processes import is_alive

SUFFIX = ".tmp"

_NAME = re.compile(r".+\.(?P<hostname>[^/]+)\.(?P<process_id>\d+)\.(?P<token>[0-9a-f]{16})\.tmp")

# Processes of another host can't be asked whether they live. If the file of a living one is removed all the same, its
# download is repeated: nothing wrong can come of it.
_SILENT_SECONDS = 3600.0

# What this process is writing: in a container each start may have the same process id.
_own: set[str] = set()


@contextlib.contextmanager
def temporary_for(path: str) -> Iterator[str]:
    """Give a name beside a path, to be written and then moved to it; what is still there at the end is removed.

    Args:
        path: The name that the file will have; its directory is there.
    """
    # Dots separate the parts of the name.
    hostname = socket.gethostname().replace(".", "-") or "localhost"
    temporary = f"{path}.{hostname}.{os.getpid()}.{secrets.token_hex(8)}{SUFFIX}"
    _own.add(temporary)
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        _own.discard(temporary)


def sweep(directory: str) -> None:
    """Remove what processes that are dead were writing in a directory.

    Args:
        directory: Of the cache; sub-folders are not looked at.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and _is_left_over(entry):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _is_left_over(entry: os.DirEntry[str]) -> bool:
    match = _NAME.fullmatch(entry.name)
    if match is None or entry.path in _own:
        return False
    if match["hostname"] != socket.gethostname().replace(".", "-"):
        return _is_silent(entry)
    process_id = int(match["process_id"])
    return process_id == os.getpid() or not is_alive(process_id) or _is_silent(entry)


def _is_silent(entry: os.DirEntry[str]) -> bool:
    try:
        return time.time() - entry.stat().st_mtime > _SILENT_SECONDS
    except OSError:
        return False
