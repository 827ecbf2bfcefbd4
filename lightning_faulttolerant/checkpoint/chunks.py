"""Read files in chunks into one piece of memory, for checksums of bytes that are read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

# The interpreter lock is released and taken back for each chunk. That may take 5 ms each time while other Python
# code runs.
CHUNK_BYTES = 8 * 1024 * 1024


def read_chunks(file: IO[bytes], num_bytes: int) -> Iterator[memoryview]:
    """Read from a file's current position; each chunk is overwritten by the next.

    Args:
        file: Open for reading.
        num_bytes: The maximum. The chunks have fewer bytes in total if the file ends before.

    Yields:
        Chunks of 1 byte to ``CHUNK_BYTES``.

    Raises:
        OSError: If the file can't be read.
    """
    memory = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
    while num_bytes:
        room = memory[:num_bytes]
        num_read = _read_into(file, room)
        if not num_read:
            return
        yield room[:num_read]
        num_bytes -= num_read


def _read_into(file: IO[bytes], room: memoryview) -> int:
    if hasattr(file, "readinto"):
        return int(file.readinto(room) or 0)
    data = file.read(len(room))  # not all of fsspec's files have readinto
    room[: len(data)] = data
    return len(data)
