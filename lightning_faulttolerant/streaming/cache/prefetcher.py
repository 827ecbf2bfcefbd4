"""Fetches shards before they are needed, in the background of the process that will read them.

It only warms the cache: a reader that needs a missing shard fetches it itself. So nothing can be missed, and nothing
waits for a thread that is gone.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, final

from lightning_faulttolerant.errors import CacheLimitError
from lightning_faulttolerant.streaming.cache.downloads import StoppedError, stoppable
from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache

# From a server that takes 20 ms to answer, two threads get 1.7 times as many 1 MiB shards as one, four 3.1 times. But
# copies from a local disk only wait for each other's Python: with four threads, a first batch from eight such shards
# comes after 28 ms, and with one after 20 ms.
_NUM_THREADS = 4
_LOOK_SECONDS = 1.0
_ROOM_SECONDS = 0.05
_JOIN_SECONDS = 5.0
_SEAL_SECONDS = 1.0

Key = tuple[int, int]


class Need(NamedTuple):
    """A shard that will be needed.

    Args:
        position: The position of the first sample that needs it, in the reading order of this process.
        stream: The number of its cache.
        shard: Its number in the index of that stream.
    """

    position: int
    stream: int
    shard: int


@final
class Prefetcher:
    """Fetches the shards of a plan ahead of its reader. It has no threads if no stream has a remote.

    Its threads end with ``close``, when it is garbage-collected, and when the parent of this process is gone. In a
    forked child it has no threads, and fetches on request.

    Args:
        caches: The cache of each stream.
        upcoming: The needs, in order. It is iterated in the background.
        predownload: How many samples ahead of the reader's position shards are fetched.
        first: The position up to which samples are read immediately. Shards needed after it are fetched once the reader
            is there, and so are the checksums of the shards before it: nothing delays the first batch.

    Example::

        with Prefetcher(caches, needs(), predownload=1000) as prefetcher:
            for position, (stream, shard, sample) in enumerate(plan):
                prefetcher.advance(position)
                if (stream, shard) not in readers:
                    prefetcher.wait(stream, shard)
                    readers[stream, shard] = caches[stream].open(shard, opener)
    """

    def __init__(
        self,
        caches: Sequence[ShardCache],
        upcoming: Iterator[Need],
        *,
        predownload: int,
        first: int = 0,
    ) -> None:
        self._caches = caches
        self._process_id = os.getpid()
        limits = [cache.limit.num_bytes for cache in caches if cache.limit is not None]
        self._work = _Work(caches, upcoming, predownload, min(limits) // 2 if limits else None, first)
        self._threads: list[threading.Thread] = []
        if any(cache.has_remote for cache in caches):
            # With a limit, fetch one after the other: a later need must not take the room of an earlier one.
            is_single = bool(limits) or not any(cache.gains_from_threads for cache in caches)
            num_threads = 1 if is_single else _NUM_THREADS
            self._threads = [
                threading.Thread(target=self._work.run, name="shard-prefetch", daemon=True) for _ in range(num_threads)
            ]
        self._finalizer = weakref.finalize(self, _stop, self._work, os.getpid())
        for thread in self._threads:
            thread.start()

    def advance(self, position: int) -> None:
        """Set the reader's position. This is cheap enough to be called for each sample.

        Args:
            position: The position of the next sample to be read.
        """
        self._work.position = position
        if position >= self._work.resume_at and self._process_id == os.getpid():
            self._work.wake()

    def wait(self, stream: int, shard: int) -> str:
        """Return the directory of a shard once it is available.

        Args:
            stream: The number of its cache.
            shard: Its number in the index of that stream.

        Raises:
            ShardError: The error of this shard, in the background or now.
        """
        cache = self._caches[stream]
        if self._process_id != os.getpid():
            return cache.fetch(shard)
        error = self._work.error_of((stream, shard))
        if error is not None:
            raise error
        try:
            return self._work.brought(cache, shard)
        except CacheLimitError:
            with self._work.making_way():  # a current need goes before future ones
                return self._work.brought(cache, shard)
        finally:
            self._work.let_go((stream, shard))

    def close(self) -> None:
        """End the threads and give up their fetches. Checksums that had to wait are then computed, for up to 1 s."""
        self._end_threads()
        if self._process_id == os.getpid():
            self._work.seal_rest()

    def _end_threads(self) -> None:
        self._finalizer()
        if self._process_id == os.getpid():
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # GeneratorExit: the generator that reads may just be garbage-collected, and nothing may wait for that.
        if kind is None or issubclass(kind, Exception):
            self.close()
        else:
            self._end_threads()


@final
class _HeldShards:
    """The shards that were fetched ahead. Their caches do not evict them before the reader has passed them.

    Args:
        caches: The caches of all streams.
        max_bytes: How much may be held; ``None``: no limit.
    """

    def __init__(self, caches: Sequence[ShardCache], max_bytes: int | None) -> None:
        self._caches = caches
        self._max_bytes = max_bytes
        self._positions: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._positions

    def hold(self, need: Need) -> ShardCache:
        """Hold a shard, and return its cache."""
        cache = self._caches[need.stream]
        cache.hold(need.shard)
        self._positions[need.stream, need.shard] = need.position
        return cache

    def release(self, key: Key) -> None:
        """Release a shard, if it is held."""
        if self._positions.pop(key, None) is not None:
            self._caches[key[0]].release(key[1])

    def release_passed(self, position: float) -> None:
        """Release the shards that a reader at `position` has passed: if it did not wait for one, it has it open."""
        for key in [key for key, needed in self._positions.items() if needed < position]:
            self.release(key)

    def has_room(self, need: Need) -> bool:
        """Return whether one more shard may be held. The first one always may."""
        if self._max_bytes is None or not self._positions:
            return True
        held = sum(self._caches[stream].num_bytes_of(shard) for stream, shard in self._positions)
        return held + self._caches[need.stream].num_bytes_of(need.shard) <= self._max_bytes


@final
class _UnsealedShards:
    """The shards whose checksums have to wait for the first batch."""

    def __init__(self) -> None:
        self._shards: deque[tuple[ShardCache, int]] = deque()
        # A shard is there twice if its reader waited for it. Two threads would read it twice.
        self._lock = threading.Lock()

    def add(self, cache: ShardCache, shard: int) -> None:
        """Add a shard, which may have its checksum."""
        self._shards.append((cache, shard))

    def seal_one(self, *, is_wanted: Callable[[], bool]) -> bool:
        """Add the checksums of one shard. Return False if there is none, or if another thread is adding those of one.

        Args:
            is_wanted: Called often meanwhile. If it returns False, the shard stays.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._shards or not is_wanted():
                return False
            cache, shard = self._shards[0]
            is_done = cache.seal(shard, is_wanted=is_wanted)
            if is_done:
                self._shards.popleft()
            return is_done
        finally:
            self._lock.release()


