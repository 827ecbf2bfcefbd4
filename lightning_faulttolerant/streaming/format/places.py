"""The location of a data set's files: a directory, or an address that fsspec knows."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import fsspec

from lightning_faulttolerant.storage.atomic_file import atomic_writer
from lightning_faulttolerant.storage.store import is_url, local_path


class FilePlace(ABC):
    """A local or remote directory of files. Names are relative to it, with ``/`` between their parts."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: If it doesn't exist.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file. When this returns, the file is durable."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a file so that readers find the old content or the new one, never a part."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names directly in the directory, sorted; an empty list if it does not exist."""

    @abstractmethod
    def find(self, basename: str) -> list[str]:
        """Return the files of this name in the directory and all below it, sorted."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are skipped."""

    @abstractmethod
    def relative(self, address: str) -> str | None:
        """Return the name of a file by its address, or ``None`` if it is not below this place."""


def place_of(address: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> FilePlace:
    """Return the place at an address.

    Args:
        address: A path, or an address that fsspec knows.
        storage_options: Options for the file system of an address.
    """
    text = os.fspath(address)
    return RemotePlace(text, storage_options or {}) if is_url(text) else LocalPlace(local_path(text))


class LocalPlace(FilePlace):
    """A local directory.

    Args:
        path: The path of the directory; it is created when the first file is written.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))

    def __str__(self) -> str:
        return self.path

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with open(self._path(name), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        path = self._path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name, then rename it."""
        path = self._path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_writer(path) as file:
            file.write(data)

    def names(self) -> list[str]:
        """Return the names directly in the directory."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def find(self, basename: str) -> list[str]:
        """Return the files of this name in the directory and all below it."""
        found = [os.path.join(root, basename) for root, _, files in os.walk(self.path) if basename in files]
        return sorted(os.path.relpath(path, self.path) for path in found)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))

    def relative(self, address: str) -> str | None:
        """Return the name of a file by its path."""
        if is_url(address):
            return None
        path = os.path.relpath(os.path.abspath(os.path.expanduser(local_path(address))), self.path)
        return None if path == os.pardir or path.startswith(os.pardir + os.sep) else path

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)


class RemotePlace(FilePlace):
    """An address that fsspec knows.

    Args:
        address: ``s3://bucket/data``, ``memory://data``, ...
        storage_options: Options for its file system.
    """

    def __init__(self, address: str, storage_options: Mapping[str, object]) -> None:
        self._address = address.rstrip("/")
        self._file_system, path = fsspec.core.url_to_fs(self._address, **storage_options)
        self._root = str(path).rstrip("/")

    def __str__(self) -> str:
        return self._address

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return bytes(self._file_system.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a file. Object stores have no directories; others may need one first."""
        path = self._path(name)
        try:
            self._file_system.pipe_file(path, data)
        except FileNotFoundError:
            self._file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._file_system.pipe_file(path, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file: object stores show it when it is complete."""
        self.write(name, data)

    def names(self) -> list[str]:
        """Return the names directly at the address."""
        self._file_system.invalidate_cache(self._root)
        try:
            paths = self._file_system.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in (str(path).rstrip("/").rpartition("/")[2] for path in paths) if name)

    def find(self, basename: str) -> list[str]:
        """Return the files of this name at the address and all below it."""
        self._file_system.invalidate_cache()
        paths = [str(path) for path in self._file_system.find(self._root)]
        names = [path[len(self._root) :].lstrip("/") for path in paths]
        return sorted(name for name in names if name.rpartition("/")[2] == basename)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._file_system.rm_file(self._path(name))

    def relative(self, address: str) -> str | None:
        """Return the name of a file by its address."""
        prefix = f"{self._address}/"
        return address[len(prefix) :] if address.startswith(prefix) else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
