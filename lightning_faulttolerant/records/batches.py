"""The record: a line for each training batch, in a file of fixed size on a local disk that outlives its process.

The line of batch n of a fit, counted over all epochs, stands at place n modulo the size. So a process that trains the
batch again finds the line of the process before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from lightning_faulttolerant.records.lines import open_own, parse_json

_HEADER = struct.Struct("<8sII")  # the number of the process, and the length of the JSON of its sources after it
_HEADER_BYTES = 1 << 16
_MAGIC = b"batches1"
_LINE = struct.Struct("<QIIIIIII")  # number, process, epoch, batch, order, content, output, checksum
_VALUES = struct.Struct("<QIIIIII")
_PLACE_BYTES = 64
_NUM_PLACES = 1 << 14


class BatchLine(NamedTuple):
    """What a process notes of a batch.

    Attributes:
        number: Its number in the fit, from 0.
        process: The number of the process on this machine, from 1.
        epoch: Its epoch.
        batch: Its number in the epoch.
        order: A checksum of its indices; 0 if they are not known.
        content: A checksum of some of its values; 0 if they were not read.
        output: A checksum of the tensors that its step returned; 0 if they were not read.
    """

    number: int
    process: int
    epoch: int
    batch: int
    order: int
    content: int
    output: int


class BatchRecord:
    """The record of one rank of a fit.

    Args:
        name: What identifies the fit and the rank on this machine.
        is_new: Whether the fit starts from the beginning: what is there is of another one.
        sources: A number for each source file of the user's, by path, that differs if the file is changed.

    Raises:
        OSError: If the file can't be written.
    """

    def __init__(self, name: str, *, is_new: bool, sources: Mapping[str, int]) -> None:
        directory = os.path.join(tempfile.gettempdir(), f"lightning_faulttolerant-{os.geteuid()}")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._path = os.path.join(directory, f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.record")
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if is_new:
                os.ftruncate(descriptor, 0)
            # A write into a hole of a file on a full disk would end the process.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + _PLACE_BYTES * _NUM_PLACES)
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        magic, last, length = _HEADER.unpack_from(self._memory)
        known = parse_json(self._memory[_HEADER.size : _HEADER.size + length]) if magic == _MAGIC and length else {}
        self.changed = sorted(path for path, one in sources.items() if known.get(path, one) != one)
        """The source files that have changed since the process before."""
        self.process = last + 1 if magic == _MAGIC else 1
        """The number of this process."""
        text = json.dumps(sources).encode()
        text = text if _HEADER.size + len(text) <= _HEADER_BYTES else b""
        self._memory[: _HEADER.size + len(text)] = _HEADER.pack(_MAGIC, self.process, len(text)) + text

    def line(self, number: int) -> BatchLine | None:
        """Return the line of a batch; ``None`` if there is none, or if it was torn."""
        content = self._memory[self._at(number) : self._at(number) + _LINE.size]
        *values, checksum = _LINE.unpack(content)
        found = BatchLine(*values)
        is_whole = found.process and crc32(content[:-4]) == checksum
        return found if is_whole and found.number == number else None

    def write(self, line: BatchLine) -> None:
        """Write the line of a batch."""
        content = _VALUES.pack(*line)
        _LINE.pack_into(self._memory, self._at(line.number), *line, crc32(content))

    def clear(self) -> None:
        """Forget the lines of all batches."""
        self._memory[_HEADER_BYTES:] = bytes(len(self._memory) - _HEADER_BYTES)

    def num_from(self, number: int) -> int:
        """Return how many lines in a row there are from a batch on."""
        first = number
        while number - first < _NUM_PLACES and self.line(number) is not None:
            number += 1
        return number - first

    def close(self, *, is_finished: bool) -> None:
        """Close the file; remove it if the fit is finished."""
        self._memory.close()
        if is_finished:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    @staticmethod
    def _at(number: int) -> int:
        return _HEADER_BYTES + _PLACE_BYTES * (number % _NUM_PLACES)
