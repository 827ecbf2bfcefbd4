"""Compression of whole files: ``br``, ``bz2``, ``gz``, ``snappy``, ``zstd``, each except snappy with levels."""

from __future__ import annotations

import bz2
import gzip
from types import ModuleType

from lightning_faulttolerant.streaming.format.extras import extra

_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
_DEFAULT_LEVELS = {"br": 11, "bz2": 9, "gz": 9, "snappy": 0, "zstd": 3}

FAMILIES = tuple(_LEVELS)
"""Algorithms without their levels; the name of a compressed file ends with one of them."""

COMPRESSIONS = tuple(
    name for family, levels in _LEVELS.items() for name in (family, *(f"{family}:{n}" for n in levels))
)
"""Every algorithm, with its default level and with each of its levels: ``zstd``, ``zstd:1``, ..."""


def is_known_compression(algorithm: object) -> bool:
    """Return whether the format supports an algorithm, which may have a level (``zstd:7``)."""
    return algorithm in COMPRESSIONS


def extension(algorithm: str) -> str:
    """Return the extension of a compressed file's name, without the dot."""
    return _parsed(algorithm)[0]


def compress(data: bytes, algorithm: str) -> bytes:
    """Compress bytes. The same input always yields the same output.

    Args:
        data: The bytes to compress.
        algorithm: With or without a level.

    Raises:
        ImportError: If the algorithm needs a package that is not installed.
    """
    family, level = _parsed(algorithm)
    if family == "bz2":
        return bz2.compress(data, level)
    if family == "gz":
        return gzip.compress(data, level, mtime=0)
    if family == "br":
        return bytes(_package("brotli", algorithm).compress(data, quality=level))
    if family == "snappy":
        return bytes(_package("snappy", algorithm).compress(data))
    return bytes(_package("zstd", algorithm).compress(data, level))


def _package(name: str, algorithm: str) -> ModuleType:
    return extra(name, purpose=f"for the compression {algorithm}")


def _parsed(algorithm: str) -> tuple[str, int]:
    if not is_known_compression(algorithm):
        raise ValueError(f"There is no compression {algorithm!r}; those known are {', '.join(COMPRESSIONS)}.")
    family, _, level = algorithm.partition(":")
    return family, int(level) if level else _DEFAULT_LEVELS[family]
