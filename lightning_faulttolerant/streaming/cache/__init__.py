"""The local files of a streaming data set: downloads, the cache directory, eviction, and prefetching."""
