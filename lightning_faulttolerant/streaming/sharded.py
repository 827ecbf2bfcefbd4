"""Samples by their number, and the shards that they are in: what every data set of shards offers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, final, overload

import numpy as np

from lightning_faulttolerant.streaming.cache import parse_bytes
from lightning_faulttolerant.streaming.opening import open_streams
from lightning_faulttolerant.streaming.shards import Ids, Shards
from lightning_faulttolerant.streaming.stream import Stream


@final
class Shard(Sequence[dict[str, Any]]):
    """One shard of a data set: its samples, and what the index says of it.

    Args:
        shards: Of the data set.
        number: Over all streams.
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
        """How many samples it has."""
        return self.samples

    def __len__(self) -> int:
        return self.samples

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample by its number in the shard, or a list of samples; the shard is fetched if it is not here."""
        reader = self._shards.reader(self._number)
        return [reader[place] for place in range(len(self))[at]] if isinstance(at, slice) else reader[at]

    def get_raw_size(self) -> int:
        """Return the bytes of its decompressed files."""
        return sum(file.num_bytes for file in self._info.files)

    def get_zip_size(self) -> int | None:
        """Return the bytes of its compressed files, or ``None`` if it has none."""
        return sum(file.num_bytes for file in self._info.zip_files) if self._info.zip_files else None

    def get_max_size(self) -> int:
        """Return the bytes of all its files, while it is decompressed."""
        return self.get_raw_size() + (self.get_zip_size() or 0)


@final
class _ShardList(Sequence[Shard]):
    """The shards of a data set; each is made when it is asked for."""

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
    """A data set whose samples have numbers, over all shards of all its streams.

    Args:
        streams: Where the shards are.
        cache_limit: Bytes that all of them together may take in their caches.
        allow_unsafe_types: Read pickled columns too.
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
        """Samples of all shards of all streams."""
        return self._shards.num_samples

    @property
    def size(self) -> int:
        """Samples of all shards of all streams: what an index may be, for ``[]``."""
        return self._shards.num_samples

    @property
    def num_streams(self) -> int:
        """How many data sets are mixed."""
        return len(self.streams)

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of all streams, each a sequence of samples."""
        return _ShardList(self._shards)

    @property
    def num_shards(self) -> int:
        """How many shards all streams have."""
        return self._shards.num_shards

    @property
    def samples_per_shard(self) -> Ids:
        """How many samples each shard has; shape ``(num_shards,)``."""
        return np.concatenate(self._shards.sizes)

    @property
    def samples_per_stream(self) -> Ids:
        """How many samples each stream has; shape ``(num_streams,)``."""
        return np.array([sizes.sum() for sizes in self._shards.sizes], np.int64)

    @property
    def cache_usage(self) -> int:
        """Bytes that the files in the directories of all streams take."""
        return self._shards.num_cached_bytes()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard, if it is not here, and check it.

        Args:
            shard_id: Its number, over all streams.
            blocking: Whether to wait if another process is fetching it.

        Raises:
            IndexError: If there is no such shard.
            ShardError: If it can't be had.
        """
        self._shards.prepare(self._checked(shard_id), is_awaited=blocking)

    def evict_shard(self, shard_id: int) -> None:
        """Delete the files of a shard from this machine. It is fetched again when it is needed.

        Args:
            shard_id: Its number, over all streams.

        Raises:
            IndexError: If there is no such shard.
            ValueError: If its stream has no remote: this would be the only copy.
        """
        self._shards.evict(self._checked(shard_id))

    def evict_coldest_shard(self) -> None:
        """Delete the files of the shard that was used least recently, of those that were fetched and are not in use.

        Raises:
            ValueError: If there is none.
        """
        self._shards.evict_coldest()

    def _checked(self, shard: int) -> int:
        if not 0 <= operator.index(shard) < self.num_shards:
            raise IndexError(f"There is no shard {shard}: the data set has {self.num_shards}.")
        return operator.index(shard)

    def __getitem__(self, at: Any) -> Any:
        """Return a sample, or a list of samples, by number over all shards; it is fetched if it is not here.

        Args:
            at: A number, negative from the end; a slice; or a list or an array of numbers.

        Raises:
            IndexError: If there is no such sample.
        """
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self.size))]
        if isinstance(at, Sequence) or getattr(at, "ndim", 0) > 0:
            return [self[number] for number in np.asarray(at).ravel().tolist()]
        number = operator.index(at)
        if not -self.size <= number < self.size:
            raise IndexError(f"There is no sample {number}: the data set has {self.size}.")
        return self.get_item(number % self.size)

    def get_item(self, sample_id: int) -> Any:
        """Return a sample by its number; what ``[]`` and an iteration give, if a derived class has its own.

        Args:
            sample_id: Its number, from 0.
        """
        return self._shards.sample(sample_id)

    @classmethod
    def _gives_plain_samples(cls) -> bool:
        """Whether no derived class has a say in what a sample is."""
        return cls.__getitem__ is ShardedDataset.__getitem__ and cls.get_item is ShardedDataset.get_item
