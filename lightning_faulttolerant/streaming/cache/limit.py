"""How much room the shards of a data set may take on this machine, for all its streams and processes together."""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple, Protocol, final

from lightning_faulttolerant.errors import CacheLimitError
from lightning_faulttolerant.streaming.cache import shard_files
from lightning_faulttolerant.streaming.cache.downloads import pause
from lightning_faulttolerant.streaming.cache.locks import FileLock, locked
from lightning_faulttolerant.streaming.cache.shard_files import CacheContents

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_LOCK_NAME = "eviction.lock"
_LOOK_SECONDS = 0.05
_STILL_SECONDS = 2.0
_NUM_LARGEST = 4  # as in the original: for reading, for prefetching, and room for other processes


class LimitedCache(Protocol):
    """The interface of one stream's cache that a limit needs."""

    directory: str

    def num_bytes_of(self, shard: int) -> int:
        """Return how much room a shard takes while it is fetched."""

    def contents(self) -> CacheContents:
        """Scan the directory."""

    def is_held(self, shard: int) -> bool:
        """Return whether this process is using a shard."""

    def evict(self, shard: int, last_use: int) -> int:
        """Remove a shard if that is allowed, and return the number of bytes freed."""


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
        self._caches: dict[str, LimitedCache] = {}
        self._largest = 0

    def add(self, cache: LimitedCache, num_shards: int) -> None:
        """Include a cache in the limit.

        Args:
            cache: The cache of one stream.
            num_shards: The number of shards in its index.
        """
        largest = max((cache.num_bytes_of(shard) for shard in range(num_shards)), default=0)
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

    def make_room(self, cache: LimitedCache, shard: int, lock: FileLock | None, *, timeout_seconds: float) -> None:
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
        directory = os.path.join(min(self._caches), shard_files.MARKS_DIRECTORY)
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
            contents = cache.contents()
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
            used -= caches[number].evict(shard, last_use)
        return _Room(used, held, announced)


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes.

    Args:
        size: The number, or a string: ``"67108864"``, ``"512kb"``, ``"10 GB"``, ``"1.5tb"``; 1 kB is 1,024 bytes.

    Raises:
        ValueError: If it is not a size, or not above 0.

    Example:
        >>> parse_bytes("1.5kb")
        1536
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)b?", size.strip().lower())
        num_bytes = int(float(match[1]) * 1024 ** _UNITS[match[2]]) if match else 0
    else:
        num_bytes = int(size) if not isinstance(size, bool) else 0
    if num_bytes <= 0:
        raise ValueError(f'{size!r} is not a size. Pass a number of bytes above 0, or a text such as "10gb".')
    return num_bytes
