"""The floor: what the format allows in plain Python, without any other duty of a library.

The floor reads the fixed-size columns of local MDS shards in any order. It does not fetch, verify, resume or share
anything. Its shuffle is one permutation of all samples in memory.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Floor(Dataset[dict[str, Any]]):
    """All samples of an MDS data set, by number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = json.loads((directory / "index.json").read_text())["shards"]
        self.ends = list(accumulate(shard["samples"] for shard in self.shards))
        self.opened: dict[int, tuple[mmap.mmap, list[int]]] = {}
        names, encodings, sizes = (self.shards[0][f"column_{of}"] for of in ("names", "encodings", "sizes"))
        kinds = [encoding.split(":")[1] if encoding.startswith("ndarray") else None for encoding in encodings]
        self.columns = list(zip(names, kinds, sizes, strict=True))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self.ends, index)
        mapped, offsets = self.opened.get(number) or self._open(number)
        at = offsets[index - (self.ends[number] - len(offsets) + 1)]
        sample: dict[str, Any] = {}
        for name, kind, size in self.columns:
            stored = mapped[at : at + size]
            sample[name] = int.from_bytes(stored, "little") if kind is None else np.frombuffer(stored, kind)
            at += size
        return sample

    def _open(self, number: int) -> tuple[mmap.mmap, list[int]]:
        with (self.directory / self.shards[number]["raw_data"]["basename"]).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offsets = np.frombuffer(mapped, np.uint32, self.shards[number]["samples"] + 1, 4).tolist()
        self.opened[number] = (mapped, offsets)
        return self.opened[number]


def floor_loader(directory: Path, *, batch_size: int, num_workers: int, shuffle: bool, at: int) -> DataLoader[Any]:
    """Return a loader of the samples from position `at` of the epoch on."""
    dataset = Floor(directory)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(dataset), generator=generator).tolist() if shuffle else range(len(dataset))
    return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, sampler=order[at:])
