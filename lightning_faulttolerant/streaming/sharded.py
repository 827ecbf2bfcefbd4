"""Samples by number, and the shards that hold them: the base of every data set of shards.

`LocalDataset` is the map-style one, for samplers and loaders that choose samples themselves.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any, final, overload

import numpy as np
from torch.utils.data import Dataset

from lightning_faulttolerant.storage.store import parse_bytes
from lightning_faulttolerant.streaming.shards import Ids, Shards, Stream, open_streams


@final
class Shard(Sequence[dict[str, Any]]):
    """One shard of a data set: its samples, and its entry in the index.

    Args:
        shards: The shards of the data set.
        number: The number of the shard, over all streams.
    """

    def __init__(self, shards: Shards, number: int) -> None:
        self._shards = shards
        self._number = number
        self._info = shards.info(number)
        self.samples = self._info.num_samples
        self.compression = self._info.compression
        self.column_names = self._info.columns.names
        self.column_encodings = self._info.columns.encodings

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.samples

    def __len__(self) -> int:
        return self.samples

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample by its number in the shard, or a list of samples. The shard is fetched if it is missing."""
        reader = self._shards.reader(self._number)
        return [reader[place] for place in range(len(self))[at]] if isinstance(at, slice) else reader[at]

    def get_raw_size(self) -> int:
        """Return the size of its decompressed files in bytes."""
        return sum(file.num_bytes for file in self._info.files)

    def get_zip_size(self) -> int | None:
        """Return the size of its compressed files in bytes, or ``None`` if it has none."""
        return sum(file.num_bytes for file in self._info.zip_files) if self._info.zip_files else None

    def get_max_size(self) -> int:
        """Return the size of all its files in bytes, while it is decompressed."""
        return self.get_raw_size() + (self.get_zip_size() or 0)


@final
class _ShardList(Sequence[Shard]):
    """The shards of a data set; each is created when it is requested."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.num_shards

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> list[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | list[Shard]:
        numbers = range(len(self))[at]
        return Shard(self._shards, numbers) if isinstance(numbers, int) else [Shard(self._shards, n) for n in numbers]


class ShardedDataset:
    """A data set with numbered samples, over all shards of all its streams.

    Args:
        streams: The streams of shards.
        cache_limit: Bytes that all of them together may take in their caches.
        allow_unsafe_types: Whether to read pickled columns, too.
    """

    def __init__(
        self, streams: Sequence[Stream], *, cache_limit: int | str | None = None, allow_unsafe_types: bool = False
    ) -> None:
        self.streams = tuple(streams)
        self.cache_limit = None if cache_limit is None else parse_bytes(cache_limit)
        self.allow_unsafe_types = allow_unsafe_types
        opened = open_streams(self.streams, cache_limit)
        self._shards = Shards(opened, allow_unsafe_types=allow_unsafe_types, limit=cache_limit)

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards of all streams."""
        return self._shards.num_samples

    @property
    def size(self) -> int:
        """The number of samples in all shards of all streams: the range of an index for ``[]``."""
        return self._shards.num_samples

    @property
    def num_streams(self) -> int:
        """The number of data sets that are mixed."""
        return len(self.streams)

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of all streams, each a sequence of samples."""
        return _ShardList(self._shards)

    @property
    def num_shards(self) -> int:
        """The number of shards of all streams."""
        return self._shards.num_shards

    @property
    def samples_per_shard(self) -> Ids:
        """The number of samples of each shard; shape ``(num_shards,)``."""
        return np.concatenate(self._shards.sizes)

    @property
    def samples_per_stream(self) -> Ids:
        """The number of samples of each stream; shape ``(num_streams,)``."""
        return np.array([sizes.sum() for sizes in self._shards.sizes], np.int64)

    @property
    def cache_usage(self) -> int:
        """The size of the files in the directories of all streams, in bytes."""
        return self._shards.num_cached_bytes()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard if it is missing, and check it.

        Args:
            shard_id: Its number, over all streams.
            blocking: Whether to wait if another process is fetching it.

        Raises:
            IndexError: If the shard doesn't exist.
            ShardError: If it can't be fetched or read.
        """
        self._shards.prepare(self._checked(shard_id), is_awaited=blocking)

    def evict_shard(self, shard_id: int) -> None:
        """Delete the files of a shard from this machine. It is fetched again when it is needed.

        Args:
            shard_id: Its number, over all streams.

        Raises:
            IndexError: If the shard doesn't exist.
            ValueError: If its stream has no remote: this would be the only copy.
        """
        self._shards.evict(self._checked(shard_id))

    def evict_coldest_shard(self) -> None:
        """Delete the files of the shard that was used least recently, of those that were fetched and are not in use.

        Raises:
            ValueError: If no such shard exists.
        """
        self._shards.evict_coldest()

    def _checked(self, shard: int) -> int:
        if not 0 <= operator.index(shard) < self.num_shards:
            raise IndexError(f"There is no shard {shard}: the data set has {self.num_shards}.")
        return operator.index(shard)

    def __getitem__(self, at: Any) -> Any:
        """Return a sample, or a list of samples, by number over all shards. A missing shard is fetched.

        Args:
            at: A number, negative from the end; a slice; or a list or an array of numbers.

        Raises:
            IndexError: If the sample doesn't exist.
        """
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self.size))]
        if isinstance(at, Sequence) or getattr(at, "ndim", 0) > 0:
            return [self[number] for number in np.asarray(at).ravel().tolist()]
        number = operator.index(at)
        if not -self.size <= number < self.size:
            raise IndexError(f"There is no sample {number}: the data set has {self.size}.")
        return self.get_item(number % self.size)

    def get_item(self, sample_id: int) -> object:
        """Return a sample by its number. ``[]`` and an iteration use this method if a derived class overrides it.

        Args:
            sample_id: Its number, from 0.
        """
        return self._shards.sample(sample_id)

    @classmethod
    def _gives_plain_samples(cls) -> bool:
        """Whether no derived class changes what a sample is."""
        return cls.__getitem__ is ShardedDataset.__getitem__ and cls.get_item is ShardedDataset.get_item


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
