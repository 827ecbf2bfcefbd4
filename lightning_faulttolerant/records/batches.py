"""The record: a line for each batch of a run, in a file of fixed size on a local disk that outlives its process.

The newest line takes the place of the oldest one. A process that runs a batch again finds the line of the process
before, and adds its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lightning_faulttolerant.records.lines import open_own, parse_json

_HEADER = struct.Struct("<8s32sII")  # the life, the process, and the length of the JSON of its sources after it
_HEADER_BYTES = 1 << 16
_MAGIC = b"batches4"
# The number of the line in the file, from 1, the fields of BatchLine, and that number again: a torn line ends with
# another one.
_LINE = struct.Struct("<QQ9I4xQ")
_NUM_LINES = 1 << 14
_KEPT_SECONDS = 30 * 24 * 3600


class BatchLine(NamedTuple):
    """What a process notes of a batch.

    Attributes:
        number: How many training batches of the fit have begun, this one included.
        epoch: Its epoch.
        batch: Its number in the epoch; that of the next training batch, if it is a batch of an evaluation.
        evaluated: Its number in its evaluation, from 1; 0 if it is a training batch.
        loader: The number of its loader in the evaluation.
        process: The number of the process on this machine, from 1.
        order: A checksum of its indices; 0 if they are not known.
        content: A checksum of some of its values; 0 if they were not read.
        output: A checksum of the tensors that its step returned; 0 if they were not read.
        logged: A checksum of what loggers got since the batch before it; 0 if they got nothing.
    """

    number: int
    epoch: int
    batch: int
    evaluated: int
    loader: int
    process: int
    order: int
    content: int
    output: int
    logged: int

    @property
    def place(self) -> tuple[int, ...]:
        """Where it is in the run."""
        return self[:5]


class BatchRecord:
    """The record of one rank of a run.

    Args:
        name: What identifies the run and the rank on this machine.
        is_new: Whether existing lines are dropped.
        life: An identifier of 32 characters that is new each time the run starts from the beginning. Lines of another
            one are dropped.
        sources: A number for each source file of the user's, by path, that differs if the file is changed.

    Raises:
        OSError: If the file can't be written.
    """

    def __init__(self, name: str, *, is_new: bool, life: str, sources: Mapping[str, int]) -> None:
        directory = os.path.join(tempfile.gettempdir(), f"lightning_faulttolerant-{os.geteuid()}")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _remove_old(directory)
        self._path = os.path.join(directory, f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.record")
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if is_new:
                os.ftruncate(descriptor, 0)
            # A write into a hole of a file on a full disk would end the process.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + _LINE.size * _NUM_LINES)
            os.utime(descriptor)  # a write into the memory may not change its time
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        magic, own, last, length = _HEADER.unpack_from(self._memory)
        is_known = (magic, own) == (_MAGIC, life.encode())
        if not is_known:
            self.clear()
        known = parse_json(self._memory[_HEADER.size : _HEADER.size + length]) if is_known and length else {}
        self.changed = sorted(path for path, one in sources.items() if known.get(path, one) != one)
        """The source files that have changed since the process before."""
        self.process = last + 1 if is_known else 1
        """The number of this process."""
        text = json.dumps(sources).encode()
        text = text if _HEADER.size + len(text) <= _HEADER_BYTES else b""
        self._memory[: _HEADER.size + len(text)] = _HEADER.pack(_MAGIC, life.encode(), self.process, len(text)) + text
        found = sorted(one for one in _LINE.iter_unpack(self._memory[_HEADER_BYTES:]) if one[0] == one[-1] > 0)
        self.write = self._writer(found[-1][0] if found else 0)
        """Writes the line of a batch: the fields of `BatchLine`."""
        self.earlier = [BatchLine(*values) for _, *values, _ in found]
        """The lines of earlier processes, the oldest first, without those that were torn."""

    def _writer(self, num_written: int) -> Callable[..., None]:
        memory, pack = self._memory, _LINE.pack_into

        def write(*line: int) -> None:  # after a step, each attribute costs more than its work
            nonlocal num_written
            at = _HEADER_BYTES + _LINE.size * (num_written % _NUM_LINES)
            num_written += 1
            pack(memory, at, num_written, *line, num_written)

        return write

    def forget(self) -> None:
        """Forget the lines of this process: they are of a run that is not repeated."""
        for at in range(_HEADER_BYTES, len(self._memory), _LINE.size):
            _, *values, _ = _LINE.unpack_from(self._memory, at)
            if BatchLine(*values).process == self.process:
                self._memory[at : at + _LINE.size] = bytes(_LINE.size)

    def clear(self) -> None:
        """Forget the lines of all batches."""
        self._memory[_HEADER_BYTES:] = bytes(len(self._memory) - _HEADER_BYTES)

    def close(self, *, is_finished: bool) -> None:
        """Close the file; remove it if the run is finished."""
        self._memory.close()
        if is_finished:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _remove_old(directory: str) -> None:
    """Remove the records of runs that were not continued on this machine."""
    for one in os.scandir(directory):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - one.stat().st_mtime > _KEPT_SECONDS:
                os.unlink(one.path)
