"""The shards in a cache directory: which are complete, when each was used, and how much room they may take.

The limit counts all streams of a data set and all processes of this machine together.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from lightning_faulttolerant.errors import CacheLimitError
from lightning_faulttolerant.processes import this_boot
from lightning_faulttolerant.storage.local import target_name
from lightning_faulttolerant.storage.lock import FileLock
from lightning_faulttolerant.storage.store import parse_bytes
from lightning_faulttolerant.streaming.cache.checksums import (
    CRC32,
    crc32,
    hash_fault,
    mark_fault,
    seal,
    size_fault,
    trusts_unsealed,
)
from lightning_faulttolerant.streaming.cache.directory import (
    LOCK_SUFFIX,
    MARK_SUFFIX,
    MARKS_DIRECTORY,
    OTHER_INDEX,
    FileMark,
    ShardMark,
    file_identity,
    is_abandoned,
    last_use_of,
    locked,
    mark_path,
    read_mark,
    remove_leftovers,
    write_mark,
)
from lightning_faulttolerant.streaming.cache.downloads import pause
from lightning_faulttolerant.streaming.format.index import ShardFile, ShardInfo

if TYPE_CHECKING:
    from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache

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
        version: Returns what the store says of a shard's files; None if it can't be asked.
    """

    def __init__(
        self,
        directory: str,
        shards: Sequence[ShardInfo],
        *,
        index_digest: str,
        validate_hash: str | None,
        is_marked: bool,
        version: Callable[[int], str | None],
    ) -> None:
        self.directory = directory
        self.shards = shards
        self._index_digest = index_digest
        self._validate_hash = validate_hash
        self._is_marked = is_marked
        self._version = version
        self._numbers: dict[str, int] = {}
        self._seals_later = False

    def path(self, file: ShardFile) -> str:
        """Return the path of a file."""
        return os.path.join(self.directory, file.basename)

    def lock_path(self, shard: int) -> str:
        """Return the path of the lock for fetching or evicting a shard. Create its directory."""
        path = mark_path(self.directory, self.shards[shard].files[0].basename, LOCK_SUFFIX)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def prepare(self) -> None:
        """Create the directory, remove the leftovers of dead processes, and find out whether machines may share it.

        Each process calls it before its first fetch.
        """
        os.makedirs(self.directory, exist_ok=True)
        self._seals_later = trusts_unsealed(self.directory)
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
        if mark is not None and self._is_stale(shard, mark):
            return f"{files[0].basename} was written again since it was fetched"
        if mark is not None and self._is_checked_as_asked(mark) and mark.is_unchanged(self._paths(shard)):
            return None
        for number, file in enumerate(files):
            if self._validate_hash is not None:
                fault = hash_fault(self.path(file), file, self._validate_hash)
            else:
                fault = None if mark is None else mark_fault(self.path(file), mark.files[number])
            if fault:
                return f"{file.basename}: {fault}"
        if self._is_marked:  # else nothing would use the checksums, which take as long as reading the whole shard
            checksums = self._checksums(shard, self._paths(shard))
            version = (self._version(shard) or "") if mark is None else mark.version
            self._mark(shard, checksums, version=version, is_downloaded=bool(mark and mark.is_downloaded))
        return None

    def publish(self, shard: int, temporaries: Sequence[str], *, version: str, is_sealed: bool = True) -> None:
        """Give the files of a shard their final names, so every process may use it.

        Args:
            shard: Its number.
            temporaries: The checked files, in the order of the shard's files.
            version: What the store said of them before they were fetched.
            is_sealed: Whether to compute their checksums now; otherwise `seal` does so later, if all processes that use
                the directory trust the files until then.

        Raises:
            OSError: If a file is gone, or can't be moved.
        """
        checksums: tuple[str, ...] = ()
        if self._is_marked:
            is_later = not is_sealed and self._seals_later and self._validate_hash is None  # else the index has them
            checksums = ("",) * len(temporaries) if is_later else self._checksums(shard, temporaries)
        # Before and after: between the two, and after a power loss, the checksum shows whether the file is complete.
        self._mark(shard, checksums, version=version, is_downloaded=True, is_new=True)
        for file, temporary in zip(self.shards[shard].files, temporaries, strict=True):
            publish(temporary, self.path(file), is_durable=not self._is_marked)
        self._mark(shard, checksums, version=version, is_downloaded=True)

    def seal(self, shard: int, *, is_wanted: Callable[[], bool]) -> bool:
        """Add the missing checksums of a fetched shard to its mark, unless it was fetched again or evicted since.

        Args:
            shard: Its number.
            is_wanted: Called often meanwhile. If it returns False, the mark stays as it is.

        Returns:
            False if the checksums are not wanted now and still missing.
        """
        return seal(self._mark_path(shard), self._paths(shard), self.lock_path(shard), is_wanted=is_wanted)

    def remove(self, shard: int) -> int:
        """Remove all files of a shard and return the number of bytes freed."""
        info = self.shards[shard]
        num_bytes = sum(_remove(self.path(file)) for file in (*info.files, *info.zip_files))
        _remove(self._mark_path(shard))  # last: a shard without a mark counts as found, and is never evicted
        return num_bytes

    def is_current(self, shard: int) -> bool:
        """Return whether the kept files of a shard belong to this index and are the store's, as far as is known."""
        mark = read_mark(self._mark_path(shard))
        return mark is None or (mark.index == self._index_digest and not self._is_stale(shard, mark))

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
            if lock is None or mark is None or not mark.is_downloaded or last_use_of(path) != last_use:
                return 0
            return self.remove(shard)

    def _paths(self, shard: int) -> list[str]:
        return [self.path(file) for file in self.shards[shard].files]

    def _mark_path(self, shard: int) -> str:
        return mark_path(self.directory, self.shards[shard].files[0].basename)

    def _is_stale(self, shard: int, mark: ShardMark) -> bool:
        version = self._version(shard) if self._validate_hash is None else None  # the index has the hashes
        return version is not None and version != mark.version

    def _is_checked_as_asked(self, mark: ShardMark) -> bool:
        return self._validate_hash is None or all(file.algorithm == self._validate_hash for file in mark.files)

    def _checksums(self, shard: int, paths: Sequence[str]) -> tuple[str, ...]:
        if self._validate_hash is not None:
            return tuple(file.hashes[self._validate_hash] for file in self.shards[shard].files)
        return tuple(crc32(path) for path in paths)

    def _mark(
        self, shard: int, checksums: Sequence[str], *, version: str, is_downloaded: bool, is_new: bool = False
    ) -> None:
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
        mark = ShardMark(
            index=self._index_digest, boot=this_boot(), is_downloaded=is_downloaded, files=files, version=version
        )
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


