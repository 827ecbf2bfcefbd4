"""The operating system's lock on an open file. It ends with the process that took it, however that ends.

These locks don't conflict within a process, and closing any descriptor of a file drops the process's lock on it. So a
process must know the files that it holds, and never open one of them again. A fork has the descriptors, but no lock.
"""

from __future__ import annotations

import errno
import os
import sys

if sys.platform != "win32":
    import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file, and return False if another process holds it.

    Raises:
        OSError: If the file system, or the operating system, can't lock.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "there are no POSIX locks on Windows")
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
