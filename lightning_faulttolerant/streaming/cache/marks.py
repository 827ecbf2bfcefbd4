"""Marks: a machine's record of a shard in its cache, and when the record is trusted without reading the shard.

A file is trusted unread if it is the same file that was checked: its inode, size, and times are those of its mark, and
the machine has not been restarted since. A restart matters because a file written shortly before a power loss may have
lost its content and nothing else. Otherwise its content is compared with the checksum of the mark. A mark is written
before its file, so a file without a mark was not fetched by this package.

Files that are being written have temporary names. Those of dead processes are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_faulttolerant.processes import this_boot
from lightning_faulttolerant.storage.atomic_file import (
    atomic_writer,
    is_of_this_process,
    is_unchanged_for_long,
    leftovers,
    target_name,
    temporary_name,
)

DIRECTORY = ".faulttolerant"
"""The folder of marks and locks, in the directory of the cache."""
SUFFIX = ".mark"
CRC32 = "crc32"

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMark:
    """One file at the time of its check.

    Args:
        algorithm: The algorithm of the checksum.
        checksum: The checksum of the whole file, hexadecimal.
        identity: Its inode, its size, and the change times of its content and its entry; empty if it may be new.
    """

    algorithm: str
    checksum: str
    identity: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMark:
    """The result of a shard's check.

    Args:
        index: The digest of the index that it belongs to.
        boot: The boot of the machine in which it was checked; empty if unknown.
        is_downloaded: Whether it was fetched, so it may be evicted; False if it was found in the directory.
        files: Its files, in the order of the shard's.
    """

    index: str
    boot: str
    is_downloaded: bool
    files: tuple[FileMark, ...]

    def is_unchanged(self, paths: list[str]) -> bool:
        """Return whether the files are those that were checked, without reading them."""
        return bool(self.boot) and self.boot == this_boot() and [identity(path) for path in paths] == self._identities

    @property
    def _identities(self) -> list[tuple[int, ...]]:
        return [file.identity for file in self.files]


def path_of(directory: str, basename: str, suffix: str = SUFFIX) -> str:
    """Return the path of a shard's mark, or of another file that is kept for it."""
    return os.path.join(directory, DIRECTORY, basename + suffix)


def read(path: str) -> ShardMark | None:
    """Return a mark, or None if it is missing. A mark that can't be parsed is returned as one without an index."""
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(content)
        files = tuple(FileMark(**{**file, "identity": tuple(file["identity"])}) for file in found.pop("files"))
        return ShardMark(**found, files=files)
    except (ValueError, TypeError, KeyError, AttributeError):  # lost in a power failure, perhaps with its shard
        return ShardMark(index="", boot="", is_downloaded=True, files=())


def write(path: str, mark: ShardMark) -> None:
    """Write a mark. If nothing can be written, the next process checks the shard again."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_writer(path, fsync=False) as file:
            file.write(json.dumps(asdict(mark)).encode())


def identity(path: str) -> tuple[int, ...]:
    """Return values that change when a file is written, replaced, or renamed. Empty if the file is missing."""
    try:
        found: Any = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def crc32(path: str) -> str:
    """Return the CRC32 of a file: the checksum if no hash of the index is requested."""
    checksum = 0
    block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:num_bytes], checksum)
    return f"{checksum:08x}"


@contextlib.contextmanager
def temporary_for(path: str) -> Iterator[str]:
    """Yield a temporary path beside a path, to be written and then moved to the path. A leftover file is removed.

    Args:
        path: The final path of the file, in an existing directory.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, temporary_name(name))
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def sweep(directory: str) -> None:
    """Remove the files that dead processes were writing in a directory.

    A file that does not change for an hour goes too: its writer is on another host, or its process id came again. If
    the writer lives, it repeats its download, and nothing else can go wrong.

    Args:
        directory: The directory of the cache. Subfolders are not checked.
    """
    with contextlib.suppress(OSError):
        temporary = [name for name in os.listdir(directory) if target_name(name) is not None]
        dead = {name for name, _ in leftovers(temporary)}
        for name in temporary:
            path = os.path.join(directory, name)
            if name in dead or (not is_of_this_process(name) and is_unchanged_for_long(path)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
