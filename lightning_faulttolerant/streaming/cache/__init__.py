"""The local files of a streaming data set: downloads, the cache directory, eviction, and prefetching."""

from lightning_faulttolerant.streaming.cache.index import FetchedIndex, fetch_index
from lightning_faulttolerant.streaming.cache.limit import CacheLimit, parse_bytes
from lightning_faulttolerant.streaming.cache.prefetcher import Need, Prefetcher
from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache

__all__ = ["CacheLimit", "FetchedIndex", "Need", "Prefetcher", "ShardCache", "fetch_index", "parse_bytes"]
