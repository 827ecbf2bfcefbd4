"""How files come here: downloads, the cache directory, what is evicted from it, what is fetched ahead."""

from lightning_faulttolerant.streaming.cache.index import FetchedIndex, fetch_index
from lightning_faulttolerant.streaming.cache.limit import CacheLimit, parse_bytes
from lightning_faulttolerant.streaming.cache.prefetcher import Need, Prefetcher
from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache

__all__ = ["CacheLimit", "FetchedIndex", "Need", "Prefetcher", "ShardCache", "fetch_index", "parse_bytes"]
