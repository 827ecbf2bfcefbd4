"""A map-style data set of the shards in a directory, for samplers and loaders that choose samples themselves."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset

from lightning_faulttolerant.streaming.sharded import ShardedDataset
from lightning_faulttolerant.streaming.stream import Stream


class LocalDataset(ShardedDataset, Dataset[Any]):
    """A map-style data set of the shards in a directory: `dataset[number]` is a sample.

    Args:
        local: Directory of the shards.
        split: Subdirectory of it.
        allow_unsafe_types: Read pickled columns, which run any code that is in them.

    Raises:
        IndexFileError: If the index is missing, or can't be read.
        UnsafeDataError: If a column is pickled, and that is not allowed.

    Example:
        >>> dataset = LocalDataset("/data/train")  # doctest: +SKIP
        >>> loader = ResumableDataLoader(dataset, batch_size=32, shuffle=True)  # doctest: +SKIP
    """

    def __init__(
        self, local: str | os.PathLike[str], split: str | None = None, *, allow_unsafe_types: bool = False
    ) -> None:
        super().__init__([Stream(local=os.fspath(local), split=split)], allow_unsafe_types=allow_unsafe_types)
        self.local = os.fspath(local)
        self.split = split or ""

    def __len__(self) -> int:
        return self.num_samples
