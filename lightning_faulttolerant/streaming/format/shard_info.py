"""Digests of files: the algorithms of ``hashlib`` and those of ``xxhash``.

The index entry of a shard. Plain values: nothing here opens a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.streaming.format.extras import extra


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One file of a shard.

    Args:
        basename: Its path relative to the directory of the split; may have subfolders, never leaves the directory.
        num_bytes: Its size.
        hashes: Hexadecimal digests of the whole file, by the name of the algorithm.
    """

    basename: str
    num_bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard of an index.

    Args:
        format: ``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``.
        num_samples: The number of its samples; may be 0.
        files: The files that are read: the data, followed by the offsets ("meta") for formats other than ``mds``.
        zip_files: The compressed files stored remotely, in the same order; empty if the data set is not compressed.
        compression: The algorithm and its level (``zstd:7``), or ``None``.
        columns: The information to read a sample: names, encodings, sizes, newline, separator.
    """

    format: str
    num_samples: int
    files: tuple[ShardFile, ...]
    zip_files: tuple[ShardFile, ...] = ()
    compression: str | None = None
    columns: Columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a shard, in the order of the file.

    Args:
        names: The name of each column.
        encodings: ``int``, ``ndarray:float32:3,3``, ``jpeg``, ...
        sizes: Bytes of a fixed-size column, ``None`` for one of variable size (``mds`` only).
        newline: The end of a line (formats other than ``mds``).
        separator: The separator of values (``csv``, ``tsv``, ``xsv``).
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    newline: str = "\n"
    separator: str = ","


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
        raise ValueError(f"The hash {algorithm!r} is unknown. Use one of {', '.join(_HASHLIB + _XXHASHES)}.")
    if algorithm in _XXHASHES:
        return getattr(extra("xxhash", purpose=f"for the hash {algorithm}"), algorithm)()
    # Not for secrets: a platform that forbids old algorithms for secrets may allow them here.
    return hashlib.new(algorithm, usedforsecurity=False)
