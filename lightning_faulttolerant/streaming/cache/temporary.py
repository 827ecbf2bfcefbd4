"""Names of files being written. Every process can tell from the name who writes it, and whether it is left over."""

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

# It is unknown whether processes of another host are alive. If the file of a living one is removed, its download is
# repeated: nothing else can go wrong.
_SILENT_SECONDS = 3600.0

# The files that this process is writing: in a container, each start may have the same process id.
_own: set[str] = set()


@contextlib.contextmanager
def temporary_for(path: str) -> Iterator[str]:
    """Yield a temporary name beside a path, to be written and then moved to the path. A leftover file is removed.

    Args:
        path: The final name of the file, in an existing directory.
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
    """Remove the files that dead processes were writing in a directory.

    Args:
        directory: The directory of the cache. Subfolders are not checked.
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
