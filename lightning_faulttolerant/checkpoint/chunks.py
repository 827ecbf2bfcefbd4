"""Read files in chunks into one piece of memory, for sums of bytes that are looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

# The lock of the interpreter is given away and taken back for each chunk, which may take 5 ms each time where Python
# code is run beside.
CHUNK_BYTES = 8 * 1024 * 1024


def read_chunks(file: IO[bytes], num_bytes: int) -> Iterator[memoryview]:
    """Read from where a file is; each chunk is overwritten by the next.

    Args:
        file: Open for reading.
        num_bytes: How many at most. The chunks have fewer together where the file ends before.

    Yields:
        1 byte to ``CHUNK_BYTES``.

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
    data = file.read(len(room))  # not all of fsspec's files have the other
    room[: len(data)] = data
    return len(data)
