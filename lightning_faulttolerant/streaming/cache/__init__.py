"""The local files of a streaming data set: downloads, the cache directory, eviction, and prefetching."""

from lightning_faulttolerant.streaming.cache.directory import FetchedIndex, fetch_index
from lightning_faulttolerant.streaming.cache.prefetcher import Need, Prefetcher
from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache
from lightning_faulttolerant.streaming.cache.shard_files import CacheLimit

__all__ = ["CacheLimit", "FetchedIndex", "Need", "Prefetcher", "ShardCache", "fetch_index"]
