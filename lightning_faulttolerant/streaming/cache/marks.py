"""What this machine knows of a shard in its cache without reading it, and when that may be believed.

A file is believed unread if it is the very file that was checked: its inode, size and times are those of its mark, and
the machine has not been started again since, for a file that was written shortly before a power loss may have lost
its content and nothing else. Else its content is compared with the checksum of the mark. A mark is there before the
file is: what has none was not brought here by us.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_faulttolerant.streaming.cache.temporary import temporary_for

DIRECTORY = ".faulttolerant"
"""Where marks and locks are, in the directory of the cache."""
SUFFIX = ".mark"
CRC32 = "crc32"

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMark:
    """One file as it was when it was checked.

    Args:
        algorithm: Of the checksum.
        checksum: Of the whole file, hexadecimal.
        identity: Its inode, its size, and when its content and its entry were changed; nothing where it may be new.
    """

    algorithm: str
    checksum: str
    identity: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What was found when a shard was checked.

    Args:
        index: Digest of the index that it belongs to.
        boot: Which start of which machine it was checked in; empty where that can't be told.
        is_downloaded: Whether it was brought here, so that it may be evicted; False for one that was found here.
        files: In the order of the shard's.
    """

    index: str
    boot: str
    is_downloaded: bool
    files: tuple[FileMark, ...]

    def is_unchanged(self, paths: list[str]) -> bool:
        """Tell whether files are those that were checked, without reading them."""
        return bool(self.boot) and self.boot == this_boot() and [identity(path) for path in paths] == self._identities

    @property
    def _identities(self) -> list[tuple[int, ...]]:
        return [file.identity for file in self.files]


def path_of(directory: str, basename: str, suffix: str = SUFFIX) -> str:
    """Return where a shard's mark is, or what else is kept for it."""
    return os.path.join(directory, DIRECTORY, basename + suffix)


def read(path: str) -> Mark | None:
    """Return a mark; None if there is none. One that can't be understood is one of no index."""
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(content)
        files = tuple(FileMark(**{**file, "identity": tuple(file["identity"])}) for file in found.pop("files"))
        return Mark(**found, files=files)
    except (ValueError, TypeError, KeyError, AttributeError):  # lost with the power, perhaps with its shard
        return Mark(index="", boot="", is_downloaded=True, files=())


def write(path: str, mark: Mark) -> None:
    """Write a mark; where nothing can be written the shard is checked again by the next process."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with temporary_for(path) as temporary:
            Path(temporary).write_text(json.dumps(asdict(mark)), encoding="utf-8")
            os.replace(temporary, path)


def identity(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written, replaced or renamed; nothing where there is none."""
    try:
        found: Any = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def crc32(path: str) -> str:
    """Return the checksum of a file for which the index has no hash that is asked for."""
    checksum = 0
    block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:num_bytes], checksum)
    return f"{checksum:08x}"


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Return which start of which machine this is; empty where that can't be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""
