"""The zip file of ``torch.save``: its format, its writer, and a check that each byte is as it was written.

A zip file states most facts twice, and readers believe one place and ignore the other. Here all places must agree,
records must follow one another without a gap, and each record's CRC32 must be right. Nothing is unpickled.

The bytes before, between, and after the contents depend only on names, sizes, and checksums. So a file can also be read
as it would be, before anybody writes it. Files are read in chunks into one piece of memory.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol, final

from lightning_faulttolerant.checkpoint.checked_file import TOO_SHORT, RecordContent, content_damage

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

_VERSION = b"3\n"  # of torch's format


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


def capped(counts: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return numbers of records, twice, the length of the directory, and its place, as the short end states them."""
    return tuple(map(min, counts, (_MAX_16_BIT, _MAX_16_BIT, MAX_32_BIT, MAX_32_BIT)))


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
        >>> _ = writer.add("data.pkl", [memoryview(b"\x80\x02K\x03.")])
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
        """Write the version of the format, and the end of the file."""
        self.add("version", [memoryview(_VERSION)])
        self._sink.write(memoryview(end_of(self._records)))


UNREADABLE = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error)
"""What ``zipfile`` raises for a damaged file: errors of struct, of decoding, and of unsupported versions, too."""

# torch's format from before 1.6 begins with this number, pickled under any protocol.
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_LEGACY_MAGIC_WITHIN_BYTES = 32


_LARGE_BYTES = 1 << 16


