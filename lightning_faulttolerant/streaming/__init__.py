"""Streaming data sets that resume at once: reading, writing, ordering and caching shards. Works without Lightning."""
