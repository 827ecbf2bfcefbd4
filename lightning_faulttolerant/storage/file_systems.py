"""The fsspec file system of a URL, and uploads to it: a file becomes visible whole or not at all.

All errors are OSErrors, and no client draws from the run's generators. `client_options` returns the settings of all
clients.

An upload can check whether the file arrived as it was sent. Nothing here ever closes an fsspec file that is only half
written: closing publishes the part that was written.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import fsspec
from fsspec.asyn import sync
from fsspec.config import conf
from fsspec.spec import AbstractFileSystem

from lightning_faulttolerant.errors import CheckpointError, FaultToleranceError
from lightning_faulttolerant.storage.local import temporary_name

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


_logger = logging.getLogger(__name__)

_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")
PIECE_BYTES = 8 * 1024 * 1024
# Buckets with a file that was right when read back, although its ETag was not the MD5 of its parts.
_buckets_without_md5: set[str] = set()


class Upload(Protocol):
    """A file that is being sent."""

    def write(self, piece: memoryview) -> None:
        """Send the next bytes, at most `piece_bytes`."""

    def publish(self) -> None:
        """Make the file visible under its name, whole."""

    def discard(self) -> None:
        """Discard the upload without a trace."""

    def find_damage(self) -> str | None:
        """Return how the published file differs from the sent bytes."""


def begin_upload(fs: object, path: str) -> Upload:
    """Begin a file, in the way that its store supports.

    Args:
        fs: An fsspec file system.
        path: The path in it.
    """
    if is_s3(fs):
        return _S3Upload(fs, path)
    if is_azure(fs):
        return _SizedUpload(fs, path)
    return _GCSUpload(fs, path) if is_gcs(fs) else _MovedUpload(fs, path)


class _PartDigests:
    """The MD5 of each part, for parts of a known size."""

    def __init__(self, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.num_bytes = 0
        self._digests: list[bytes] = []
        self._part = _md5()

    def split(self, piece: memoryview) -> list[memoryview]:
        """Cut a piece at the ends of parts, and count it."""
        cut = []
        while piece:
            room = self.part_bytes - self.num_bytes % self.part_bytes
            cut.append(piece[:room])
            self._part.update(cut[-1])
            self.num_bytes += len(cut[-1])
            if self.num_bytes % self.part_bytes == 0:
                self._digests.append(self._part.digest())
                self._part = _md5()
            piece = piece[room:]
        return cut

    def digests(self) -> list[bytes]:
        """Return the MD5 of each part; the last part may be incomplete."""
        is_part_begun = self.num_bytes % self.part_bytes or not self._digests
        return [*self._digests, self._part.digest()] if is_part_begun else self._digests

    def etag(self, *, is_multipart: bool) -> str:
        """Return the ETag that S3 gives such a file, unless it is encrypted with the user's own key."""
        digests = self.digests()
        return f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}" if is_multipart else digests[0].hex()


