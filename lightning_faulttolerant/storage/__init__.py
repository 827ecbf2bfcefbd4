"""Files wherever they are: atomic writes, locks, temporary names, URLs, and object stores. Knows bytes and paths."""
