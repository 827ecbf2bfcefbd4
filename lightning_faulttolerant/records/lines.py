"""Files of JSON objects, one a line, to which processes append that may be killed in the middle of a write."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class LineFile:
    """A file of JSON objects that is held open, for who appends to it often.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one object in a single write; after the torn line of a process that was killed it begins a new one.

        Raises:
            OSError: If it could not be written whole.
        """
        text = json.dumps(line, sort_keys=True).encode() + b"\n"
        text = b"\n" + text if self._is_torn else text
        self._is_torn = True
        if os.write(self._descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, "There is room for a part of the line only")
        self._is_torn = False

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def append_line(path: str | os.PathLike[str], line: Mapping[str, Any]) -> None:
    """Add one object in a single write; after the torn line of a process that was killed it begins a new one.

    Args:
        path: The file; made if it is not there.
        line: What JSON can hold.
    """
    file = LineFile(path)
    try:
        file.append(line)
    finally:
        file.close()


def read_lines(path: str | os.PathLike[str]) -> list[Line]:
    """Return the objects of a file, none if it is not there; what was torn by a kill is passed over."""
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return parse_lines(text)


def each_line(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Give the objects of a file as `read_lines` does, one after the other: of a large one, only one is held."""
    try:
        with open(path, "rb") as file:
            for line in file:
                found = _parsed(line)
                if found is not None:
                    yield found
    except FileNotFoundError:
        return


def parse_lines(text: bytes) -> list[Line]:
    """Return the objects in `text`; what is not a whole object is passed over."""
    return [found for line in text.split(b"\n") if (found := _parsed(line)) is not None]


def count_lines(text: bytes) -> int:
    """Return how many lines there are in `text`, whole objects or not; empty ones do not count."""
    return sum(bool(line.strip()) for line in text.split(b"\n"))


def _parsed(line: bytes) -> Line | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the latter of brackets in brackets
        return None
    return found if isinstance(found, dict) else None
