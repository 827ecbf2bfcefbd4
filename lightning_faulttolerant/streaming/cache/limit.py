"""How much room the shards of a data set may take on this machine, all its streams and processes together."""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple, Protocol, final

from lightning_faulttolerant.errors import CacheLimitError
from lightning_faulttolerant.streaming.cache import marks
from lightning_faulttolerant.streaming.cache.kept import Contents
from lightning_faulttolerant.streaming.cache.locks import FileLock, locked
from lightning_faulttolerant.streaming.cache.patience import pause

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_LOCK_NAME = "eviction.lock"
_LOOK_SECONDS = 0.05
_STILL_SECONDS = 2.0
_NUM_LARGEST = 4  # as the original: what is read, what is fetched ahead, and room for other processes


class LimitedCache(Protocol):
    """What a limit needs of the cache of one stream."""

    directory: str

    def num_bytes_of(self, shard: int) -> int:
        """Return how much room a shard takes while it is fetched."""

    def contents(self) -> Contents:
        """Look through the directory."""

    def is_held(self, shard: int) -> bool:
        """Tell whether this process is using a shard."""

    def evict(self, shard: int, last_use: int) -> int:
        """Remove a shard if it may be; return how many bytes are free now."""


class _Room(NamedTuple):
    """How many bytes are taken, in all, by this process alone, and by what is being fetched."""

    used: int
    held: int
    announced: int


@final
class CacheLimit:
    """Evicts shards that were used least recently, so that all that is cached stays below a limit.

    It counts what lies in the cache directories of the streams, whoever fetched it. It never evicts what was not
    fetched (the only copy, perhaps), nor what this process is using. Streams without a remote don't count.

    Args:
        limit: In bytes: a number, or a text such as ``"10gb"`` (1 kB is 1,024 bytes).

    Raises:
        ValueError: If it is no size, or smaller than a shard that is added.
    """

    def __init__(self, limit: int | str) -> None:
        self.num_bytes = parse_bytes(limit)
        self._caches: dict[str, LimitedCache] = {}
        self._largest = 0

    def add(self, cache: LimitedCache, num_shards: int) -> None:
        """Let a cache count, too.

        Args:
            cache: Of one stream.
            num_shards: How many shards its index has.
        """
        largest = max((cache.num_bytes_of(shard) for shard in range(num_shards)), default=0)
        if largest > self.num_bytes:
            raise ValueError(
                f"cache_limit is {self.num_bytes} bytes, but the largest shard in {cache.directory} takes {largest} "
                "while it is fetched (with its compressed file). It could never be read. Give a larger cache_limit."
            )
        self._caches[os.path.realpath(cache.directory)] = cache
        self._largest = max(self._largest, largest)

    def check(self, index_bytes: int) -> None:
        """Raise ValueError if a run would soon find no room.

        Args:
            index_bytes: Of the indexes in the caches that count.
        """
        least = max(_NUM_LARGEST * self._largest, index_bytes + self._largest)
        if self.num_bytes < least:
            raise ValueError(
                f"cache_limit is {self.num_bytes} bytes, which is too low: the largest shard takes {self._largest} "
                f"while it is fetched, the indexes {index_bytes}, and there must be room for {_NUM_LARGEST} such "
                f"shards. Give at least {least}, and more if several processes read."
            )

    def make_room(self, cache: LimitedCache, shard: int, lock: FileLock | None, *, timeout_seconds: float) -> None:
        """Evict until a shard fits in, and tell all processes that it is about to come.

        Args:
            cache: Where it comes.
            shard: Its number.
            lock: Under which it is fetched; None if it could not be had.
            timeout_seconds: How long to wait for what other processes are fetching.

        Raises:
            CacheLimitError: If all that is there is in use, or may not be evicted.
        """
        num_bytes = cache.num_bytes_of(shard)
        begin = time.monotonic()
        directory = os.path.join(min(self._caches), marks.DIRECTORY)
        os.makedirs(directory, exist_ok=True)
        while True:
            with locked(os.path.join(directory, _LOCK_NAME), timeout_seconds):
                room = self._evict(num_bytes)
                if room.used + num_bytes <= self.num_bytes:
                    if lock is not None:
                        lock.announce(num_bytes)
                    return
            # What others are fetching can be evicted once it is there, and what was used just now, when others are.
            patience = timeout_seconds if room.announced else min(timeout_seconds, _STILL_SECONDS)
            if room.held + num_bytes > self.num_bytes or time.monotonic() - begin > patience:
                raise CacheLimitError(
                    f"cache_limit is {self.num_bytes} bytes. Of the {room.used} that are in use, this process is "
                    f"reading {room.held}, other processes are fetching {room.announced}, and the rest may not be "
                    f"evicted. The next shard takes {num_bytes}. Give a larger cache_limit, smaller shards, or a "
                    "shuffle that needs fewer at once."
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
        size: The number, or a text: ``"67108864"``, ``"512kb"``, ``"10 GB"``, ``"1.5tb"``; 1 kB is 1,024 bytes.

    Raises:
        ValueError: If it is none, or not above 0.

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
        raise ValueError(f'{size!r} is no size. Give a number of bytes above 0, or a text such as "10gb".')
    return num_bytes
