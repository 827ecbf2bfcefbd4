"""Files on other machines, through fsspec: object stores, and everything else with a URL.

Listings that fsspec has cached are never used.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, cast, final

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.file_systems import (
    PIECE_BYTES,
    Upload,
    begin_upload,
    copy,
    file_system,
    has_folders,
    is_azure,
    is_s3,
    move,
    remote_errors,
)
from lightning_faulttolerant.storage.local import Listing

_logger = logging.getLogger(__name__)

# Size and number of the cached blocks of an open file: for reading parts of it, and for reading all of it.
_BLOCKS_OF_PARTS = (1024 * 1024, 64)
_BLOCKS_OF_WHOLE = (8 * 1024 * 1024, 2)


@final
class RemoteStore:
    """The files below one URL. See ``Store`` for the methods.

    Args:
        url: The directory.
    """

    def __init__(self, url: str) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")

    @property
    def url(self) -> str:
        """The URL, as the user wrote it."""
        return self._url

    def path(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}{name}" if self._url.endswith("/") else f"{self._url}/{name}"

    def names(self) -> list[str]:
        """List the files and folders directly below the URL."""
        listing = self.listing()
        return sorted({*listing.files, *listing.folders})

    def listing(self) -> Listing:
        """List files and folders; in a bucket, only names that begin with the URL are requested."""
        with self._opened("") as (fs, path):
            if is_s3(fs):
                return _s3_listing(fs, path)
            fs.invalidate_cache()
            try:
                found = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return Listing(files=[], folders=[])
        kinds = {entry["name"].rstrip("/"): entry["type"] for entry in found}
        return Listing(
            files=sorted(name.rpartition("/")[2] for name, kind in kinds.items() if kind == "file"),
            folders=sorted(
                name.rpartition("/")[2]
                for name, kind in kinds.items()
                if kind == "directory" and name != path.rstrip("/")
            ),
        )

    @contextlib.contextmanager
    def writer(self, name: str, *, fsync: bool = True) -> Iterator[IO[bytes]]:
        """Open a file that is published when the block ends, and then compared with the sent bytes.

        Raises:
            DamagedCheckpointError: If it did not arrive as it was sent; it is set aside.
            OSError: If it can't be sent; nothing was published.
        """
        url = self.path(name)
        with self._opened(name) as (fs, path):
            upload = begin_upload(fs, path)
        try:
            yield cast("IO[bytes]", Sender(upload, url))
            with remote_errors(url):
                upload.publish()
        except BaseException:
            # The first error is the one to raise, even a Ctrl-C.
            with contextlib.suppress(Exception):
                upload.discard()
            raise
        try:
            check_arrived(upload, url, aside=f"{url}.damaged")
        except DamagedCheckpointError:
            self.rename(name, f"{name}.damaged")
            raise

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        with self._opened(name) as (fs, path):
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

    def rename(self, name: str, new_name: str) -> None:
        """Move a file; an object store copies it and then deletes the original."""
        self._put_under(name, new_name, move)

    def copy(self, name: str, new_name: str) -> None:
        """Copy a file, without transferring it through this machine if the store can copy."""
        self._put_under(name, new_name, copy)

    def _put_under(self, name: str, new_name: str, put: Callable[[AbstractFileSystem, str, str], None]) -> None:
        with self._opened(name) as (fs, path):
            new_path = file_system(self.path(new_name))[1]
            if has_folders(fs):
                fs.makedirs(new_path.rpartition("/")[0], exist_ok=True)
            put(fs, path, new_path)

    def tree(self) -> list[str]:
        """List all files whose names begin with the URL; in a bucket, only such names are requested."""
        with self._opened("") as (fs, path):
            if is_s3(fs):
                return _s3_listing(fs, path, delimiter="").files
            fs.invalidate_cache()
            root = path.rstrip("/")
            return sorted(found[len(root) + 1 :] for found in fs.find(path) if found.startswith(f"{root}/"))

    def delete(self, name: str) -> None:
        """Delete a file."""
        with self._opened(name) as (fs, path):
            fs.rm_file(path)

    def folder(self, name: str) -> RemoteStore:
        """Return a directory below this one."""
        return RemoteStore(self.path(name))

    def remove_if_empty(self) -> None:
        """Remove the directory if the store has directories."""
        with self._opened("") as (fs, path):
            if not has_folders(fs):
                return
            fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if fs.isdir(path) and not fs.ls(path):
                    fs.rmdir(path)

    def abort_uploads(self) -> None:
        """Drop the parts that killed writers have left below the URL: they are invisible, and cost money."""
        with self._opened("") as (fs, path):
            if not is_s3(fs):
                return
            try:
                _abort_uploads(fs, path)
            except (OSError, KeyError) as error:  # listing them needs a separate permission
                _logger.info("Can't look for unfinished uploads in %s: %s", self._url, error)

    def read(self, name: str) -> bytes | None:
        """Return the current content of a small file, or None if it does not exist."""
        try:
            with self._opened(name) as (fs, path):
                fs.invalidate_cache()
                content: bytes = fs.cat_file(path)
                return content
        except FileNotFoundError:
            return None

    def create(self, name: str, content: bytes) -> None:
        """Write a small file that must not exist yet; of two concurrent writers, one fails if the store can tell.

        Raises:
            FileExistsError: If it exists.
        """
        with self._opened(name) as (fs, path):
            fs.invalidate_cache()
            try:
                fs.pipe_file(path, content, mode="create")
            except (NotImplementedError, OSError) as error:
                number = error.errno if isinstance(error, OSError) else errno.ENOSYS
                if number == errno.EINVAL and fs.exists(path):  # what s3fs raises if a store gives no reason
                    raise FileExistsError(path) from error
                if number not in (errno.ENOSYS, errno.ENOTSUP):
                    raise
            else:
                return
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the existing one."""
        with self._opened(name) as (fs, path):
            if has_folders(fs):
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, content)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[AbstractFileSystem, str]]:
        url = self.path(name) if name else self._url
        with remote_errors(url):
            yield file_system(url)