class _S3Upload:
    """Parts that are committed at the end; a small file is one request."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb", autocommit=False)
        # The file sends a part as soon as it has this many bytes. With pieces of this size, we can hash each part.
        self._parts = _PartDigests(self._file.blocksize)
        self._answered_etag: str | None = None
        call = self._file._call_s3

        def note_etag(method: str, *args: object, **arguments: object) -> object:
            answer = call(method, *args, **arguments)
            if method in ("put_object", "complete_multipart_upload"):
                self._answered_etag = answer.get("ETag", "").strip('"')
            return answer

        self._file._call_s3 = note_etag

    def write(self, piece: memoryview) -> None:
        for part in self._parts.split(piece):
            self._file.write(part)

    def publish(self) -> None:
        if self._is_multipart:
            self._file.flush(force=True)
        try:
            self._file.commit()
        except FileNotFoundError:  # the answer to a commit was lost, and the repeated commit found no upload any more
            if self._head()["ETag"].strip('"') != self._etag():
                raise
        self._file.closed = True

    def discard(self) -> None:
        self._file.closed = True  # first: a garbage-collected file closes itself
        self._file.discard()

    @property
    def _is_multipart(self) -> bool:
        return self._file.parts is not None

    def _head(self) -> Any:
        bucket, key, _ = self._fs.split_path(self._path)
        return self._fs.call_s3("head_object", Bucket=bucket, Key=key)

    def _etag(self) -> str:
        return self._parts.etag(is_multipart=self._is_multipart)

    def find_damage(self) -> str | None:
        bucket, head = self._fs.split_path(self._path)[0], self._head()
        if self._answered_etag == self._etag() != head["ETag"].strip('"'):
            _logger.warning("Another writer has since uploaded its own file to s3://%s", self._path)
            return None
        if head["ContentLength"] != self._parts.num_bytes:
            return _describe_size(head["ContentLength"], self._parts.num_bytes)
        etag, expected = head["ETag"].strip('"'), self._etag()
        if etag == expected or not _is_md5(head, etag) or bucket in _buckets_without_md5:
            return None
        if _read_back(self._fs, self._path, self._parts.part_bytes) != self._parts.digests():
            return f"its ETag is {etag}, but the sent data has {expected}"
        _logger.info("The ETags of %s are not the MD5 of the sent data. From now on, only sizes are compared", bucket)
        _buckets_without_md5.add(bucket)
        return None


class _SizedUpload:
    """A file that is written to a store which reports its size, but no checksum, and published when it is closed."""

    def __init__(self, fs: AbstractFileSystem, path: str, **options: bool) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb", **options)
        self._num_bytes = 0

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._num_bytes += len(piece)

    def publish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.closed = True  # Azure drops the blocks of a file without an end after a week

    def find_damage(self) -> str | None:
        self._fs.invalidate_cache()
        return self._difference(self._fs.info(self._path))

    def _difference(self, info: dict[str, Any]) -> str | None:
        size = int(info["size"])
        return None if size == self._num_bytes else _describe_size(size, self._num_bytes)


class _GCSUpload(_SizedUpload):
    """A resumable upload that is finished at the end."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        super().__init__(fs, path, autocommit=False)
        self._md5 = _md5()

    def write(self, piece: memoryview) -> None:
        super().write(piece)
        self._md5.update(piece)

    def publish(self) -> None:
        self._file.flush(force=True)
        self._file.commit()
        self._file.closed = True

    def discard(self) -> None:
        super().discard()
        self._file.discard()

    def _difference(self, info: dict[str, Any]) -> str | None:
        expected = base64.b64encode(self._md5.digest()).decode()
        md5 = info.get("md5Hash", expected)  # composed objects have none
        difference = None if md5 == expected else f"its MD5 is {md5}, but the sent data has {expected}"
        return super()._difference(info) or difference


class _MovedUpload(_SizedUpload):
    """A file under a temporary name that is moved at the end: as safe as the move of its file system."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if parent.strip("/"):
            fs.makedirs(parent, exist_ok=True)
        super().__init__(fs, f"{parent}/{temporary_name(name)}")
        self._final_path = path

    def publish(self) -> None:
        super().publish()
        damage, temporary = self.find_damage(), self._path
        if damage is not None:
            raise OSError(f"{temporary}: {damage}")
        move(self._fs, temporary, self._final_path)
        self._path = self._final_path

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path)


def _read_back(fs: AbstractFileSystem, path: str, part_bytes: int) -> list[bytes]:
    parts = _PartDigests(part_bytes)
    with fs.open(path, "rb", block_size=part_bytes, cache_type="none") as file:
        while piece := file.read(min(part_bytes, PIECE_BYTES)):
            parts.split(memoryview(piece))
    return parts.digests()


def _is_md5(head: dict[str, object], etag: str) -> bool:
    is_own_key = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    return not is_own_key and _MD5_ETAG.fullmatch(etag) is not None


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _describe_size(found: int, sent: int) -> str:
    return f"it has {found} bytes, but {sent} were sent"
