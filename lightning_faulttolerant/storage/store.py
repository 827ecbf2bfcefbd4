"""Files by path or URL: the store that a path belongs to, and the operations of every store.

A path without a scheme, or with ``file://``, is local. Anything else with ``://`` is opened through fsspec, which is
imported only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import IO, Protocol

from lightning_faulttolerant.storage.local import Listing, LocalStore, atomic_writer

# At least two letters, so that a drive of Windows is not a scheme. "simplecache::s3://" is a chain of fsspec, and
# "data::v2" is a directory.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+)(://|::.*://)")
_LOCAL_SCHEMES = ("file", "local")


class Store(Protocol):
    """A directory, local or in an object store. A ``name`` is that of a file in it, or ``folder/name``."""

    @property
    def url(self) -> str:
        """The directory as the user wrote it; absolute if it is local."""

    def path(self, name: str) -> str:
        """Return the full path or URL of a file in it."""

    def names(self) -> list[str]:
        """List the files and folders directly in it, sorted, never from a cache; empty if it does not exist."""

    def listing(self) -> Listing:
        """List the files and folders separately."""

    def writer(self, name: str, *, fsync: bool = True) -> AbstractContextManager[IO[bytes]]:
        """Open a file for writing that is published whole when the block ends, and never if the block raises."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def rename(self, name: str, new_name: str) -> None:
        """Move a file within the store."""

    def copy(self, name: str, new_name: str) -> None:
        """Copy a file within the store."""

    def delete(self, name: str) -> None:
        """Delete a file."""

    def tree(self) -> list[str]:
        """List all files in it and in the directories below it, by their paths relative to it."""

    def folder(self, name: str) -> Store:
        """Return a directory within this one; it need not exist."""

    def remove_if_empty(self) -> None:
        """Remove the directory if the store has directories and this one is empty."""

    def abort_uploads(self) -> None:
        """Drop the unpublished data of killed writers; only for the holder of the directory's lock."""


def is_url(path: str | os.PathLike[str]) -> bool:
    r"""Return whether a path names a file outside this machine's file system.

    Args:
        path: A path, or a URL that fsspec understands.

    Example:
        >>> [is_url(path) for path in ("s3://bucket/run", "memory://run", "/data/run", "file:///data/run", "C:\\run")]
        [True, True, False, False, False]
    """
    scheme = _SCHEME.match(os.fspath(path))
    return scheme is not None and scheme[1].lower() not in _LOCAL_SCHEMES


def local_path(path: str | os.PathLike[str]) -> str:
    """Return a local path without the ``file://`` that it may begin with.

    Args:
        path: A local path.

    Example:
        >>> local_path("file:///data/run")
        '/data/run'
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in _LOCAL_SCHEMES:
        return text
    return text[scheme.end() :].removeprefix("localhost")


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path or URL into its directory and the name in it.

    Args:
        path: A file.

    Example:
        >>> split_path("s3://bucket/run/a.ckpt"), split_path("a.ckpt")
        (('s3://bucket/run', 'a.ckpt'), ('', 'a.ckpt'))
    """
    if not is_url(path):
        return os.path.split(local_path(path))
    directory, _, name = os.fspath(path).rstrip("/").rpartition("/")
    return directory, name


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a local directory or one in an object store; it need not exist.

    Args:
        path: A directory, or a URL of one.

    Returns:
        The store; nothing is read or created yet.

    Raises:
        CheckpointError: If the package for this kind of URL is not installed.
    """
    return _remote().RemoteStore(os.fspath(path)) if is_url(path) else LocalStore(local_path(path))


def open_file(path: str | os.PathLike[str], *, whole: bool = False) -> IO[bytes]:
    """Open a file for reading, seekable; from a URL, only the parts that are read are transferred.

    Args:
        path: A file, local or remote.
        whole: All of it will be read: from a URL, each request transfers more.

    Raises:
        OSError: If there is no such file, or it can't be read.
        CheckpointError: If the package for this kind of URL is not installed.
    """
    if is_url(path):
        file: IO[bytes] = _remote().open_file(os.fspath(path), whole=whole)
        return file
    return open(local_path(path), "rb")


def open_writer(path: str | os.PathLike[str], *, fsync: bool = True) -> AbstractContextManager[IO[bytes]]:
    """Open a file for writing that is published whole when the block ends, and never if the block raises.

    Args:
        path: A file, local or remote.
        fsync: Wait until the bytes are on the disk; an object store has them when the block has ended.
    """
    if not is_url(path):
        return atomic_writer(local_path(path), fsync=fsync)
    directory, name = split_path(path)
    return open_store(directory).writer(name, fsync=fsync)


def create_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file in an object store that must not exist yet.

    Args:
        path: The URL of the file.
        content: What to write.

    Raises:
        FileExistsError: If it exists, and the store can tell.
        OSError: If it can't be written.
    """
    directory, name = split_path(path)
    _remote().RemoteStore(directory).create(name, content)


def local_copy(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a whole file for reading once: the local file itself, or a temporary copy of a remote one.

    Args:
        path: A file, local or remote. The copy is in ``$TMPDIR``, without a name, and is gone when it is closed.

    Raises:
        OSError: If there is no such file, or it can't be read.
        CheckpointError: If the package for this kind of URL is not installed.
    """
    if is_url(path):
        copy: IO[bytes] = _remote().copy_file(os.fspath(path))
        return copy
    return open(local_path(path), "rb")


def _remote() -> ModuleType:
    from lightning_faulttolerant.storage import remote

    return remote


_BYTES = {unit + suffix: 1024**power for power, unit in enumerate(("", *"kmgtp")) for suffix in ("", "b")}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_number(text: str, units: Mapping[str, int]) -> int:
    """Return a whole number that is written with a unit; 0 if it is not a number, or has another unit.

    Args:
        text: The number, such as ``"1.5k"``; large letters and commas are allowed.
        units: The value of each unit, in small letters.
    """
    match = _NUMBER.fullmatch(text.strip().lower().replace(",", ""))
    return int(float(match[1]) * units.get(match[2], 0)) if match else 0


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes.

    Args:
        size: The number, or a string: ``"67108864"``, ``"512kb"``, ``"64m"``, ``"10 GB"``; 1 kB is 1,024 bytes.

    Raises:
        ValueError: If it is not a size, or not above 0.

    Example:
        >>> parse_bytes("1.5kb")
        1536
    """
    num_bytes = parse_number(size, _BYTES) if isinstance(size, str) else 0 if isinstance(size, bool) else int(size)
    if num_bytes <= 0:
        raise ValueError(f'{size!r} is not a size. Pass a number of bytes above 0, or a text such as "10gb".')
    return num_bytes
