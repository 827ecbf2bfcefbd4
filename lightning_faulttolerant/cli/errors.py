"""What the command line says when it can't do what it was asked for, without a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lightning_faulttolerant.checkpoint.store import is_url
from lightning_faulttolerant.errors import FaultToleranceError


@contextlib.contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Make an ``OSError`` of whatever the package behind a URL may raise; local files have no others.

    Args:
        path: Path or URL that the block reads.
    """
    if not is_url(path):
        yield
        return
    from lightning_faulttolerant.checkpoint.stores import file_systems

    with file_systems.remote_errors(path):
        yield


def reason_of(error: OSError | FaultToleranceError) -> str:
    """Return what went wrong, on one line and without the error's number.

    Args:
        error: What was raised.
    """
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def is_damage(error: OSError) -> bool:
    """Return whether the disk could not give the bytes back, other than for a missing permission.

    Args:
        error: Raised by a read.
    """
    return error.errno == errno.EIO
