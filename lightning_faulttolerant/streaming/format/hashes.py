"""Digests of files: the algorithms of ``hashlib`` and those of ``xxhash``."""

from __future__ import annotations

import hashlib
from typing import Any

from lightning_faulttolerant.streaming.format.extras import extra

_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
# hashlib's constructors, except those with a digest of variable length.
_HASHLIB = tuple(
    sorted(name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_"))
)
_CHUNK_BYTES = 1 << 20


def is_known_hash(name: object) -> bool:
    """Return whether a hash of this name exists. Those of ``xxhash`` need the package, from the first digest on."""
    return name in _HASHLIB or name in _XXHASHES


def digest(path: str, algorithm: str) -> str:
    """Return the digest of a file, read in parts.

    Args:
        path: The path of the file.
        algorithm: ``sha1``, ``xxh64``, ...

    Raises:
        ValueError: If no hash of this name exists.
        ImportError: If it is one of xxhash's, and xxhash is not installed.
    """
    state = _new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())


def digest_of(data: bytes, algorithm: str) -> str:
    """Return the digest of bytes, as ``digest`` does for a file."""
    state = _new(algorithm)
    state.update(data)
    return str(state.hexdigest())


def _new(algorithm: str) -> Any:
    if not is_known_hash(algorithm):
        raise ValueError(f"There is no hash {algorithm!r}; those known are {', '.join(_HASHLIB + _XXHASHES)}.")
    if algorithm in _XXHASHES:
        return getattr(extra("xxhash", purpose=f"for the hash {algorithm}"), algorithm)()
    # Not for secrets: a platform that forbids old algorithms for secrets may allow them here.
    return hashlib.new(algorithm, usedforsecurity=False)
