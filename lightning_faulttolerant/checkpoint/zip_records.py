"""The zip format of ``torch.save``, and its writer: the bytes before, between, and after the contents of records.

They depend only on names, sizes, and checksums. So a file can also be read as it would be, before anybody writes it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

# As torch.save: https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc
_PREFIX = "archive/"
_ALIGNMENT = 64
_ZIP64, _PADDING = 1, b"FB"
_MADE_BY, _NEEDED = 0x031E, 45
DESCRIPTOR_FLAG, UTF8_FLAG = 0x0008, 0x0800
"""A descriptor follows the content; names are UTF-8."""
_FLAGS = DESCRIPTOR_FLAG | UTF8_FLAG
MAX_32_BIT = 0xFFFFFFFF
_MAX_16_BIT = 0xFFFF
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
SMALL_DESCRIPTOR, LARGE_DESCRIPTOR = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
CENTRAL_ENTRY = struct.Struct("<4s6H3I5H2I")
END64 = struct.Struct("<4sQ2H2I4Q")
END64_LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4s4H2IH")

VERSION_RECORD = ("version", b"3\n")
"""The name and the content of the record with the version of torch's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A record of a zip file.

    Args:
        name: Its name, without the prefix that all of them have.
        offset: Where its header begins.
        num_bytes: The length of its content.
        crc32: The checksum of its content.
    """

    name: str
    offset: int
    num_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.content_offset + self.num_bytes + len(self.descriptor())

    @property
    def content_offset(self) -> int:
        """Where its content begins: at a multiple of 64, so that it can be mapped."""
        return self.offset + len(self.header())

    def header(self) -> bytes:
        """Return the bytes before its content."""
        name = self._name()
        extra, size = b"", 0
        if self._is_large():
            extra, size = struct.pack("<2H2Q", _ZIP64, 16, self.num_bytes, self.num_bytes), MAX_32_BIT
        begin = self.offset + LOCAL_HEADER.size + len(name) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        extra += _PADDING + struct.pack("<H", padding) + b"Z" * padding
        return LOCAL_HEADER.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, size, size, len(name), len(extra)) + name + extra

    def descriptor(self) -> bytes:
        """Return the bytes after its content."""
        layout = LARGE_DESCRIPTOR if self._is_large() else SMALL_DESCRIPTOR
        return layout.pack(b"PK\x07\x08", self.crc32, self.num_bytes, self.num_bytes)

    def entry(self) -> bytes:
        """Return its entry in the directory at the end of the file."""
        name = self._name()
        numbers = [self.num_bytes] * 2 * self._is_large() + [self.offset] * (self.offset >= MAX_32_BIT)
        extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
        size, offset = min(self.num_bytes, MAX_32_BIT), min(self.offset, MAX_32_BIT)
        lengths = (len(name), len(extra), 0)
        fields = (0, 0, _FLAGS, 0, 0, 0, self.crc32, size, size, *lengths, 0, 0, 0, offset)
        return CENTRAL_ENTRY.pack(b"PK\x01\x02", *fields) + name + extra

    def _name(self) -> bytes:
        return f"{_PREFIX}{self.name}".encode()

    def _is_large(self) -> bool:
        return self.num_bytes >= MAX_32_BIT


def capped(counts: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return numbers of records, twice, the length of the directory, and its place, as the short end states them."""
    num_here, num_records, num_bytes, offset = counts
    return (
        min(num_here, _MAX_16_BIT),
        min(num_records, _MAX_16_BIT),
        min(num_bytes, MAX_32_BIT),
        min(offset, MAX_32_BIT),
    )


def end_of(records: Sequence[Record]) -> bytes:
    """Return the bytes after the last record: the directory, and its end.

    Args:
        records: All records in the order of the file, at least one.
    """
    directory, begin = b"".join(record.entry() for record in records), records[-1].end
    counts = (len(records), len(records), len(directory), begin)
    end64 = END64.pack(b"PK\x06\x06", 44, _MADE_BY, _NEEDED, 0, 0, *counts)
    locator = END64_LOCATOR.pack(b"PK\x06\x07", 0, begin + len(directory), 1)
    return directory + end64 + locator + END.pack(b"PK\x05\x06", 0, 0, *capped(counts), 0)


class Sink(Protocol):
    """Whatever takes all the bytes that it gets, or raises."""

    def write(self, data: memoryview) -> object:
        """Take bytes."""


@final
class RecordWriter:
    r"""Writes the records of a file, one after the other.

    Args:
        sink: Takes the bytes, from the beginning of the file.

    Example:
        >>> import io, torch
        >>> file = io.BytesIO()
        >>> writer = RecordWriter(file)
        >>> for name, content in (("data.pkl", b"\x80\x02K\x03."), VERSION_RECORD):
        ...     _ = writer.add(name, [memoryview(content)])
        >>> writer.end()
        >>> _ = file.seek(0)
        >>> torch.load(file, weights_only=True)
        3
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._records: list[Record] = []

    def add(self, name: str, pieces: Sequence[memoryview]) -> Record:
        """Write a record.

        Args:
            name: Its name.
            pieces: Its content, which must not change meanwhile.
        """
        num_bytes = sum(piece.nbytes for piece in pieces)
        offset = self._records[-1].end if self._records else 0
        self._sink.write(memoryview(Record(name=name, offset=offset, num_bytes=num_bytes, crc32=0).header()))
        crc32 = 0
        for piece in pieces:
            crc32 = zlib.crc32(piece, crc32)
            self._sink.write(piece)
        record = Record(name=name, offset=offset, num_bytes=num_bytes, crc32=crc32)
        self._sink.write(memoryview(record.descriptor()))
        self._records.append(record)
        return record

    def end(self) -> None:
        """Write the end of the file."""
        self._sink.write(memoryview(end_of(self._records)))
