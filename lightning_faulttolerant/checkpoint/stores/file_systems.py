"""fsspec's file system of a URL, with errors that are all OSErrors, and without a draw from the run's generators."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from lightning_faulttolerant.clients import (
    S3_PROTOCOLS,
    client_options,
    let_retries_draw_elsewhere,
    missing_package,
)
from lightning_faulttolerant.errors import CheckpointError, FaultToleranceError

_GCS_PROTOCOLS = ("gs", "gcs")
# Not EIO: a disk that says EIO has lost the data, a network has only not brought it.
_REMOTE_ERRNO: int = getattr(errno, "EREMOTEIO", errno.ECONNABORTED)
_ERRNOS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    TimeoutError: errno.ETIMEDOUT,
}


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    It is asked for each time: an instance of fsspec's belongs to one process and one thread, and fsspec keeps them.

    Args:
        url: Of a file or a directory.

    Raises:
        CheckpointError: If the package for this kind of URL is not installed, or there is none.
    """
    protocol = url.partition("://")[0]
    try:
        fs, path = fsspec.url_to_fs(url, **client_options(protocol))
    except ImportError as error:
        raise CheckpointError(
            f"{url} can't be opened: {error}. Without its package no checkpoint can be written there or read from "
            f"there. Install it: pip install {missing_package(error)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{url} can't be opened: {error}. Nothing could be written there or read from there. Give a directory, or "
            "a URL that fsspec knows, such as s3://bucket/folder."
        ) from error
    let_retries_draw_elsewhere()
    return fs, path


def is_s3(fs: Any) -> bool:
    """Tell whether a file system is s3fs's."""
    return _protocols(fs) == set(S3_PROTOCOLS)


def is_gcs(fs: Any) -> bool:
    """Tell whether a file system is gcsfs's."""
    return _protocols(fs) == set(_GCS_PROTOCOLS)


def move(fs: Any, path: str, new_path: str) -> None:
    """Move a file, in the way that its file system has for it; an object store copies it, and then deletes the first.

    Args:
        fs: Of fsspec.
        path: In it.
        new_path: In it, too.
    """
    # fsspec's own mv takes [, * and ? in a name for a pattern, and s3fs's passes over files that can't be deleted.
    if is_s3(fs) or is_gcs(fs) or type(fs).mv is AbstractFileSystem.mv:
        fs.cp_file(path, new_path)
        fs.rm_file(path)
    else:
        fs.mv(path, new_path)


@contextlib.contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Raise what goes wrong with a URL as an OSError that has a number and names the URL.

    Args:
        url: What the block reads or writes.

    Raises:
        OSError: Instead of any other error, those of botocore, aiohttp and Google's clients among them.
    """
    try:
        yield
    except FaultToleranceError:
        raise
    except Exception as error:  # each client has errors of its own, and few of them are OSErrors
        raised = _as_os_error(error, url)
        if raised is error:
            raise
        raise raised from error


def _as_os_error(error: Exception, url: str) -> OSError:
    if isinstance(error, OSError) and "://" in str(error.filename):
        return error  # it was made here, for a block within this one
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not str(error) else str(error)
    for kind, number in _ERRNOS.items():
        if isinstance(error, kind):
            is_path = text.strip("/") in url  # some clients say no more
            return kind(number, os.strerror(number) if is_path else text, url)
    if isinstance(error, OSError) and error.errno not in (None, errno.EIO):
        return OSError(error.errno, error.strerror or text, url)
    return OSError(_REMOTE_ERRNO, f"{type(error).__name__}: {text}", url)


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