@final
class _Work:
    """The state that the threads share. They must not refer to their Prefetcher, or it would never be garbage."""

    def __init__(
        self,
        caches: Sequence[ShardCache],
        upcoming: Iterator[Need],
        predownload: int,
        max_bytes: int | None,
        first: int,
    ) -> None:
        self.position = 0
        self.resume_at = 0
        self.stop = threading.Event()
        self._upcoming, self._upcoming_lock = iter(upcoming), threading.Lock()
        self._plan_error: Exception | None = None
        self._held = _HeldShards(caches, max_bytes)
        self._predownload = predownload
        self._first = first
        self._changed = threading.Condition()
        self._wanted: Key | None = None
        self._makes_way = False
        self._in_flight: set[Key] = set()
        self._errors: dict[Key, Exception] = {}
        self._unsealed = _UnsealedShards()

    def run(self) -> None:
        """Fetch until nothing is left; runs in a thread."""
        try:
            with stoppable(self.stop):
                while (need := self._next()) is not None:
                    self._fetch(need)
                    self._seal_one()
                self._wait_for_first()
                while self._seal_one():  # another thread that adds one now gets here too
                    pass
        except StoppedError:
            pass

    def brought(self, cache: ShardCache, shard: int) -> str:
        """Return the directory of a shard that is fetched if it is missing, without its checksum for a first batch."""
        if self.position >= self._first:
            return cache.fetch(shard)
        directory = cache.fetch(shard, is_sealed=False)
        self._unsealed.add(cache, shard)
        return directory

    def seal_rest(self) -> None:
        """Add the checksums that are still missing, for up to a second."""
        deadline = time.monotonic() + _SEAL_SECONDS
        while self._unsealed.seal_one(is_wanted=lambda: time.monotonic() < deadline):
            pass

    def wake(self) -> None:
        """Let the threads check the reader's position."""
        with self._changed:
            self._changed.notify_all()

    def error_of(self, key: Key) -> Exception | None:
        """Return the error of a shard, once no thread is fetching it. Each error is returned once."""
        with self._changed:
            self._wanted = key
            while key in self._in_flight and not self.stop.is_set():
                self._changed.notify_all()
                self._changed.wait(_LOOK_SECONDS)
            self._wanted = None
            error, self._plan_error = self._plan_error, None
            return self._errors.pop(key, None) or error

    def let_go(self, key: Key) -> None:
        """Release a shard that was fetched ahead."""
        with self._changed:
            self._held.release(key)
            self._changed.notify_all()

    @contextlib.contextmanager
    def making_way(self) -> Iterator[None]:
        """Release all shards that were fetched ahead, and start no new fetches in the block."""
        with self._changed:
            self._makes_way = True
            self._held.release_passed(math.inf)
        try:
            yield
        finally:
            with self._changed:
                self._makes_way = False
                self._changed.notify_all()

    def _next(self) -> Need | None:
        with self._upcoming_lock:
            if self.stop.is_set():
                return None
            try:
                need = next(self._upcoming, None)
            except Exception as error:  # noqa: BLE001 - raised in the reader
                self._plan_error = error
                return None
            if need is not None:
                self._wait_for_turn(need)
            return None if need is None or self.stop.is_set() else need

    def _wait_for_turn(self, need: Need) -> None:
        with self._changed:
            ahead = need.position - self._predownload
            self.resume_at = ahead if need.position < self._first else max(ahead, self._first)
            while (self.position < self.resume_at or not self._held.has_room(need)) and not self.stop.is_set():
                self._changed.wait(_LOOK_SECONDS if self.position < self.resume_at else _ROOM_SECONDS)
                if _is_orphan():
                    self.stop.set()
                self._held.release_passed(self.position)
            self._held.release_passed(self.position)

    def _wait_for_first(self) -> None:
        with self._changed:
            self.resume_at = self._first
            while self.position < self._first and not self.stop.is_set():
                self._changed.wait(_LOOK_SECONDS)
                if _is_orphan():
                    self.stop.set()

    def _seal_one(self) -> bool:
        """Add one of the checksums that had to wait for the first batch. Return whether there was one."""
        if self.position < self._first or self.stop.is_set():
            return False
        return self._unsealed.seal_one(is_wanted=lambda: not self.stop.is_set())

    def _fetch(self, need: Need) -> None:
        key = need.stream, need.shard
        with self._changed:
            while self._makes_way and not self.stop.is_set():
                self._changed.wait(_LOOK_SECONDS)
            if need.position < self.position or key in self._in_flight or key in self._held:
                return  # a reader that passed it has had it: another fetch would evict shards that are still needed
            self._in_flight.add(key)
            cache = self._held.hold(need)
        try:
            while not self._fetched(cache, key):
                pass
        finally:
            with self._changed:
                self._in_flight.discard(key)
                self._changed.notify_all()

    def _fetched(self, cache: ShardCache, key: Key) -> bool:
        try:
            self.brought(cache, key[1])
        except CacheLimitError:
            with self._changed:
                if self._wanted != key and not self.stop.is_set():
                    self._changed.wait(_ROOM_SECONDS)
                    self._held.release_passed(self.position)
                    return False  # room may become free once the reader has advanced
                self._held.release(key)  # the reader goes first, and raises if there is no room
        except Exception as error:  # noqa: BLE001 - raised in the reader, at this shard
            with self._changed:
                self._errors[key] = error
                self._held.release(key)
        return True


def _stop(work: _Work, process_id: int) -> None:
    if process_id == os.getpid():  # in a forked child, the locks may be held by threads that it does not have
        work.stop.set()
        work.wake()


def _is_orphan() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
