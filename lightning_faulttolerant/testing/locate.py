"""Find the absolute path for the argument of an ``os`` function: a path, relative or not, or a descriptor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def locate(file: Any, dir_fd: int | None = None) -> Path | None:
    """Return the path with links in its directories resolved, but not the last name; None if there is no path.

    Args:
        file: A path (str, bytes, ``PathLike``), or an open descriptor.
        dir_fd: The open directory that a relative path is relative to.
    """
    if isinstance(file, int):
        return _path_of(file)
    try:
        path = os.fsdecode(file)
    except TypeError:
        return None
    folder = _path_of(dir_fd) if dir_fd is not None else None
    path = os.path.join(folder or "", path)
    return Path(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(os.path.abspath(path)))


def _path_of(descriptor: int) -> Path | None:
    try:
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(descriptor, 50, bytes(1024)).rstrip(b"\0")))  # 50: F_GETPATH
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
