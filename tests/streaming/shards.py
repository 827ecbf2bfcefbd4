"""Data sets for the tests of the format, written by either library and read by ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_faulttolerant.streaming.format.codecs import decompress_file
from lightning_faulttolerant.streaming.format.index import ShardInfo, parse_index
from lightning_faulttolerant.streaming.format.readers import ShardReader, open_shard
from lightning_faulttolerant.streaming.format.writer import MDSWriter

Samples = Iterable[Mapping[str, Any]]


def write(writer_class: Any, out: Path, columns: Mapping[str, str], samples: Samples, **options: Any) -> Path:
    """Write samples with a writer and return its directory."""
    with writer_class(columns=dict(columns), out=str(out), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def infos(directory: Path) -> tuple[ShardInfo, ...]:
    """Return the shards of a data set."""
    return parse_index((directory / "index.json").read_bytes(), source=str(directory))


def opened(directory: Path, shard: int = 0, **options: Any) -> ShardReader:
    """Return one shard of a data set, decompressed if necessary."""
    info = infos(directory)[shard]
    for raw, zipped in zip(info.files, info.zip_files, strict=False):
        source, target = str(directory / zipped.basename), str(directory / raw.basename)
        decompress_file(source, target, str(info.compression), num_bytes=raw.num_bytes)
    return open_shard(info, str(directory), **options)


def read(directory: Path, **options: Any) -> list[dict[str, Any]]:
    """Return all samples of a data set, in order."""
    samples: list[dict[str, Any]] = []
    for shard, info in enumerate(infos(directory)):
        reader = opened(directory, shard, **options)
        assert len(reader) == info.num_samples
        samples += reader.samples(range(len(reader)))
        reader.close()
    return samples


def files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the files below a directory, by their names."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def same(found: Any, expected: Any) -> bool:
    """Return whether two values are equal and of one type: arrays and tensors by element, images by pixel."""
    if hasattr(expected, "getpixel"):
        return (found.mode, found.size, found.tobytes()) == (expected.mode, expected.size, expected.tobytes())
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return sorted(found) == sorted(expected) and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, Tensor):
        one, other = [(tensor.dtype, tensor.shape, tensor.is_contiguous()) for tensor in (found, expected)]
        return one == other and torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)
    if isinstance(expected, (np.ndarray, np.generic)):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return bool(found == expected)


def write_numbers(
    directory: Path, num_samples: int, *, first: int = 0, hashes: tuple[str, ...] = ("sha1",), **options: Any
) -> str:
    """Write samples ``{"n": number}`` into many small shards, of 28 samples each; return the directory."""
    samples = [{"n": number} for number in range(first, first + num_samples)]
    return str(write(MDSWriter, directory, {"n": "int"}, samples, size_limit=512, hashes=list(hashes), **options))


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
