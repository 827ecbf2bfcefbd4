"""Error messages of the command line for failed commands, without a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.storage.store import is_url


@contextlib.contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Turn any error of the package that opens a URL into an ``OSError``. Local files raise no others.

    Args:
        path: Path or URL that the block reads.
    """
    if not is_url(path):
        yield
        return
    from lightning_faulttolerant.storage import file_systems

    with file_systems.remote_errors(path):
        yield


def reason_of(error: OSError | FaultToleranceError) -> str:
    """Return the reason for an error, on one line and without the error number.

    Args:
        error: The error.
    """
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def is_damage(error: OSError) -> bool:
    """Return whether the disk failed to return the bytes, for a reason other than a missing permission.

    Args:
        error: An error raised by a read.
    """
    return error.errno == errno.EIO
