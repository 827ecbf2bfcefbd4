"""Reads the contents of a checkpoint file, and compares them with their checksums.

A file that torch loads is compared as torch reads it, so that it is read once, not twice.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, final

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
        num_read = read_into(file, room)
        if not num_read:
            return
        yield room[:num_read]
        num_bytes -= num_read


def sum_of(file: IO[bytes], num_bytes: int) -> tuple[int, int]:
    """Read from a file's current position; return how many bytes were read, and their CRC32.

    Args:
        file: Open for reading.
        num_bytes: The maximum.

    Raises:
        OSError: If the file can't be read.
    """
    num_read, crc32 = 0, 0
    for chunk in read_chunks(file, num_bytes):
        num_read += len(chunk)
        crc32 = zlib.crc32(chunk, crc32)
    return num_read, crc32


def read_into(file: IO[bytes], room: memoryview) -> int:
    """Read from a file's current position into memory, and return the number of bytes; 0 only at the end.

    Args:
        file: Open for reading.
        room: The memory.
    """
    if hasattr(file, "readinto"):
        return int(file.readinto(room) or 0)
    data = file.read(len(room))  # not all of fsspec's files have readinto
    room[: len(data)] = data
    return len(data)


class CountedFile:
    """Forwards calls to a file, and counts the bytes that are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        """Read, and count."""
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position, and return it."""
        if whence == os.SEEK_SET and not 0 <= offset < 1 << 63:  # the operating system would report a disk error
            raise ValueError(f"it refers to data at byte {offset}")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Return True."""
        return True


TOO_SHORT = "it ends too early"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordContent:
    """The values of a tensor in a file.

    Args:
        name: The name of the record.
        offset: The first byte.
        num_bytes: The length.
        crc32: The checksum that was written.
    """

    name: str
    offset: int
    num_bytes: int
    crc32: int

    def damage(self, crc: int) -> str | None:
        """Return what is wrong if the content that was read has another checksum."""
        if crc == self.crc32:
            return None
        return f"record {self.name} has CRC32 {crc:08x}, but was written with {self.crc32:08x}"


def content_damage(file: IO[bytes], content: RecordContent) -> str | None:
    """Read a content and return what is wrong with it, or None.

    Args:
        file: Open for reading, seekable.
        content: The content.

    Raises:
        OSError: If the file can't be read.
    """
    file.seek(content.offset)
    num_read, crc = sum_of(file, content.num_bytes)
    return content.damage(crc) if num_read == content.num_bytes else TOO_SHORT


# Small enough that the bytes are still in the CPU's cache for the checksum.
_CHUNK_BYTES = 1024 * 1024


@final
class CheckedFile(io.RawIOBase):
    """A checkpoint file whose large contents are still to be compared; read-only.

    Args:
        file: The file. It stays open when this is closed.
        contents: The contents that are still to be compared.
    """

    def __init__(self, file: IO[bytes], contents: Iterable[RecordContent]) -> None:
        super().__init__()
        self._file = file
        self._left = {content.offset: content for content in contents}
        self._damage: str | None = None
        self._error: OSError | None = None

    def find_damage(self) -> str | None:
        """Return what is wrong with the contents, or None. Those that were not read as a whole are read now.

        Raises:
            OSError: If one of them can't be read.
        """
        if self._error is not None:
            raise self._error
        while self._damage is None and self._left:
            _, content = self._left.popitem()
            self._damage = content_damage(self._file, content)
        return self._damage

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position, and return it."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer. If it receives a whole content, compare its checksum."""
        room = memoryview(buffer).cast("B")
        content = self._left.get(self._file.tell())
        try:
            if content is None or content.num_bytes != len(room):
                return read_into(self._file, room)
            return self._read(room, content)
        except OSError as error:
            self._error = error  # torch may raise another one
            raise

    def _read(self, room: memoryview, content: RecordContent) -> int:
        crc, num_done = 0, 0
        while num_done < len(room):
            chunk = room[num_done : num_done + _CHUNK_BYTES]
            num_read = read_into(self._file, chunk)
            if not num_read:
                return num_done
            crc = zlib.crc32(chunk[:num_read], crc)
            num_done += num_read
        self._damage = self._damage or content.damage(crc)
        del self._left[content.offset]
        return num_done
