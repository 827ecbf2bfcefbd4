"""How files come here: downloads, the cache directory, what is evicted from it, what is fetched ahead."""
