"""The shards in a cache directory: which are complete, when each was used, and how much room they take.

A mark is this machine's record of a shard. A file is trusted unread if it is the same file that was checked: its inode,
size, and times are those of its mark, and the machine has not been restarted since. A restart matters because a file
written shortly before a power loss may have lost its content and nothing else. Otherwise its content is compared with
the checksum of the mark. A mark is written before its file, so a file without a mark was not fetched by this package.

Files that are being written have temporary names. Those of dead processes are removed.

The shards in a cache directory: which of them are complete, when each was used, and how much room they take.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.processes import this_boot
from lightning_faulttolerant.storage.local import (
    atomic_writer,
    is_of_this_process,
    is_unchanged_for_long,
    leftovers,
    target_name,
    temporary_name,
)
from lightning_faulttolerant.streaming.cache.locks import is_abandoned, locked
from lightning_faulttolerant.streaming.format.index import ShardFile, ShardInfo, digest

MARKS_DIRECTORY = ".faulttolerant"
"""The folder of marks and locks, in the directory of the cache."""
MARK_SUFFIX = ".mark"
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
        return (
            bool(self.boot) and self.boot == this_boot() and [file_identity(path) for path in paths] == self._identities
        )

    @property
    def _identities(self) -> list[tuple[int, ...]]:
        return [file.identity for file in self.files]


def mark_path(directory: str, basename: str, suffix: str = MARK_SUFFIX) -> str:
    """Return the path of a shard's mark, or of another file that is kept for it."""
    return os.path.join(directory, MARKS_DIRECTORY, basename + suffix)


def read_mark(path: str) -> ShardMark | None:
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


def write_mark(path: str, mark: ShardMark) -> None:
    """Write a mark. If nothing can be written, the next process checks the shard again."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_writer(path, fsync=False) as file:
            file.write(json.dumps(asdict(mark)).encode())


def file_identity(path: str) -> tuple[int, ...]:
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
    """Yield a temporary path next to a path, to be written and then moved to the path. A leftover file is removed.

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


def remove_leftovers(directory: str) -> None:
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


LOCK_SUFFIX = ".lock"
OTHER_INDEX = "index-"
"""The prefix of a folder that holds the shards of another index."""

