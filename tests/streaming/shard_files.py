"""Data sets of numbers, written into a directory, and their readers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_faulttolerant.streaming.format.writer import MDSWriter

_SHARD_BYTES = 512
"""28 samples."""


def write(
    directory: Path, num_samples: int, *, first: int = 0, hashes: tuple[str, ...] = ("sha1",), **options: Any
) -> str:
    """Write samples ``{"n": number}`` into many small shards; return the directory."""
    with MDSWriter(
        out=str(directory), columns={"n": "int"}, size_limit=_SHARD_BYTES, hashes=list(hashes), **options
    ) as writer:
        for number in range(first, first + num_samples):
            writer.write({"n": number})
    return str(directory)


def shard_paths(directory: str | Path) -> list[Path]:
    """Return the files of the shards, in order."""
    return sorted(Path(directory).glob("shard.*.mds*"))


def numbers(samples: Iterable[Any]) -> list[int]:
    """Return the numbers of samples, or of a loader's batches one after the other."""
    read: list[int] = []
    for sample in samples:
        value = sample["n"]
        read.extend(value.tolist() if hasattr(value, "tolist") else [value])
    return read


def batches(loader: Iterable[Any]) -> list[list[int]]:
    """Return the numbers of each batch."""
    return [batch["n"].tolist() for batch in loader]