def find_damage(file: IO[bytes], *, without: str | None = None, later: list[RecordContent] | None = None) -> str | None:
    """Read a whole ``torch.save`` file, in chunks of 8 MiB, and return what is wrong with it.

    In a zip file that was written without checksums (``has_checksums``), everything except the contents is compared.

    Args:
        file: Open for reading, seekable.
        without: The key of a record of tensor values whose content is not read.
        later: Receives the large contents. They are not read here: the caller compares them. Default: none is left.

    Returns:
        The reason, worded to follow a colon; None if there is no damage.

    Raises:
        OSError: If the file can't be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            _check_names(records)
            _check_records(file, records, directory_offset=archive.start_dir, without=without, later=later)
            _check_directory(file, records)
            _check_end(file, num_records=len(records), directory_offset=archive.start_dir)
    except _Damage as damage:
        return str(damage)
    except UNREADABLE as error:
        return f"it is not a complete zip file ({error})"
    return None


def has_checksums(file: IO[bytes]) -> bool:
    """Return whether a ``torch.save`` file without damage (``find_damage``) has the CRC32 of its records.

    After ``torch.serialization.set_crc32_options(False)`` torch writes 0 for each of them. A single CRC32 that is
    wrong, or is 0, among right ones is damage.

    Args:
        file: Open for reading, seekable. Only the zip directory at its end is read.

    Raises:
        OSError: If the file can't be read.
    """
    with zipfile.ZipFile(file) as archive:
        return _have_checksums(archive.infolist())


def is_legacy(file: IO[bytes]) -> bool:
    """Return whether a file is in torch's format from before 1.6, which is not a zip file and has no checksums.

    Args:
        file: Open for reading, seekable.

    Raises:
        OSError: If the file can't be read.
    """
    file.seek(0)
    begin = file.read(_LEGACY_MAGIC_WITHIN_BYTES)
    return begin.startswith(b"\x80") and _LEGACY_MAGIC in begin


def begin_of_content(file: IO[bytes], header_offset: int, name: str) -> int:
    """Return where the content of a record begins.

    Args:
        file: Open for reading, seekable.
        header_offset: Where the record begins, according to the directory.
        name: The name of the record, for the error.

    Raises:
        ValueError: If no record begins there.
    """
    file.seek(header_offset)
    header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise ValueError(f"record {name} does not begin where the directory says")
    *_, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
    return header_offset + LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _have_checksums(records: list[zipfile.ZipInfo]) -> bool:
    return any(record.CRC for record in records)


class _Damage(Exception):  # noqa: N818 - never leaves this module; find_damage returns its text
    """The damage that was found in the file."""


def _demand(condition: bool, reason: str) -> None:
    if not condition:
        raise _Damage(reason)


def _check_names(records: list[zipfile.ZipInfo]) -> None:
    prefixes = {record.filename.split("/")[0] for record in records}
    names = {record.filename.split("/", 1)[-1] for record in records}
    _demand(len(prefixes) == 1, f"its records belong to several archives: {sorted(prefixes)}")
    _demand({"data.pkl", "version"} <= names, f"it was not written by torch.save: its records are {sorted(names)}")


def _check_records(
    file: IO[bytes],
    records: list[zipfile.ZipInfo],
    *,
    directory_offset: int,
    without: str | None,
    later: list[RecordContent] | None,
) -> None:
    file.seek(0)
    ends = [record.header_offset for record in records[1:]] + [directory_offset]
    checksums = _have_checksums(records)
    for record, end in zip(records, ends, strict=True):
        _demand(file.tell() == record.header_offset, f"there is a gap before record {record.filename}")
        _check_central_entry(record)
        _check_local_header(file, record)
        name = record.filename.split("/", 1)[-1]
        if without is not None and name == f"data/{without}":
            file.seek(record.file_size, os.SEEK_CUR)
        elif later is not None and checksums and name.startswith("data/") and record.file_size >= _LARGE_BYTES:
            later.append(_content(record, offset=file.tell()))
            file.seek(record.file_size, os.SEEK_CUR)
        else:
            _check_content(file, record, checksum=checksums)
        _check_descriptor(file, record, num_bytes=end - file.tell())


def _check_central_entry(record: zipfile.ZipInfo) -> None:
    # These fields say nothing about the content and exist in one place only, but a bit flip in some of them makes torch
    # refuse the file. torch has always written zeros.
    unused = (record.create_system, record.create_version, record.volume, record.internal_attr, record.external_attr)
    _demand(not any(unused) and not record.comment, f"the directory entry of record {record.filename} is damaged")
    _demand(
        record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size,
        f"record {record.filename} is compressed, which torch.save never does",
    )


def _check_local_header(file: IO[bytes], record: zipfile.ZipInfo) -> None:
    header = LOCAL_HEADER.unpack(_read(file, LOCAL_HEADER.size))
    signature, version, flags, method, time, date, crc, size, uncompressed_size, name_bytes, extra_bytes = header
    name = _read(file, name_bytes)
    _read(file, extra_bytes)
    sizes = {(0, 0, 0), (0, MAX_32_BIT, MAX_32_BIT)} if flags & DESCRIPTOR_FLAG else set()
    sizes |= {(record.CRC, record.file_size, record.file_size)}
    agrees = (
        signature == b"PK\x03\x04"
        and name == _name_bytes(record)
        and version | record.reserved << 8 == record.extract_version
        and (flags, method) == (record.flag_bits, record.compress_type)
        and (time, date) == _dos_time(record)
        and (crc, size, uncompressed_size) in sizes
    )
    _demand(agrees, f"the header of record {record.filename} differs from the directory at the end of the file")


def _dos_time(record: zipfile.ZipInfo) -> tuple[int, int]:
    year, month, day, hour, minute, second = record.date_time
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day


def _check_content(file: IO[bytes], record: zipfile.ZipInfo, *, checksum: bool) -> None:
    damage = content_damage(file, _content(record, offset=file.tell()))
    _demand(damage is None or (not checksum and damage != TOO_SHORT), damage or "")


def _content(record: zipfile.ZipInfo, *, offset: int) -> RecordContent:
    return RecordContent(name=record.filename, offset=offset, num_bytes=record.file_size, crc32=record.CRC)


def _check_descriptor(file: IO[bytes], record: zipfile.ZipInfo, *, num_bytes: int) -> None:
    small, large = SMALL_DESCRIPTOR, LARGE_DESCRIPTOR
    expected = (b"PK\x07\x08", record.CRC, record.file_size, record.file_size)
    if not record.flag_bits & DESCRIPTOR_FLAG:
        agrees = num_bytes == 0
    elif num_bytes in (small.size, large.size):
        layout = small if num_bytes == small.size else large
        agrees = layout.unpack(_read(file, num_bytes)) == expected
    else:
        agrees = False
    _demand(agrees, f"the data after the content of record {record.filename} is damaged")


def _check_directory(file: IO[bytes], records: list[zipfile.ZipInfo]) -> None:
    for record in records:
        entry, name = _read(file, CENTRAL_ENTRY.size), _name_bytes(record)
        # If the end of the directory cuts a name short, zipfile accepts the name, but torch refuses the file.
        lengths = struct.unpack_from("<3H", entry, 28)
        _demand(lengths == (len(name), len(record.extra), 0), f"the directory entry of {record.filename} is damaged")
        file.seek(len(name) + len(record.extra), os.SEEK_CUR)


def _name_bytes(record: zipfile.ZipInfo) -> bytes:
    return record.orig_filename.encode("utf-8" if record.flag_bits & UTF8_FLAG else "cp437")


def _check_end(file: IO[bytes], *, num_records: int, directory_offset: int) -> None:
    end_offset = file.tell()
    num_left = file.seek(0, os.SEEK_END) - end_offset
    file.seek(end_offset)
    counts = (num_records, num_records, end_offset - directory_offset, directory_offset)
    if num_left == END64.size + END64_LOCATOR.size + END.size:
        signature, size, _, version, *disks_and_counts = END64.unpack(_read(file, END64.size))
        _demand(
            (signature, size, version >= 45, *disks_and_counts) == (b"PK\x06\x06", 44, True, 0, 0, *counts)
            and END64_LOCATOR.unpack(_read(file, END64_LOCATOR.size)) == (b"PK\x06\x07", 0, end_offset, 1),
            "the end of its zip directory is damaged",
        )
        num_left = END.size
    expected = (b"PK\x05\x06", 0, 0, *capped(counts), 0)
    _demand(
        num_left == END.size and END.unpack(_read(file, END.size)) == expected,
        "the end of its zip directory is damaged, or something follows it",
    )


def _read(file: IO[bytes], num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    _demand(len(data) == num_bytes, TOO_SHORT)
    return data