def _files(directory: str, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file():
                yield entry, prefix + entry.name
            elif entry.is_dir() and not _OTHER_INDEX.fullmatch(entry.name):
                yield from _files(entry.path, f"{prefix}{entry.name}/")


def _remove(path: str) -> int:
    try:
        num_bytes = os.stat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return num_bytes


_LOCK_NAME = "eviction.lock"
_LOOK_SECONDS = 0.05
_STILL_SECONDS = 2.0
_NUM_LARGEST = 4  # as in the original: for reading, for prefetching, and room for other processes


class _Room(NamedTuple):
    """The bytes in use: in all, by this process alone, and by fetches in progress."""

    used: int
    held: int
    announced: int


@final
class CacheLimit:
    """Evicts the least recently used shards, to keep all cached files below a limit.

    It counts the files in the cache directories of the streams, whichever process fetched them. It never evicts files
    that were not fetched (perhaps the only copy), nor files that this process uses. Streams without a remote don't
    count.

    Args:
        limit: In bytes: a number, or a string such as ``"10gb"`` (1 kB is 1,024 bytes).

    Raises:
        ValueError: If it is not a size, or smaller than a shard that is added.
    """

    def __init__(self, limit: int | str) -> None:
        self.num_bytes = parse_bytes(limit)
        self._caches: dict[str, ShardCache] = {}
        self._largest = 0

    def add(self, cache: ShardCache) -> None:
        """Include the cache of one stream in the limit."""
        largest = max(map(cache.num_bytes_of, range(len(cache.shards))), default=0)
        if largest > self.num_bytes:
            raise ValueError(
                f"cache_limit is {self.num_bytes} bytes, but the largest shard in {cache.directory} takes {largest} "
                "while it is fetched (with its compressed file). It could never be read. Pass a larger cache_limit."
            )
        self._caches[os.path.realpath(cache.directory)] = cache
        self._largest = max(self._largest, largest)

    def check(self, index_bytes: int) -> None:
        """Raise ValueError if a run would soon find no room.

        Args:
            index_bytes: The size of the indexes in the caches that count.
        """
        least = max(_NUM_LARGEST * self._largest, index_bytes + self._largest)
        if self.num_bytes < least:
            raise ValueError(
                f"cache_limit is {self.num_bytes} bytes, which is too low: the largest shard takes {self._largest} "
                f"while it is fetched, the indexes {index_bytes}, and the limit needs room for {_NUM_LARGEST} such "
                f"shards. Pass at least {least}, and more if several processes read."
            )

    def make_room(self, cache: ShardCache, shard: int, lock: FileLock | None, *, timeout_seconds: float) -> None:
        """Evict until a shard fits, and announce the shard to all processes.

        Args:
            cache: The shard's cache.
            shard: Its number.
            lock: The lock of the fetch; None if it could not be taken.
            timeout_seconds: How long to wait for fetches of other processes.

        Raises:
            CacheLimitError: If all existing shards are in use, or may not be evicted.
        """
        num_bytes = cache.num_bytes_of(shard)
        begin = time.monotonic()
        directory = os.path.join(min(self._caches), MARKS_DIRECTORY)
        os.makedirs(directory, exist_ok=True)
        while True:
            with locked(os.path.join(directory, _LOCK_NAME), timeout_seconds):
                room = self._evict(num_bytes)
                if room.used + num_bytes <= self.num_bytes:
                    if lock is not None:
                        lock.announce(num_bytes)
                    return
            # Other processes' fetches can be evicted once they are complete. So can a shard used just now, once another
            # one is used.
            patience = timeout_seconds if room.announced else min(timeout_seconds, _STILL_SECONDS)
            if room.held + num_bytes > self.num_bytes or time.monotonic() - begin > patience:
                raise CacheLimitError(
                    f"cache_limit is {self.num_bytes} bytes. Of the {room.used} that are in use, this process is "
                    f"reading {room.held}, other processes are fetching {room.announced}, and the rest may not be "
                    f"evicted. The next shard takes {num_bytes}. Pass a larger cache_limit, or use smaller shards, or "
                    "a shuffle that needs fewer shards at a time."
                )
            pause(_LOOK_SECONDS)

    def _evict(self, num_bytes: int) -> _Room:
        used, held, announced, candidates = 0, 0, 0, []
        caches = list(self._caches.values())
        for number, cache in enumerate(caches):
            contents = cache.kept.contents()
            announced += contents.num_announced
            used += contents.num_bytes + contents.num_announced
            for shard, last_use in contents.last_uses.items():
                if cache.is_held(shard):
                    held += cache.num_bytes_of(shard)
                else:
                    candidates.append((last_use, number, shard))
        for last_use, number, shard in sorted(candidates):
            if used + num_bytes <= self.num_bytes:
                break
            used -= caches[number].kept.evict(shard, last_use)
        return _Room(used, held, announced)
