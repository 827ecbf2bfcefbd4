"""Reads the indexes of streams, and creates the caches of their shards."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming.cache import CacheLimit, ShardCache, fetch_index
from lightning_faulttolerant.streaming.format.index import parse_index
from lightning_faulttolerant.streaming.shards import OpenedStream
from lightning_faulttolerant.streaming.stream import Stream


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
        ValueError: If the limit is too low.
    """
    limit = None if cache_limit is None else CacheLimit(cache_limit)
    opened = [_opened(stream, limit) for stream in streams]
    if limit is not None:
        limit.check(sum(stream.index_bytes for stream in opened if stream.cache.limit is not None))
    return opened


def _opened(stream: Stream, limit: CacheLimit | None) -> OpenedStream:
    source = stream.address or stream.directory
    retry = 2 if stream.download_retry is None else stream.download_retry
    timeout = 60.0 if stream.download_timeout is None else stream.download_timeout
    index = fetch_index(
        local=stream.directory,
        remote=stream.address,
        retry=retry,
        timeout=timeout,
        storage_options=stream.storage_options,
    )
    shards = parse_index(index.text, source=source)
    if not sum(shard.num_samples for shard in shards):
        raise IndexFileError(f"The index in {source} lists no samples: there would be nothing to read.")
    cache = ShardCache(
        local=index.directory,
        remote=stream.address,
        shards=shards,
        keep_zip=stream.keep_zip,
        download_retry=retry,
        download_timeout=timeout,
        validate_hash=stream.validate_hash,
        limit=limit,
        storage_options=stream.storage_options,
        index_digest=index.digest,
    )
    return OpenedStream(shards=shards, cache=cache, index_bytes=len(index.text))
