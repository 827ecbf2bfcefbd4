"""The index entry of a shard. Plain values: nothing here opens a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