_OTHER_INDEX = re.compile(re.escape(OTHER_INDEX) + r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheContents:
    """The contents of a cache directory, for all data sets and processes together.

    Args:
        num_bytes: The size of all files of shards.
        num_announced: The bytes that are about to come, or have just come.
        last_uses: When each shard was used last (ns), by its number.
    """

    num_bytes: int
    num_announced: int
    last_uses: dict[int, int]


@final
class KeptShards:
    """The files of the shards of one index in one directory.

    Args:
        directory: The directory of the files.
        shards: The index entries of the shards.
        index_digest: The digest of the index. Files kept for another index are not used.
        validate_hash: The algorithm that compares contents with the index. None compares sizes.
        is_marked: Whether marks of the shards may be written to disk.
    """

    def __init__(
        self,
        directory: str,
        shards: Sequence[ShardInfo],
        *,
        index_digest: str,
        validate_hash: str | None,
        is_marked: bool,
    ) -> None:
        self.directory = directory
        self.shards = shards
        self._index_digest = index_digest
        self._validate_hash = validate_hash
        self._is_marked = is_marked
        self._numbers: dict[str, int] = {}

    def path(self, file: ShardFile) -> str:
        """Return the path of a file."""
        return os.path.join(self.directory, file.basename)

    def lock_path(self, shard: int) -> str:
        """Return the path of the lock for fetching or evicting a shard. Create its directory."""
        path = mark_path(self.directory, self.shards[shard].files[0].basename, LOCK_SUFFIX)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def sweep(self) -> None:
        """Remove the leftovers of dead processes."""
        for folder in sorted({os.path.dirname(info.files[0].basename) for info in self.shards}):
            remove_leftovers(os.path.join(self.directory, folder))
            own = os.path.join(self.directory, MARKS_DIRECTORY, folder)
            remove_leftovers(own)
            for path in glob.glob(os.path.join(glob.escape(own), "*" + LOCK_SUFFIX)):
                is_abandoned(path)

    def is_there(self, shard: int) -> bool:
        """Return whether a shard that was complete still exists."""
        return os.path.exists(self.path(self.shards[shard].files[0]))

    def fault(self, shard: int) -> str | None:
        """Return the fault of a shard, or None. Read the shard if it may have changed since its last check."""
        try:
            return self._fault(shard)
        except FileNotFoundError:  # evicted by another process during the read
            return f"{self.shards[shard].files[0].basename}: it no longer exists"

    def _fault(self, shard: int) -> str | None:
        files = self.shards[shard].files
        for file in files:
            if fault := size_fault(self.path(file), file.num_bytes):
                return f"{file.basename}: {fault}"
        mark = read_mark(self._mark_path(shard)) if self._is_marked else None
        if mark is not None and (mark.index != self._index_digest or len(mark.files) != len(files)):
            return f"{files[0].basename} belongs to another index"
        if mark is not None and self._is_checked_as_asked(mark) and mark.is_unchanged(self._paths(shard)):
            return None
        for number, file in enumerate(files):
            if self._validate_hash is not None:
                fault = hash_fault(self.path(file), file, self._validate_hash)
            else:
                fault = None if mark is None else _mark_fault(self.path(file), mark.files[number])
            if fault:
                return f"{file.basename}: {fault}"
        if self._is_marked:  # else nothing would use the checksums, which take as long as reading the whole shard
            checksums = self._checksums(shard, self._paths(shard))
            self._mark(shard, checksums, is_downloaded=bool(mark and mark.is_downloaded))
        return None

    def publish(self, shard: int, temporaries: Sequence[str]) -> None:
        """Give the files of a shard their final names, so every process may use it.

        Args:
            shard: Its number.
            temporaries: The checked files, in the order of the shard's files.

        Raises:
            OSError: If a file is gone, or can't be moved.
        """
        checksums = self._checksums(shard, temporaries) if self._is_marked else ()
        # Before and after: between the two, and after a power loss, the checksum shows whether the file is complete.
        self._mark(shard, checksums, is_downloaded=True, is_new=True)
        for file, temporary in zip(self.shards[shard].files, temporaries, strict=True):
            publish(temporary, self.path(file), is_durable=not self._is_marked)
        self._mark(shard, checksums, is_downloaded=True)

    def remove(self, shard: int) -> int:
        """Remove all files of a shard and return the number of bytes freed."""
        info = self.shards[shard]
        num_bytes = sum(_remove(self.path(file)) for file in (*info.files, *info.zip_files))
        _remove(self._mark_path(shard))  # last: a shard without a mark counts as found, and is never evicted
        return num_bytes

    def is_of_this_index(self, shard: int) -> bool:
        """Return whether the kept files of a shard belong to this index, as far as is known."""
        mark = read_mark(self._mark_path(shard))
        return mark is None or mark.index == self._index_digest

    def touch(self, shard: int) -> None:
        """Record that a shard is used now."""
        with contextlib.suppress(OSError):
            now = time.time_ns()  # the file system's clock ticks too slowly
            os.utime(self._mark_path(shard), ns=(now, now))

    def contents(self) -> CacheContents:
        """Scan the directory."""
        num_bytes, num_announced, last_uses = 0, 0, {}
        if not self._numbers:
            self._numbers.update((info.files[0].basename, number) for number, info in enumerate(self.shards))
        # Read announced bytes before existing ones: a shard that has just been fetched then counts in one, or in both.
        for entry, basename in _files(os.path.join(self.directory, MARKS_DIRECTORY), ""):
            with contextlib.suppress(FileNotFoundError):
                number = self._numbers.get(basename.removesuffix(MARK_SUFFIX))
                if number is not None and basename.endswith(MARK_SUFFIX):
                    last_uses[number] = entry.stat().st_mtime_ns
                elif basename.endswith(LOCK_SUFFIX) and entry.stat().st_size and not is_abandoned(entry.path):
                    num_announced += entry.stat().st_size
        for entry, name in _files(self.directory, ""):
            with contextlib.suppress(FileNotFoundError):
                # Temporary files are counted through their locks.
                if not name.startswith(MARKS_DIRECTORY + "/") and target_name(entry.name) is None:
                    num_bytes += entry.stat().st_size
        return CacheContents(num_bytes=num_bytes, num_announced=num_announced, last_uses=last_uses)

    def evict(self, shard: int, last_use: int) -> int:
        """Remove a fetched shard, unless it was used since or is being fetched.

        Args:
            shard: Its number.
            last_use: When it was used last, as far as the caller knows.

        Returns:
            The number of bytes freed; 0 if it was kept.
        """
        path = self._mark_path(shard)
        with locked(self.lock_path(shard), 0) as lock:
            mark = read_mark(path)
            if lock is None or mark is None or not mark.is_downloaded or _last_use(path) != last_use:
                return 0
            return self.remove(shard)

    def discard(self, shard: int, *, timeout_seconds: float) -> None:
        """Remove a shard, no matter which process fetched or used it.

        Args:
            shard: Its number.
            timeout_seconds: How long to wait for a process that is fetching it.
        """
        with locked(self.lock_path(shard), timeout_seconds):
            self.remove(shard)

    def is_being_fetched(self, shard: int) -> bool:
        """Return whether another process is fetching or evicting a shard."""
        with locked(self.lock_path(shard), 0) as lock:
            return lock is None

    def _paths(self, shard: int) -> list[str]:
        return [self.path(file) for file in self.shards[shard].files]

    def _mark_path(self, shard: int) -> str:
        return mark_path(self.directory, self.shards[shard].files[0].basename)

    def _is_checked_as_asked(self, mark: ShardMark) -> bool:
        return self._validate_hash is None or all(file.algorithm == self._validate_hash for file in mark.files)

    def _checksums(self, shard: int, paths: Sequence[str]) -> tuple[str, ...]:
        if self._validate_hash is not None:
            return tuple(file.hashes[self._validate_hash] for file in self.shards[shard].files)
        return tuple(crc32(path) for path in paths)

    def _mark(self, shard: int, checksums: Sequence[str], *, is_downloaded: bool, is_new: bool = False) -> None:
        if not self._is_marked:
            return
        files = tuple(
            FileMark(
                algorithm=self._validate_hash or CRC32,
                checksum=checksum,
                identity=() if is_new else file_identity(path),
            )
            for checksum, path in zip(checksums, self._paths(shard), strict=True)
        )
        mark = ShardMark(index=self._index_digest, boot=this_boot(), is_downloaded=is_downloaded, files=files)
        write_mark(self._mark_path(shard), mark)
        self.touch(shard)


def publish(temporary: str, path: str, *, is_durable: bool = False) -> None:
    """Give a complete file its final name, in one step.

    Args:
        temporary: Its temporary name.
        path: Its final name.
        is_durable: Whether it must be complete after a power loss, because no check would detect a fault.
    """
    if is_durable:
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    try:
        os.replace(temporary, path)
    except FileNotFoundError as error:
        # Not FileNotFoundError, which means a missing shard: a sweep in another container took this process for dead.
        raise OSError(f"{temporary} was removed before it was complete") from error


def size_fault(path: str, num_bytes: int) -> str | None:
    """Return the fault in a file's size, or None if it is correct."""
    try:
        found = os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return "it does not exist"
    return None if found == num_bytes else f"it has {found} bytes, but the index says {num_bytes}"


def hash_fault(path: str, file: ShardFile, algorithm: str) -> str | None:
    """Return the fault in a file's hash, or None if it is correct."""
    found, expected = _digest(path, algorithm), file.hashes[algorithm]
    return None if found == expected else f"its {algorithm} is {found}, but the index says {expected}"


def _mark_fault(path: str, mark: FileMark) -> str | None:
    found = _digest(path, mark.algorithm)
    return None if found == mark.checksum else f"its {mark.algorithm} is {found}, but was {mark.checksum}"


def _digest(path: str, algorithm: str) -> str:
    if algorithm == CRC32:
        return crc32(path)
    return digest(path, algorithm)


def _files(directory: str, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file():
                yield entry, prefix + entry.name
            elif entry.is_dir() and not _OTHER_INDEX.fullmatch(entry.name):
                yield from _files(entry.path, f"{prefix}{entry.name}/")


def _last_use(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return -1


def _remove(path: str) -> int:
    try:
        num_bytes = os.stat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return num_bytes
