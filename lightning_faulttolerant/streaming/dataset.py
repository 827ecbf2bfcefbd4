"""The streaming data set: shards that are fetched as they are needed, in an order that can be entered anywhere."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from lightning_faulttolerant.streaming.epochs import Channel, EpochBook, Start
from lightning_faulttolerant.streaming.opening import open_streams
from lightning_faulttolerant.streaming.order import Deal, EpochOrder, normalised
from lightning_faulttolerant.streaming.ordering import Ordering, Seeding
from lightning_faulttolerant.streaming.samples import Plan, Samples
from lightning_faulttolerant.streaming.shards import Shards
from lightning_faulttolerant.streaming.state import VERSION, checked_place, differences, fingerprint, mismatch
from lightning_faulttolerant.streaming.stream import Stream
from lightning_faulttolerant.streaming.world import HandedWorld, World, current_world

_log = logging.getLogger(__name__)


class StreamingDataset(IterableDataset[Any]):
    """An iterable data set of shards in a directory or behind a URL, resumable in the middle of an epoch.

    Every iteration is one epoch. The order of an epoch depends on `shuffle_seed`, the epoch and `num_canonical_nodes`
    only; ranks and data-loading workers take their parts of it. So a position in it means the same samples for any
    number of ranks and workers, and a resume begins there at once. A sample that can't be had raises where it is
    waited for: an epoch is never shorter than planned.

    Args:
        local: Directory of the shards, or where they are cached; ``None`` with `streams`.
        remote: Directory or URL they are fetched from (``s3://``, ``gs://``, ``hf://``, ``http://``, any of fsspec's);
            ``None`` if all are in `local`.
        split: Sub-directory of both.
        shuffle: Whether an epoch's order is random.
        predownload: How many samples ahead of the one that is needed shards are fetched.
        keep_zip: Whether compressed shards are kept beside the decompressed ones; ``None``: if `remote` is local.
        download_retry: How many times a download that failed is tried again.
        download_timeout: Seconds for one download.
        validate_hash: Algorithm by which shards are checked; sizes are checked always.
        shuffle_seed: Of the order.
        num_canonical_nodes: How many parts of the data are read side by side; ``None``: the number of nodes of the
            first run.
        batch_size: Samples of one batch of one rank. `StreamingDataLoader` knows its own; any other loader with
            several workers needs it here for positions to be exact.
        streams: Data sets to mix, in place of `local` and `remote`.
        cache_limit: Bytes that the cache may take on this machine: a number, or a text such as ``"10gb"``.
        epoch_size: Samples of an epoch, where streams are mixed by proportions or have no weight.
        shuffle_algo: How it is shuffled; ``None`` is ``"blocks"``, which costs nothing in advance; ``"py1e"``,
            ``"py1s"``, ``"py1br"``, ``"py2s"`` and ``"naive"`` give the original library's order.
        shuffle_block_size: What the algorithm takes for a block, in samples.
        sampling_method: ``"balanced"`` or ``"fixed"``: of a stream that is read in part, whether each epoch draws
            other samples.
        sampling_granularity: How many samples are taken from a shard at a time, where it is read in part.
        batching_method: ``"random"``: batches are mixed of all streams.
        partition_algo: Accepted; any number of ranks can read here.
        allow_unsafe_types: Read pickled columns, which run whatever code is in them.
        replication: How many ranks in a row get the same samples (tensor or sequence parallelism).
        storage_options: For fsspec's file system: credentials, addresses.

    Raises:
        ValueError: If arguments contradict each other.
        IndexFileError: If an index can't be had or read.

    Example:
        >>> dataset = StreamingDataset("/data/train", shuffle=True, batch_size=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        local: str | os.PathLike[str] | None = None,
        remote: str | os.PathLike[str] | None = None,
        split: str | None = None,
        shuffle: bool = False,
        predownload: int | None = 100_000,
        keep_zip: bool | None = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: str | None = None,
        shuffle_seed: int = 9176,
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        *,
        streams: Sequence[Stream] | None = None,
        cache_limit: int | str | None = None,
        epoch_size: int | str | None = None,
        shuffle_algo: str | None = None,
        shuffle_block_size: int | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        batching_method: str = "random",
        partition_algo: str = "relaxed",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if bool(streams) == (local is not None or remote is not None):
            raise ValueError("Give either `local` (and `remote`), or `streams`: which data to read is not clear.")
        for name, value in (("batch_size", batch_size), ("replication", replication), ("predownload", predownload)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive integer or None, not {value!r}.")
        defaults = {
            "split": split,
            "keep_zip": keep_zip,
            "download_retry": download_retry,
            "download_timeout": download_timeout,
            "validate_hash": validate_hash,
            "storage_options": storage_options,
        }
        given = streams or [Stream(local=_path(local), remote=_path(remote))]
        self.streams = tuple(stream.with_defaults(**defaults) for stream in given)
        self.batch_size = batch_size
        self.predownload = predownload
        self.replication = replication
        opened = open_streams(self.streams, cache_limit)
        self._shards = Shards(opened, allow_unsafe_types=allow_unsafe_types)
        self._ordering = Ordering(
            shard_sizes=self._shards.sizes,
            streams=self.streams,
            shuffle=shuffle,
            algorithm=shuffle_algo,
            block_size=shuffle_block_size,
            epoch_size=epoch_size,
            seed=shuffle_seed,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            batching_method=batching_method,
        )
        self._seeding = Seeding(seed=shuffle_seed, num_canonical_nodes=num_canonical_nodes)
        self._fingerprint = fingerprint([shard for stream in opened for shard in stream.shards])
        self._book = EpochBook(self._seeding)
        self._channel: Channel | None = None
        self._handed_world: HandedWorld | None = None

    @property
    def shuffle(self) -> bool:
        """Whether an epoch's order is random."""
        return self._ordering.shuffle

    @property
    def num_samples(self) -> int:
        """Samples of all shards of all streams."""
        return self._shards.num_samples

    @property
    def size(self) -> int:
        """Samples of all shards of all streams: what an index may be, for ``[]``."""
        return self._shards.num_samples

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration is."""
        return self._book.next_epoch

    def __len__(self) -> int:
        """Return how many samples this rank gets in a whole epoch, wherever this one was entered."""
        world = self._world()
        return -(-self._order(0, world).num_positions // world.num_ranks)

    def __getitem__(self, at: Any) -> Any:
        """Return a sample, or a list of samples, by number over all shards; it is fetched if it is not here.

        Args:
            at: A number, negative from the end; a slice; or a list or an array of numbers.

        Raises:
            IndexError: If there is no such sample.
        """
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self.size))]
        if isinstance(at, Sequence) or getattr(at, "ndim", 0):
            return [self[number] for number in np.asarray(at).ravel().tolist()]
        number = operator.index(at)
        if not -self.size <= number < self.size:
            raise IndexError(f"There is no sample {number}: the data set has {self.size}.")
        return self._shards.sample(number % self.size)

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        world = (start.world or self._world()).in_this_worker()
        return Samples(plan=self._plan, read=self._read, note=self._note, start=start, world=world)

    def _begin(self) -> Start:
        if self._channel is not None:
            return self._channel.heard()
        begin = self._book.begin if get_worker_info() is None else self._book.begin_in_worker
        epoch, sample = begin(is_vague=self.batch_size is None)
        return Start(epoch=epoch, sample=sample, batch_size=self.batch_size or 1)

    def _note(self, start: Start) -> None:
        info = get_worker_info()
        if info is None or info.id == 0:
            self._book.note(start.epoch, start.sample)

    def _plan(self, start: Start, world: World) -> Plan:
        order = self._order(start.epoch, world)
        _, sample = normalised(0, start.sample, num_positions=order.num_positions)
        deal = Deal(
            num_positions=order.num_positions,
            start=sample,
            world=world,
            batch_size=start.batch_size or 1,
            initial_nodes=self._ordering.initial_nodes(self._book.seeding, world),
        )
        return Plan(order, deal)

    def _order(self, epoch: int, world: World) -> EpochOrder:
        return self._ordering.of(epoch, self._book.seeding, world)

    def _read(self, plan: Plan, num_taken: int) -> Iterator[Any]:
        is_own = type(self).__getitem__ is not StreamingDataset.__getitem__
        with contextlib.closing(self._ahead(plan, num_taken)) as ahead:
            for ids in plan.blocks(num_taken, at_most=self._shards.block_samples):
                if is_own:
                    yield from map(self.__getitem__, ids.tolist())
                else:
                    yield from self._shards.samples(ids, ahead.fetch)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the place in the epoch, as a state that is the same on every rank.

        Args:
            num_samples: How many samples all ranks together have consumed.
            from_beginning: Whether they are counted from the epoch's beginning, or from where this iteration began.

        Raises:
            StreamingError: If the place can't be told, since several workers take turns in batches of unknown size.
        """
        epoch, start = self._book.place
        return self._state_at(epoch, num_samples if from_beginning else start + num_samples)
