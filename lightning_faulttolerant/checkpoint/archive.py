"""Check that each byte of a ``torch.save`` file is as it was written.

A zip file states most facts twice, and readers believe one place and ignore the other. Here all places must agree,
records must follow one another without a gap, and each record's CRC32 must be right. Nothing is unpickled.

Files are read in chunks into one piece of memory.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from lightning_faulttolerant.checkpoint.zip_records import (
    CENTRAL_ENTRY,
    DESCRIPTOR_FLAG,
    END,
    END64,
    END64_LOCATOR,
    LARGE_DESCRIPTOR,
    LOCAL_HEADER,
    MAX_32_BIT,
    SMALL_DESCRIPTOR,
    UTF8_FLAG,
    capped,
)

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


_TOO_SHORT = "it ends too early"

UNREADABLE = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error)
"""What ``zipfile`` raises for a damaged file: errors of struct, of decoding, and of unsupported versions, too."""

# torch's format from before 1.6 begins with this number, pickled under any protocol.
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_LEGACY_MAGIC_WITHIN_BYTES = 32


_LARGE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
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


def find_damage(file: IO[bytes], *, without: str | None = None, later: list[Content] | None = None) -> str | None:
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
    later: list[Content] | None,
) -> None:
    file.seek(0)
    ends = [record.header_offset for record in records[1:]] + [directory_offset]
    checksums = _have_checksums(records)
    for record, end in zip(records, ends, strict=True):
        _demand(file.tell() == record.header_offset, f"there is a gap before record {record.filename}")
        _check_central_entry(record)
        _check_local_header(file, record)
        if without is not None and record.filename.split("/", 1)[-1] == f"data/{without}":
            file.seek(record.file_size, os.SEEK_CUR)
        elif later is not None and checksums and _holds_values(record) and record.file_size >= _LARGE_BYTES:
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
    _demand(damage is None or (not checksum and damage != _TOO_SHORT), damage or "")


def content_damage(file: IO[bytes], content: Content) -> str | None:
    """Read a content and return what is wrong with it, or None.

    Args:
        file: Open for reading, seekable.
        content: The content.

    Raises:
        OSError: If the file can't be read.
    """
    file.seek(content.offset)
    crc, num_left = 0, content.num_bytes
    for chunk in read_chunks(file, num_left):
        crc = zlib.crc32(chunk, crc)
        num_left -= len(chunk)
    return _TOO_SHORT if num_left else content.damage(crc)


def _content(record: zipfile.ZipInfo, *, offset: int) -> Content:
    return Content(name=record.filename, offset=offset, num_bytes=record.file_size, crc32=record.CRC)


def _holds_values(record: zipfile.ZipInfo) -> bool:
    return record.filename.split("/", 1)[-1].startswith("data/")


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
    _demand(len(data) == num_bytes, _TOO_SHORT)
    return data
