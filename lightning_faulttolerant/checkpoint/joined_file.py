"""Read an autosave that refers to tensors in a base as the plain file that both together are.

Such an autosave is a ``torch.save`` file without the records of these tensors, and with one that says where they are
in the base: place, length, and checksum. Joined, all of it is verified and loaded like a plain file. torch itself
refuses such an autosave, since records are missing.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast, final

from lightning_faulttolerant.checkpoint.archive import UNREADABLE, Record, begin_of_content, end_of, find_damage
from lightning_faulttolerant.checkpoint.autosave_files import BASE_NAME
from lightning_faulttolerant.checkpoint.checked_file import read_into
from lightning_faulttolerant.checkpoint.manifest import describe_damage
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.records.lines import MAX_BYTES, parse_json
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, split_path

REFERENCES = "base.json"
"""The name of the record with the references."""
_VERSION = 1
_ENCRYPTED_FLAG = 1
_MAX_64_BIT = 1 << 63

Opener = Callable[[str], IO[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the content of a record is in the base.

    Args:
        offset: Its first byte.
        num_bytes: Its length.
        crc32: Its checksum.
    """

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """The tensors that an autosave refers to.

    Args:
        base: The name of the base.
        records: Where each record is that the autosave itself lacks, by its name.
    """

    base: str
    records: Mapping[str, Place]

    def encoded(self) -> bytes:
        """Return them as JSON."""
        places = {name: [place.offset, place.num_bytes, place.crc32] for name, place in self.records.items()}
        return json.dumps({"version": _VERSION, "base": self.base, "records": places}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> References:
        """Return what `encoded` has encoded.

        Raises:
            ValueError: If it is something else.
        """
        found = parse_json(data)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ValueError("its references are of a newer version of this package, or damaged")
        base, records = found.get("base"), found.get("records")
        if not isinstance(base, str) or BASE_NAME.fullmatch(base) is None or not isinstance(records, dict):
            raise ValueError("its references name no base")
        return cls(base=base, records={name: _place(numbers) for name, numbers in records.items()})


def _place(numbers: object) -> Place:
    is_place = isinstance(numbers, list) and len(numbers) == 3
    if not is_place or not all(type(n) is int and 0 <= n < _MAX_64_BIT for n in cast("list[object]", numbers)):
        raise ValueError("its references are damaged")
    offset, num_bytes, crc32 = cast("list[int]", numbers)
    return Place(offset=offset, num_bytes=num_bytes, crc32=crc32)


def references_in(file: IO[bytes]) -> References | None:
    """Return the references of an autosave; ``None`` for a plain file, and for one that is no zip file.

    Args:
        file: Open for reading, seekable. Only its zip directory and this record are read.

    Raises:
        ValueError: If it has references that can't be read.
        OSError: If the file can't be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            found = [record for record in archive.infolist() if record.filename.partition("/")[2] == REFERENCES]
            if not found or not _can_be_read(found[0], num_bytes=file.seek(0, os.SEEK_END)):
                return None
            with archive.open(found[0]) as record:
                data = record.read(MAX_BYTES + 1)
    except UNREADABLE:
        return None  # the verification says what is wrong with it
    return References.decoded(data)


def _can_be_read(record: zipfile.ZipInfo, *, num_bytes: int) -> bool:
    """Return whether a record is as torch writes all of them, and within the file."""
    is_plain = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & _ENCRYPTED_FLAG
    return is_plain and 0 <= record.header_offset < num_bytes


@contextlib.contextmanager
def opened_whole(path: str | os.PathLike[str], opener: Opener | None = None) -> Iterator[IO[bytes]]:
    """Open a checkpoint file for reading, joined with its base if it refers to one.

    Args:
        path: A file or a URL. The base is in the same directory, or in the one above.
        opener: Opens a path or a URL. Default: `open_file`.

    Raises:
        DamagedCheckpointError: If the base does not exist, or the references can't be read.
        OSError: If a file can't be opened.
    """
    opens = opener or _opened
    with opens(os.fspath(path)) as own:
        try:
            references = references_in(own)
        except ValueError as error:
            raise DamagedCheckpointError(describe_damage(path, str(error))) from error
        own.seek(0)
        if references is None:
            yield own
            return
        with _opened_base(path, references.base, opens) as base:
            try:
                joined = JoinedFile(own, base, references)
            except ValueError as error:
                raise DamagedCheckpointError(describe_damage(path, str(error))) from error
            yield cast("IO[bytes]", joined)


def _opened(path: str) -> IO[bytes]:
    return open_file(path, whole=True)


def _opened_base(path: str | os.PathLike[str], name: str, opens: Opener) -> IO[bytes]:
    for folder in _folders(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return opens(f"{folder.rstrip('/')}/{name}")
    reason = (
        f"it refers to tensors in {name}, which is neither next to it nor in the directory above. Put that file back, "
        "or take another autosave. `lightning-faulttolerant export` makes one file of both, which can be copied alone"
    )
    raise DamagedCheckpointError(describe_damage(path, reason))


def _folders(path: str | os.PathLike[str]) -> Iterable[str]:
    """Return where the base of an autosave may be: next to it or above, and also where a link leads to."""
    if is_url(path):
        directory = split_path(path)[0]
        return directory, split_path(directory)[0]
    given = local_path(path)
    directories = [os.path.dirname(place) for place in (os.path.abspath(given), os.path.realpath(given))]
    return dict.fromkeys(folder for directory in directories for folder in (directory, os.path.dirname(directory)))


def find_whole_damage(file: IO[bytes], *, without: str | None = None) -> str | None:
    """Return what is wrong with a file from `opened_whole`, as `find_damage` does; of the base, only what is used.

    Args:
        file: Open for reading.
        without: As in `find_damage`.
    """
    if not isinstance(file, JoinedFile):
        return find_damage(file, without=without)
    damage = find_damage(file.own, without=without)
    if damage is not None:
        return damage
    damage = find_damage(cast("IO[bytes]", file), without=without)
    return None if damage is None else f"with the tensors in {file.base_name}, {damage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    begin: int
    num_bytes: int
    source: IO[bytes]
    offset: int


@final
class JoinedFile(io.RawIOBase):
    """The plain file that an autosave and its base are together; read-only.

    Args:
        own: The autosave, a zip file. It stays open when this is closed, and so does the base.
        base: The base.
        references: Those of the autosave.

    Raises:
        ValueError: If the autosave is damaged.
    """

    def __init__(self, own: IO[bytes], base: IO[bytes], references: References) -> None:
        super().__init__()
        self.own = own
        self.base_name = references.base
        self._segments: list[_Segment] = []
        self._position = 0
        self._num_bytes = 0
        records: list[Record] = []
        for name, place in _own_places(own).items():
            records.append(self._add(name, place, own, records))
        num_bytes = base.seek(0, os.SEEK_END)
        if sum(place.num_bytes for place in references.records.values()) > num_bytes:
            raise ValueError(f"its references share bytes of {self.base_name}")
        for name, place in references.records.items():
            if place.offset + place.num_bytes > num_bytes:
                raise ValueError(f"{self.base_name}, to which it refers, has only {num_bytes} bytes")
            records.append(self._add(name, place, base, records))
        self._append(io.BytesIO(end_of(records)))
        self._begins = [segment.begin for segment in self._segments]

    def _add(self, name: str, place: Place, source: IO[bytes], before: list[Record]) -> Record:
        offset = before[-1].end if before else 0
        record = Record(name=name, offset=offset, num_bytes=place.num_bytes, crc32=place.crc32)
        self._append(io.BytesIO(record.header()))
        self._append(source, offset=place.offset, num_bytes=place.num_bytes)
        self._append(io.BytesIO(record.descriptor()))
        return record

    def _append(self, source: IO[bytes], *, offset: int = 0, num_bytes: int | None = None) -> None:
        if num_bytes is None:
            num_bytes = source.seek(0, os.SEEK_END)
        if num_bytes:
            segment = _Segment(begin=self._num_bytes, num_bytes=num_bytes, source=source, offset=offset)
            self._segments.append(segment)
            self._num_bytes += num_bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position, and return it."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if begin + offset < 0:
            raise ValueError(f"it refers to data at byte {begin + offset}")
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as there is left. Less than that only where the base ends too early."""
        room = memoryview(buffer).cast("B")
        num_done = 0
        while num_done < len(room) and self._position < self._num_bytes:
            segment = self._segments[bisect.bisect_right(self._begins, self._position) - 1]
            within = self._position - segment.begin
            segment.source.seek(segment.offset + within)
            num_wanted = min(segment.num_bytes - within, len(room) - num_done)
            num_read = read_into(segment.source, room[num_done : num_done + num_wanted])
            if not num_read:
                break
            num_done += num_read
            self._position += num_read
        return num_done


def _own_places(own: IO[bytes]) -> dict[str, Place]:
    with zipfile.ZipFile(own) as archive:
        found = archive.infolist()
    places = {}
    num_bytes = own.seek(0, os.SEEK_END)
    for record in found:
        if not 0 <= record.header_offset < num_bytes:
            raise ValueError("its zip directory is damaged")
        begin = begin_of_content(own, record.header_offset, record.filename)
        place = Place(offset=begin, num_bytes=record.file_size, crc32=record.CRC)
        name = record.filename.partition("/")[2]
        if name != REFERENCES:
            places[name] = place
    return places