def open_file(url: str, *, whole: bool = False) -> IO[bytes]:
    """Open a file; only the parts that are read are transferred, in large blocks if all of it will be read."""
    with remote_errors(url):
        fs, path = file_system(url)
        fs.invalidate_cache()
        if isinstance(fs, MemoryFileSystem):  # it returns the same file object, with its position, to each caller
            return io.BytesIO(fs.cat_file(path))
        if is_azure(fs) and fs.info(path)["type"] == "directory":  # it can be opened, but has no size
            raise IsADirectoryError("It is a directory")
        block_bytes, num_blocks = _BLOCKS_OF_WHOLE if whole else _BLOCKS_OF_PARTS
        options = {"maxblocks": num_blocks}
        file = fs.open(path, "rb", block_size=block_bytes, cache_type="blockcache", cache_options=options)
        # S3 has no directories, but s3fs opens a prefix of names as a file without a byte.
        if getattr(file, "details", {}).get("type") == "directory":
            file.close()
            raise IsADirectoryError("It is a directory")
        return cast("IO[bytes]", file)


def copy_file(url: str) -> IO[bytes]:
    """Transfer a file once, into a temporary file without a name."""
    with remote_errors(url):
        fs, path = file_system(url)
        fs.invalidate_cache()
        if isinstance(fs, MemoryFileSystem):
            return io.BytesIO(fs.cat_file(path))
        info = fs.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError("It is a directory")
        size = info["size"]
        with tempfile.NamedTemporaryFile(prefix="lightning_faulttolerant-") as copy:
            fs.get_file(path, copy.name)
            if os.path.getsize(copy.name) != size:
                raise ConnectionError(f"{os.path.getsize(copy.name)} of {size} bytes were transferred")
            return open(copy.name, "rb")


def _s3_listing(fs: AbstractFileSystem, path: str, *, delimiter: str = "/") -> Listing:
    bucket, key, _ = fs.split_path(path)
    prefix = f"{key.rstrip('/')}/" if key else ""
    files: set[str] = set()
    folders: set[str] = set()
    more: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **more)
        files.update(entry["Key"][len(prefix) :] for entry in page.get("Contents", []))
        folders.update(entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", []))
        if not page.get("IsTruncated"):
            return Listing(files=sorted(files - {""}), folders=sorted(folders))
        more = {"ContinuationToken": page["NextContinuationToken"]}


def _abort_uploads(fs: AbstractFileSystem, path: str) -> None:
    bucket, key, _ = fs.split_path(path)
    more: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key.rstrip('/')}/", **more)
        for upload in page.get("Uploads", []):
            _logger.info("Dropping an unfinished upload of s3://%s/%s, left by a killed writer", bucket, upload["Key"])
            with contextlib.suppress(FileNotFoundError):
                fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        if not page.get("IsTruncated"):
            return
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


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
        for begin in range(0, len(view), PIECE_BYTES):
            with remote_errors(self._url):
                self._upload.write(view[begin : begin + PIECE_BYTES])
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of sent bytes."""
        return self._num_bytes


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
