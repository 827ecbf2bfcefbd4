"""A directory of this machine, or of a file system that is mounted on it.

The content of a directory, one level deep.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from lightning_faulttolerant.storage.atomic_file import (
    atomic_writer,
    fsync_directory,
    make_directory,
    remove_directory,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The names of the files and of the folders, sorted. Links to folders and special files are neither."""

    files: list[str]
    folders: list[str]


@final
class LocalStore:
    """The files of one directory, which is created with the first file. See ``Store`` for the methods.

    Args:
        directory: Absolute, or relative to the current directory of the process.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self.directory)

    def path(self, name: str) -> str:
        """Return the absolute path of a file."""
        return str(self.directory / name)

    def names(self) -> list[str]:
        """List the files and folders directly in it."""
        try:
            return sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def listing(self) -> Listing:
        """List the files, and the folders that are not links."""
        try:
            with os.scandir(self.directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return Listing(files=[], folders=[])
        return Listing(
            files=[entry.name for entry in entries if entry.is_file()],
            folders=[entry.name for entry in entries if entry.is_dir(follow_symlinks=False)],
        )

    @contextlib.contextmanager
    def writer(self, name: str, *, fsync: bool = True) -> Iterator[IO[bytes]]:
        """Open a temporary file that takes the name when the block ends; missing directories are created."""
        path = self.directory / name
        make_directory(path.parent)
        with atomic_writer(path, fsync=fsync) as file:
            yield file

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return os.stat(self.directory / name).st_size

    def rename(self, name: str, new_name: str) -> None:
        """Move a file, and wait until both names are on the disk."""
        old, new = self.directory / name, self.directory / new_name
        make_directory(new.parent)
        os.replace(old, new)
        # The new name first: the disk may have the file under both names for a moment, but never under none.
        for folder in dict.fromkeys((new.parent, old.parent)):
            fsync_directory(folder)

    def copy(self, name: str, new_name: str) -> None:
        """Copy a file; the copy appears when it is complete."""
        with open(self.directory / name, "rb") as original, self.writer(new_name) as copy:
            shutil.copyfileobj(original, copy)

    def tree(self) -> list[str]:
        """List all files in it and below it, without following links to directories."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # deleted meanwhile, or never there
                raise error

        walked = os.walk(self.directory, onerror=fail)
        found = (os.path.join(folder, name) for folder, _, names in walked for name in names)
        return sorted(Path(path).relative_to(self.directory).as_posix() for path in found)

    def delete(self, name: str) -> None:
        """Delete a file, or a directory and its content."""
        path = self.directory / name
        if path.is_dir() and not path.is_symlink():
            remove_directory(path)
        else:
            os.unlink(path)

    def folder(self, name: str) -> LocalStore:
        """Return a directory within this one."""
        return LocalStore(self.directory / name)

    def remove_if_empty(self) -> None:
        """Remove the directory if it exists and is empty."""
        with contextlib.suppress(FileNotFoundError):
            if not self.directory.is_symlink() and not any(self.directory.iterdir()):
                self.directory.rmdir()

    def abort_uploads(self) -> None:
        """Do nothing: a local writer leaves a named file, see ``leftovers``."""


def open_writer(path: str, *, fsync: bool) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file for writing in an existing directory."""
    return atomic_writer(path, fsync=fsync)
