"""Write a remote file so that it becomes visible whole or not at all, and check whether it arrived as it was sent.

Nothing here ever closes an fsspec file that is only half written: closing publishes the part that was written.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import re
from typing import TYPE_CHECKING, Any, Protocol

from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.file_systems import is_azure, is_gcs, is_s3, move, remote_errors
from lightning_faulttolerant.storage.local import temporary_name

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_logger = logging.getLogger(__name__)

_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")
_PIECE_BYTES = 8 * 1024 * 1024
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
        return _AzureUpload(fs, path)
    return _GCSUpload(fs, path) if is_gcs(fs) else _MovedUpload(fs, path)


class Sender(io.RawIOBase):
    """The writable end of an upload. It cuts the data into pieces, so that memory never holds a full copy.

    Args:
        upload: Receives the pieces.
        url: For messages.
    """

    def __init__(self, upload: Upload, url: str) -> None:
        self._upload = upload
        self._url = url
        self._num_bytes = 0

    def writable(self) -> bool:
        """Return True: the file can be written."""
        return True

    def write(self, data: Any) -> int:
        """Send bytes.

        Raises:
            OSError: If they can't be sent.
        """
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PIECE_BYTES):
            with remote_errors(self._url):
                self._upload.write(view[begin : begin + _PIECE_BYTES])
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of sent bytes."""
        return self._num_bytes


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


class _GCSUpload:
    """A resumable upload that is finished at the end."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb", autocommit=False)
        self._md5, self._num_bytes = _md5(), 0

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._md5.update(piece)
        self._num_bytes += len(piece)

    def publish(self) -> None:
        self._file.flush(force=True)
        self._file.commit()
        self._file.closed = True

    def discard(self) -> None:
        self._file.closed = True
        self._file.discard()

    def find_damage(self) -> str | None:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path)
        if int(info["size"]) != self._num_bytes:
            return _describe_size(info["size"], self._num_bytes)
        expected = base64.b64encode(self._md5.digest()).decode()
        md5 = info.get("md5Hash", expected)  # composed objects have none
        return f"its MD5 is {md5}, but the sent data has {expected}" if md5 != expected else None


class _SizedUpload:
    """A file that is being written to a store that reports its size, but no checksum."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._file = fs.open(path, "wb")
        self._num_bytes = 0

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._num_bytes += len(piece)

    def _wrong_size(self, path: str) -> str | None:
        self._fs.invalidate_cache()
        size = self._fs.info(path)["size"]
        return None if size == self._num_bytes else _describe_size(size, self._num_bytes)


class _AzureUpload(_SizedUpload):
    """Blocks that are committed at the end. Azure drops those of a killed writer after a week."""

    def __init__(self, fs: object, path: str) -> None:
        super().__init__(fs, path)
        self._path = path

    def publish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.closed = True

    def find_damage(self) -> str | None:
        return self._wrong_size(self._path)


class _MovedUpload(_SizedUpload):
    """A file under a temporary name that is moved at the end: as safe as the move of its file system."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        parent, _, name = path.rpartition("/")
        self._path, self._temporary = path, f"{parent}/{temporary_name(name)}"
        if parent.strip("/"):
            fs.makedirs(parent, exist_ok=True)
        super().__init__(fs, self._temporary)

    def publish(self) -> None:
        self._file.close()
        damage = self._wrong_size(self._temporary)
        if damage is not None:
            raise OSError(f"{self._temporary}: {damage}")
        move(self._fs, self._temporary, self._path)

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._temporary)

    def find_damage(self) -> str | None:
        return self._wrong_size(self._path)


def check_arrived(upload: Upload, url: str, *, aside: str) -> None:
    """Compare a published file with the sent bytes, without reading it if the store reports its checksum.

    Args:
        upload: A published upload.
        url: The URL of the file.
        aside: The name that a damaged one will have, for the message.

    Raises:
        DamagedCheckpointError: If it differs.
        OSError: If that can't be checked.
    """
    with remote_errors(url):
        damage = upload.find_damage()
    if damage is not None:
        raise DamagedCheckpointError(
            f"{url} did not arrive as it was sent: {damage}. Resuming from it could silently go wrong. It is now "
            f"{aside}. Save again. If this happens again, check the network and the store."
        )


def _read_back(fs: AbstractFileSystem, path: str, part_bytes: int) -> list[bytes]:
    parts = _PartDigests(part_bytes)
    with fs.open(path, "rb", block_size=part_bytes, cache_type="none") as file:
        while piece := file.read(min(part_bytes, _PIECE_BYTES)):
            parts.split(memoryview(piece))
    return parts.digests()


def _is_md5(head: dict[str, object], etag: str) -> bool:
    is_own_key = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    return not is_own_key and _MD5_ETAG.fullmatch(etag) is not None


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _describe_size(found: int, sent: int) -> str:
    return f"it has {found} bytes, but {sent} were sent"
