"""JSON in files, which others may have written, and files with one JSON object per line.

Processes that append to them may be killed in the middle of a write.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

Line = dict[str, Any]

MAX_BYTES = 1 << 26


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text from a file that others may have written.

    Raises:
        ValueError: If it is damaged, nested too deeply to be ours, or larger than 64 MiB.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply, or too large") from error


def read_json(file: IO[Any]) -> Any:
    """Return the value of a JSON file. No more than 64 MiB of it are read.

    Raises:
        ValueError: As `parse_json`.
    """
    return parse_json(file.read(MAX_BYTES + 1))


class LineFile:
    """A file of JSON objects that is held open, for callers that append often.

    Args:
        path: The file; created if it does not exist.
        opener: Opens it, as ``os.open`` does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        opener: Callable[[str | os.PathLike[str], int, int], int] = os.open,
    ) -> None:
        self._descriptor = opener(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, line: Mapping[str, object]) -> None:
        """Add one object in a single write; after a line that a killed process has torn, begin a new line.

        Raises:
            OSError: If the line could not be written whole.
        """
        text = json.dumps(line, sort_keys=True).encode() + b"\n"
        text = b"\n" + text if self._is_torn else text
        self._is_torn = True
        if os.write(self._descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, "Only a part of the line could be written")
        self._is_torn = False

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_own(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """Open a file of a run for writing, as ``os.open`` does, but not one that others may have put there.

    Raises:
        PermissionError: If it is a link, or belongs to another user in a directory that everybody may write to.
        OSError: As ``os.open``.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "It is a link, which others may have put there. Remove it", path) from error
    owner, directory = os.fstat(descriptor).st_uid, os.stat(os.path.dirname(os.path.abspath(path)))
    if directory.st_mode & stat.S_IWOTH and owner not in (os.geteuid(), 0):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"It belongs to another user ({owner}), who put it there. Remove it", path)
    return descriptor


def append_line(path: str | os.PathLike[str], line: Mapping[str, object]) -> None:
    """Add one object in a single write; after a line that a killed process has torn, begin a new line.

    Args:
        path: The file; created if it does not exist.
        line: An object that JSON can hold.

    Raises:
        OSError: If it is a link, or the file of another user, or can't be written.
    """
    file = LineFile(path, opener=open_own)
    try:
        file.append(line)
    finally:
        file.close()


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """Return the objects of a file, or none if it does not exist; lines that a kill has torn are skipped."""
    return list(each_line(path))


def each_line(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yield the objects of a file as `read_lines` does, one after another: for a large file, it holds only one."""
    try:
        with open(path, "rb") as file:
            while line := file.readline(MAX_BYTES):
                found = _parsed(line)
                if found is not None:
                    yield found
    except FileNotFoundError:
        return


def parse_lines(text: bytes) -> list[Line]:
    """Return the objects in `text`; anything that is not a whole object is skipped."""
    return [found for line in text.split(b"\n") if (found := _parsed(line)) is not None]


def count_lines(text: bytes) -> int:
    """Return the number of lines in `text`, whole objects or not; empty lines do not count."""
    return sum(bool(line.strip()) for line in text.split(b"\n"))


def _parsed(line: bytes) -> Line | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
