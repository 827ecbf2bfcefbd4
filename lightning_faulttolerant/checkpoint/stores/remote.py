"""Files of other machines, through fsspec: object stores, and all else that has a URL."""

from __future__ import annotations

import contextlib
import io
import secrets
import tempfile
from collections.abc import Iterator
from typing import IO, Any, final

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_BLOCK_BYTES = 1024 * 1024
_NUM_BLOCKS = 64


@final
class RemoteStore:
    """The files below one URL. See ``Store`` for the methods.

    Args:
        url: Of the directory.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url

    @property
    def url(self) -> str:
        """The URL, as the user wrote it."""
        return self._url

    def path(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}/{name}" if not self._url.endswith("/") else f"{self._url}{name}"

    def names(self) -> list[str]:
        """List what is directly below the URL."""
        fs, path = file_system(self._url)
        fs.invalidate_cache()
        try:
            found = fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({entry.rstrip("/").rpartition("/")[2] for entry in found if entry.rstrip("/") != path})

    @contextlib.contextmanager
    def writer(self, name: str, *, fsync: bool = True) -> Iterator[IO[bytes]]:
        """Open a temporary file that is moved to the name when the block ends."""
        fs, path = file_system(self.path(name))
        parent, _, base = path.rpartition("/")
        temporary = f"{parent}/.{base}.tmp-{secrets.token_hex(8)}"
        fs.makedirs(parent, exist_ok=True)
        try:
            with fs.open(temporary, "wb") as file:
                yield file
            fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temporary)
            raise
        fs.invalidate_cache()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        fs, path = file_system(self.path(name))
        fs.invalidate_cache()
        return int(fs.info(path)["size"])

    def rename(self, name: str, new_name: str) -> None:
        """Move a file; object stores copy it and delete the first."""
        fs, path = file_system(self.path(name))
        fs.mv(path, file_system(self.path(new_name))[1])
        fs.invalidate_cache()

    def delete(self, name: str) -> None:
        """Delete a file."""
        fs, path = file_system(self.path(name))
        fs.rm_file(path)
        fs.invalidate_cache()

    def folder(self, name: str) -> RemoteStore:
        """Return a directory below this one."""
        return RemoteStore(self.path(name))

    def remove_if_empty(self) -> None:
        """Remove the directory, where there is such a thing."""
        fs, path = file_system(self._url)
        if not self.names():
            with contextlib.suppress(OSError):
                fs.rmdir(path)
        fs.invalidate_cache()


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    It is asked for each time: an instance belongs to one process and one thread.
    """
    fs, path = fsspec.url_to_fs(url)
    return fs, path


def open_file(url: str) -> IO[bytes]:
    """Open a file of which only what is read is transferred."""
    fs, path = file_system(url)
    fs.invalidate_cache()
    if isinstance(fs, MemoryFileSystem):  # it gives the same file object, with its position, to each who opens it
        return io.BytesIO(fs.cat_file(path))
    options = {"maxblocks": _NUM_BLOCKS}
    file: IO[bytes] = fs.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="blockcache", cache_options=options)
    return file


def copy_file(url: str) -> IO[bytes]:
    """Transfer a file once, into a temporary file without a name."""
    fs, path = file_system(url)
    fs.invalidate_cache()
    with tempfile.NamedTemporaryFile(prefix="lightning_faulttolerant-") as copy:
        fs.get_file(path, copy.name)
        return open(copy.name, "rb")
