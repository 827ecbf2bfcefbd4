"""The streams that a streaming data set mixes, and the shards of all streams as one list.

A stream has a location, an index, a cache of its shards, and a share of the epoch. The list finds the shard of a
sample, and keeps readers of shards in use.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import resource
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.errors import IndexFileError, MissingShardError
from lightning_faulttolerant.storage.store import parse_bytes
from lightning_faulttolerant.streaming.cache.directory import fetch_index
from lightning_faulttolerant.streaming.cache.downloads import Attempts, remote_of
from lightning_faulttolerant.streaming.cache.prefetcher import Need
from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache
from lightning_faulttolerant.streaming.cache.shard_files import CacheLimit
from lightning_faulttolerant.streaming.format.index import ShardInfo, parse_index
from lightning_faulttolerant.streaming.format.readers import ShardReader, check_safe, open_shard
from lightning_faulttolerant.streaming.order.epoch import Shares, Weight

Weights = tuple[float | None, float | None, int | None]


@dataclass(kw_only=True, eq=False)
class Stream:
    """One directory of shards, with its own weight in the mixture.

    At most one of `proportion`, `repeat`, and `choose` may be given, and `proportion` by all streams or by none. The
    `StreamingDataset` fills in the others; proportions then add up to 1. Any other argument that is ``None`` gets the
    data set's value.

    Args:
        remote: Directory or URL of the shards; ``None`` if all of them are in `local`.
        local: Directory of the shards, or of their cache; by default a temporary directory with a name derived from
            `remote`.
        split: Subdirectory of both.
        proportion: Share of the samples of an epoch, relative to those of the other streams.
        repeat: How many times each sample is read in an epoch; fractions read a part of them.
        choose: How many samples are read in an epoch.
        download_retry: How many times a failed download is tried again.
        download_timeout: Seconds for one download.
        validate_hash: Hash algorithm to check files with.
        keep_zip: Whether compressed files are kept next to the decompressed ones.
        storage_options: Options of fsspec's file system.

    Raises:
        ValueError: If arguments contradict each other.
    """

    remote: str | None = None
    local: str | None = None
    split: str | None = None
    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None
    download_retry: int | None = None
    download_timeout: float | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None
    storage_options: Mapping[str, object] | None = None
    _given: Weight | None = field(init=False, repr=False, default=None)
    _resolved: Weights | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        _ = self.weight  # checks it
        if self.remote is None and self.local is None:
            raise ValueError("A stream needs `local`, `remote`, or both. Without them, it has nothing to read.")
        if self.local is None:
            self.local = _temporary(os.fspath(self.remote or ""), self.split or "")

    @property
    def directory(self) -> str:
        """The directory of the shards or of their cache."""
        return os.path.join(os.fspath(self.local or ""), self.split or "")

    @property
    def address(self) -> str | None:
        """The source of the shards, or ``None``."""
        if self.remote is None:
            return None
        remote = os.fspath(self.remote)
        return f"{remote.rstrip('/')}/{self.split}" if self.split else remote

    @property
    def weight(self) -> Weight:
        """How much of it an epoch reads, as given by the user, not as resolved by a data set."""
        if self._given is not None and self._weights() == self._resolved:
            return self._given
        return Weight(proportion=self.proportion, repeat=self.repeat, choose=self.choose)

    def with_defaults(self, **defaults: Any) -> Stream:
        """Return a copy of this stream with its open settings filled in."""
        completed = copy.copy(self)
        for name, value in defaults.items():
            if getattr(completed, name) is None:
                setattr(completed, name, value)
        return completed

    def resolve(self, shares: Shares, number: int) -> None:
        """Set `proportion`, `repeat`, and `choose` to the results of all streams' weights.

        Args:
            shares: The results.
            number: The index of this stream.
        """
        self._given = self.weight
        self.proportion = shares.proportions[number]
        self.repeat = shares.repeats[number]
        self.choose = shares.chosen[number]
        self._resolved = self._weights()

    def _weights(self) -> Weights:
        return self.proportion, self.repeat, self.choose


def _temporary(remote: str, split: str) -> str:
    # The original library's path: its cache may exist there.
    name = hashlib.blake2s(remote.encode(), digest_size=16).hexdigest()
    return os.path.join(tempfile.gettempdir(), name, split)


def given_streams(
    streams: Sequence[Stream] | None, local: str | os.PathLike[str] | None, remote: str | os.PathLike[str] | None
) -> Sequence[Stream]:
    """Return the streams passed to a data set, or the single stream of its directory and remote.

    Raises:
        ValueError: If both were given, or neither.
    """
    if bool(streams) == (local is not None or remote is not None):
        raise ValueError("Give either `local` (and `remote`), or `streams`: which data to read is not clear.")
    return streams or [Stream(local=_path(local), remote=_path(remote))]


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def open_streams(streams: Sequence[Stream], cache_limit: int | str | None) -> list[OpenedStream]:
    """Read the index of each stream.

    Args:
        streams: The streams, with all open settings filled in.
        cache_limit: Bytes that all of them together may take in their caches.

    Raises:
        IndexFileError: If an index can't be fetched, is damaged, or lists no samples.
        ValueError: If the limit is too low, or two addresses have one directory.
    """
    limit = None if cache_limit is None else CacheLimit(cache_limit)
    opened = [_opened(stream, limit) for stream in streams]
    _check_directories(opened)
    if limit is not None:
        limit.check(sum(stream.index_bytes for stream in opened if stream.cache.limit is not None))
    return opened


def _check_directories(opened: Sequence[OpenedStream]) -> None:
    if _in_conflict(opened):
        gc.collect()  # a data set that nothing uses may not be gone yet
    if both := _in_conflict(opened):
        local, *addresses = both
        raise ValueError(
            f"{local} is the local directory of two data sets in use, of {' and of '.join(addresses)}. Their files "
            "would get in each other's way. Pass another local to one of them."
        )


def _in_conflict(opened: Sequence[OpenedStream]) -> tuple[str, str, str] | None:
    in_use = {stream.local: stream.cache.address for shards in list(_all_shards) for stream in shards._streams}
    for local, address in [(stream.local, stream.cache.address) for stream in opened]:
        other = in_use.get(local)
        if other and address and other != address:
            return local, other, address
        in_use[local] = address or other
    return None


def _opened(stream: Stream, limit: CacheLimit | None) -> OpenedStream:
    source = stream.address or stream.directory
    attempts = Attempts(
        retry=2 if stream.download_retry is None else stream.download_retry,
        timeout_seconds=60.0 if stream.download_timeout is None else stream.download_timeout,
    )
    remote = remote_of(stream.directory, stream.address, stream.storage_options)
    index = fetch_index(stream.directory, remote, attempts)
    shards = parse_index(index.text, source=source)
    if not sum(shard.num_samples for shard in shards):
        raise IndexFileError(f"The index in {source} lists no samples: there would be nothing to read.")
    cache = ShardCache(
        local=index.directory,
        remote=remote,
        shards=shards,
        attempts=attempts,
        keep_zip=stream.keep_zip,
        validate_hash=stream.validate_hash,
        limit=limit,
        index_digest=index.digest,
    )
    local = os.path.realpath(stream.directory)
    return OpenedStream(shards=shards, cache=cache, index_bytes=len(index.text), local=local)


Ids = npt.NDArray[np.int64]
# Called with the stream and the shard that is needed now, before it is opened; raises an earlier error of that shard.
Wait = Callable[[int, int], object]

_MAX_BLOCK_SAMPLES = 2048
_BLOCK_BYTES = 1 << 20
_COLUMNS_BYTES = 4096  # each column begins at a multiple of some bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedStream:
    """A stream whose index has been read."""

    shards: tuple[ShardInfo, ...]
    cache: ShardCache
    index_bytes: int
    local: str


class Shards:
    """Reads samples by their number over all shards of all streams; opens a file once, and keeps it mapped.

    It can be pickled and forked. Each process opens the files that it reads.

    Args:
        streams: The streams, in order.
        allow_unsafe_types: Whether to read pickled columns, too.
        limit: The limit of the caches, if they have one: fetched shards may then disappear later.
    """

    def __init__(
        self,
        streams: Sequence[OpenedStream],
        *,
        allow_unsafe_types: bool = False,
        limit: int | str | None = None,
    ) -> None:
        self._streams = tuple(streams)
        for shard in (shard for stream in streams for shard in stream.shards if not allow_unsafe_types):
            check_safe(shard)
        self._allow_unsafe_types = allow_unsafe_types
        self._limit = None if limit is None else parse_bytes(limit)
        sizes = [shard.num_samples for stream in streams for shard in stream.shards]
        self._stops = np.cumsum(np.array(sizes, np.int64))
        self._starts = self._stops - np.array(sizes, np.int64)
        counts = [len(stream.shards) for stream in streams]
        self._first_of_stream = np.cumsum([0, *counts])
        num_bytes = sum(file.num_bytes for stream in streams for shard in stream.shards for file in shard.files)
        self._max_open = _max_mapped(self._limit, num_bytes // max(1, sum(counts)))
        self._mean_bytes = max(1, num_bytes // max(1, self.num_samples))
        self.block_samples = max(1, min(_MAX_BLOCK_SAMPLES, _BLOCK_BYTES // self._mean_bytes))
        self._set_up()

    def _set_up(self) -> None:
        self._readers: dict[int, ShardReader] = {}
        self._lock = threading.Lock()
        _all_shards.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("_readers", "_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._set_up()

    @property
    def num_samples(self) -> int:
        """The number of samples of all shards."""
        return int(self._stops[-1]) if len(self._stops) else 0

    @property
    def sizes(self) -> list[Ids]:
        """The number of samples of each shard, for each stream."""
        sizes = self._stops - self._starts
        return [
            sizes[first:stop] for first, stop in zip(self._first_of_stream, self._first_of_stream[1:], strict=False)
        ]

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the shard of each sample, and its place there."""
        shards = np.searchsorted(self._stops, ids, side="right")
        return shards, ids - self._starts[shards]

    def stream_of(self, shard: int) -> tuple[int, int]:
        """Return the stream of a shard, and its index among the stream's shards."""
        stream = int(np.searchsorted(self._first_of_stream, shard, side="right")) - 1
        return stream, shard - int(self._first_of_stream[stream])

    @property
    def num_shards(self) -> int:
        """The number of shards of all streams."""
        return len(self._stops)

    def info(self, shard: int) -> ShardInfo:
        """Return the index entry of a shard."""
        stream, number = self.stream_of(shard)
        return self._streams[stream].shards[number]

    @property
    def infos(self) -> list[ShardInfo]:
        """The index entries of all shards."""
        return [shard for stream in self._streams for shard in stream.shards]

    @property
    def caches(self) -> list[ShardCache]:
        """The cache of each stream."""
        return [stream.cache for stream in self._streams]

    def reader(self, shard: int, wait: Wait | None = None) -> ShardReader:
        """Return the reader of a shard. Missing files are fetched."""
        reader = self._readers.get(shard)
        return self._opened(shard, wait) if reader is None else reader

    def _opened(self, shard: int, wait: Wait | None) -> ShardReader:
        stream, number = self.stream_of(shard)
        if wait is not None:
            wait(stream, number)
        opened = self._streams[stream]
        opener = _opener(opened.shards[number], allow_unsafe_types=self._allow_unsafe_types)
        reader = opened.cache.open(number, opener)
        with self._lock:
            self._readers[shard] = reader
        while len(self._readers) > self._max_open:
            self._let_go_of_oldest()
        # Each data set alone would stay below the process's limit; all of them together must.
        while sum(len(shards._readers) for shards in list(_all_shards)) > _max_files():
            max(_all_shards, key=lambda shards: len(shards._readers))._let_go_of_oldest()
        return reader

    def _let_go_of_oldest(self) -> None:
        with self._lock:
            # Not closed: it may still be read from. Its mapping disappears with the last reference.
            for oldest in list(self._readers)[:1]:
                del self._readers[oldest]

    def prepare(self, shard: int, *, is_awaited: bool) -> None:
        """Fetch a shard if it is missing. If another process is about to, wait for it, or leave it to that process."""
        stream, number = self.stream_of(shard)
        cache = self._streams[stream].cache
        if is_awaited or not cache.is_being_fetched(number):
            cache.fetch(number)

    def evict(self, shard: int) -> None:
        """Delete a shard that can be fetched again."""
        stream, number = self.stream_of(shard)
        self._streams[stream].cache.discard(number)
        with self._lock:
            self._readers.pop(shard, None)

    def evict_coldest(self) -> None:
        """Delete the shard that was used least recently, of those that were fetched."""
        uses = [
            (last_use, stream, number)
            for stream, cache in enumerate(self.caches)
            if cache.has_remote
            for number, last_use in cache.kept.contents().last_uses.items()
            if not cache.is_held(number)
        ]
        for last_use, stream, number in sorted(uses):
            if self.caches[stream].kept.evict(number, last_use):
                with self._lock:
                    self._readers.pop(int(self._first_of_stream[stream]) + number, None)
                return
        raise ValueError("There is no shard to evict: each fetched shard is in use, or was evicted before.")

    def num_cached_bytes(self) -> int:
        """Return the size of all files in the directories of the streams."""
        kept = {cache.directory: cache.kept for cache in self.caches}
        return sum(shards.contents().num_bytes for shards in kept.values())

    def sample(self, number: int) -> dict[str, Any]:
        """Return one sample."""
        shards, places = self.locate(np.array([number], np.int64))
        return self.reader(int(shards[0]))[int(places[0])]

    def bytes_of_samples(self, num_samples: int) -> int:
        """Return how many bytes so many samples have in memory at most, if all samples are equally large."""
        return num_samples * (self._mean_bytes + 1) + _COLUMNS_BYTES

    def samples_ahead(self, wanted: int, *, num_readers: int) -> int:
        """Return how many samples ahead one of a machine's readers may fetch shards, so that all of them find room.

        Args:
            wanted: The number without a limit.
            num_readers: Processes that read from the same cache.
        """
        if self._limit is None:
            return wanted
        # Half of the room is for the samples being read.
        return max(1, min(wanted, self._limit // (2 * num_readers * self._mean_bytes)))

    def needs(self, blocks: Iterator[Ids], place: int) -> Iterator[Need]:
        """Yield the shards that blocks of samples need: each once, or once per block if shards are evicted.

        Args:
            blocks: Ids of samples, in the order of their need.
            place: The position of the first sample in the part that the process reads.
        """
        known: set[int] = set()
        for ids in blocks:
            shards, first = np.unique(np.searchsorted(self._stops, ids, side="right"), return_index=True)
            for at in np.argsort(first).tolist():
                shard = int(shards[at])
                if shard not in known:
                    known.add(shard)
                    yield Need(place + int(first[at]), *self.stream_of(shard))
            place += len(ids)
            if self._limit is not None:
                known.clear()

    def samples(self, ids: Ids, wait: Wait | None = None, *, are_lent: bool = False) -> Iterator[dict[str, Any]]:
        """Yield samples in the order of `ids`. Those of one shard are decoded together.

        Args:
            ids: The numbers of the samples.
            wait: Waits for a shard.
            are_lent: Whether the caller copies them immediately, so large arrays may be parts of the files.
        """
        shards, places = self.locate(ids)
        if len(ids) and (shards == shards[0]).all():
            yield from self._of_shard(int(shards[0]), places, wait, are_lent=are_lent)
            return
        order = np.argsort(shards, kind="stable")
        in_order = shards[order]
        begins = np.flatnonzero(np.diff(in_order, prepend=-1))
        samples: list[Any] = [None] * len(ids)
        for begin, stop in zip(begins.tolist(), [*begins[1:].tolist(), len(ids)], strict=True):
            where = order[begin:stop]
            of_shard = self._of_shard(int(in_order[begin]), places[where], wait, are_lent=are_lent)
            for place, sample in zip(where.tolist(), of_shard, strict=True):
                samples[place] = sample
        # Yielded and released one by one: the consumer gets its memory back immediately.
        samples.reverse()
        while samples:
            yield samples.pop()

    def _of_shard(self, shard: int, places: Ids, wait: Wait | None, *, are_lent: bool) -> Iterator[dict[str, object]]:
        reader = self.reader(shard, wait)
        return reader.lent_samples(places) if are_lent else reader.samples(places)


_all_shards: weakref.WeakSet[Shards] = weakref.WeakSet()


def _max_files() -> int:
    # A mapped file uses one of the process's file descriptors.
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _max_mapped(limit: int | None, mean_bytes: int) -> int:
    # A mapped file keeps its room on the disk even if it is evicted.
    return _max_files() if limit is None else min(_max_files(), max(1, limit // max(1, 4 * mean_bytes)))


def _opener(info: ShardInfo, *, allow_unsafe_types: bool) -> Callable[[str], ShardReader]:
    def opener(directory: str) -> ShardReader:
        try:
            return open_shard(info, directory, allow_unsafe_types=allow_unsafe_types)
        except MissingShardError as error:
            # Evicted by another process since it was fetched. This error makes the cache fetch it again.
            raise FileNotFoundError(str(error)) from error

    return opener
