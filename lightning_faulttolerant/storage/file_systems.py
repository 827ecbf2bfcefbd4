"""The fsspec file system of a URL. All its errors are OSErrors, and it does not draw from the run's generators.

`client_options` returns the settings of all clients.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import time
from collections.abc import Iterator

import fsspec
from fsspec.asyn import sync
from fsspec.config import conf
from fsspec.spec import AbstractFileSystem

from lightning_faulttolerant.errors import CheckpointError, FaultToleranceError

_GCS_PROTOCOLS = ("gs", "gcs")
_AZURE_PROTOCOLS = ("abfs", "az", "abfss")
# Not EIO: a disk that reports EIO has lost the data, a network has only failed to deliver it.
_REMOTE_ERRNO: int = getattr(errno, "EREMOTEIO", errno.ECONNABORTED)
_ERRNOS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    TimeoutError: errno.ETIMEDOUT,
}


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path in it.

    Call it each time: an fsspec instance belongs to one process and one thread, and fsspec keeps them.

    Args:
        url: The URL of a file or a directory.

    Raises:
        CheckpointError: If the package for this kind of URL is not installed, or there is none.
    """
    protocol = url.partition("://")[0]
    try:
        if "::" not in protocol:
            fsspec.get_filesystem_class(protocol)  # imports the client, which may draw when it is created
            let_clients_draw_elsewhere()
        fs, path = fsspec.url_to_fs(url, **client_options(protocol))
    except ImportError as error:
        raise CheckpointError(
            f"{url} can't be opened: {error}. Without its package, no checkpoint can be written or read there. "
            f"Install it: pip install {missing_package(error)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{url} can't be opened: {error}. Nothing can be written or read there. Pass a directory, or a URL that "
            "fsspec knows, such as s3://bucket/folder."
        ) from error
    let_clients_draw_elsewhere()
    return fs, path


def is_s3(fs: object) -> bool:
    """Return whether a file system is from s3fs."""
    return _protocols(fs) == set(S3_PROTOCOLS)


def is_gcs(fs: object) -> bool:
    """Return whether a file system is from gcsfs."""
    return _protocols(fs) == set(_GCS_PROTOCOLS)


def is_azure(fs: object) -> bool:
    """Return whether a file system is from adlfs."""
    return _protocols(fs) == set(_AZURE_PROTOCOLS)


def has_folders(fs: object) -> bool:
    """Return whether folders are created and removed. In an object store they are only parts of names."""
    return not (is_s3(fs) or is_gcs(fs) or is_azure(fs))


def move(fs: AbstractFileSystem, path: str, new_path: str) -> None:
    """Move a file in its file system's own way; an object store copies it and then deletes the original.

    Args:
        fs: An fsspec file system.
        path: The path in it.
        new_path: The new path in it.
    """
    # fsspec's own mv treats [, * and ? in a name as a pattern, and s3fs's ignores files that can't be deleted.
    if not has_folders(fs) or type(fs).mv is AbstractFileSystem.mv:
        copy(fs, path, new_path)
        fs.rm_file(path)
    else:
        fs.mv(path, new_path)


def copy(fs: AbstractFileSystem, path: str, new_path: str) -> None:
    """Copy a file in its file system's own way.

    Args:
        fs: An fsspec file system.
        path: The path in it.
        new_path: The path of the copy in it.
    """
    fs.cp_file(path, new_path)
    if is_azure(fs):
        _wait_for_copy(fs, new_path)


def _wait_for_copy(fs: AbstractFileSystem, path: str) -> None:
    """Wait until Azure has copied a file: it answers first, and the copy of a deleted file fails."""
    container, blob, _ = fs.split_path(path)

    async def status() -> str:
        async with fs.service_client.get_blob_client(container, blob) as client:
            found = (await client.get_blob_properties()).copy.status
        return str(found)

    pause_seconds = 0.01
    while (found := sync(fs.loop, status)) == "pending":
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 1.0)
    if found != "success":
        raise OSError(f"The copy to {path} was not finished: {found}")


@contextlib.contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Raise any error with a URL as an OSError that has a number and names the URL.

    Args:
        url: The URL that the block reads or writes.

    Raises:
        OSError: Instead of any other error, including those of botocore, aiohttp and Google's clients.
    """
    try:
        yield
    except FaultToleranceError:
        raise
    except Exception as error:  # each client has its own errors, and few of them are OSErrors
        raised = _as_os_error(error, url)
        if raised is error:
            raise
        raise raised from error


def _as_os_error(error: Exception, url: str) -> OSError:
    if isinstance(error, OSError) and "://" in str(error.filename):
        return error  # created here, for a block within this one
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not str(error) else str(error)
    for kind, number in _ERRNOS.items():
        if isinstance(error, kind):
            is_path = text.strip("/") in url  # the text of some clients is only the path
            return kind(number, os.strerror(number) if is_path else text, url)
    if isinstance(error, OSError) and error.errno not in (None, errno.EIO):
        return OSError(error.errno, error.strerror or text, url)
    return OSError(_REMOTE_ERRNO, f"{type(error).__name__}: {text}", url)


def _protocols(fs: AbstractFileSystem) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


S3_PROTOCOLS = ("s3", "s3a")
# They draw from the global generator of `random`, in fsspec's thread, at any moment: most wait a random time before a
# retry. Azure's renew a token at a random time, which they draw when they are created.
_DRAWING_MODULES = (
    "botocore.retryhandler",
    "aiohttp.connector",
    "gcsfs.retry",
    "gcsfs.core",
    "google.api_core.retry.retry_base",
    "google.auth._exponential_backoff",
    "azure.core.pipeline.policies._authentication",
    "azure.core.pipeline.policies._authentication_async",
)


def client_options(protocol: str) -> dict[str, object]:
    """Return the options for creating a protocol's file system, in addition to the user's."""
    if protocol not in S3_PROTOCOLS:
        return {}
    given = {**conf.get("s3a", {}), **conf.get("s3", {})}.get("config_kwargs", {})
    # The mode "standard" draws random numbers in a way that can't be redirected, and is the default for some.
    return {"config_kwargs": {"retries": {"mode": "legacy"}, **given}}


def let_clients_draw_elsewhere() -> None:
    """Give the loaded clients their own generator, so that none draws from the run's generator."""
    for name in _DRAWING_MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[attr-defined]


def missing_package(error: ImportError) -> str:
    """Return the name of the missing package that caused fsspec's `error`."""
    # fsspec raises its own ImportError, with advice, from the one that names the module.
    missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    return (missing.name or "the package that it needs").partition(".")[0]
