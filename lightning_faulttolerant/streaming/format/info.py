"""What an index says about a shard. Plain values: nothing here opens a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One file of a shard.

    Args:
        basename: Its path relative to the directory of the split; may have sub-folders, never leaves the directory.
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
        num_samples: How many samples it has; may be 0.
        files: The files that are read: the data, and for formats other than ``mds`` the offsets ("meta") after it.
        zip_files: What is stored of them remotely where the data set is compressed, in the same order; else empty.
        compression: The algorithm and its level (``zstd:7``), or ``None``.
        columns: What the format needs to read a sample: names, encodings, sizes, newline, separator.
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
        names: One for each column.
        encodings: ``int``, ``ndarray:float32:3,3``, ``jpeg``, ...
        sizes: Bytes of a fixed-size column, ``None`` for one of variable size (``mds`` only).
        newline: What ends a line (formats other than ``mds``).
        separator: What stands between values (``csv``, ``tsv``, ``xsv``).
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    newline: str = "\n"
    separator: str = ","
