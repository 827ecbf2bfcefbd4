"""Compare the values of tensors with their checksums as torch reads them, so that a file is read once, not twice."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from typing import IO, Any, final

from lightning_faulttolerant.checkpoint.archive import Content, content_damage, read_into

# Small enough that the bytes are still in the CPU's cache for the checksum.
_CHUNK_BYTES = 1024 * 1024


@final
class CheckedFile(io.RawIOBase):
    """A checkpoint file whose large contents are still to be compared; read-only.

    Args:
        file: The file. It stays open when this is closed.
        contents: The contents that are still to be compared.
    """

    def __init__(self, file: IO[bytes], contents: Iterable[Content]) -> None:
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

    def _read(self, room: memoryview, content: Content) -> int:
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
