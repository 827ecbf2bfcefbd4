"""What the command line says when it can't do what it was asked for, without a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lightning_faulttolerant.checkpoint.store import is_url
from lightning_faulttolerant.errors import FaultToleranceError


class UnreachableError(OSError):
    """A store could not be asked: no credentials, no network, an error of its own."""


@contextlib.contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Make one kind of error of all that the package behind a URL may raise.

    Args:
        path: Path or URL; errors of local files are passed on as they are.

    Raises:
        UnreachableError: In the place of anything that is neither an ``OSError`` nor ours.
    """
    try:
        yield
    except (OSError, FaultToleranceError):
        raise
    except Exception as error:
        if not is_url(path):
            raise
        raise UnreachableError(f"{path} can't be reached: {type(error).__name__}: {error}") from error


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
