"""The streaming data set: shards that are fetched as they are needed, in an order that can be entered anywhere."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming.cache.prefetcher import Prefetcher
from lightning_faulttolerant.streaming.epochs import Channel, EpochBook, IterationStart, NumDrawn, Plan, Samples
from lightning_faulttolerant.streaming.order.batching import RemainingPositions
from lightning_faulttolerant.streaming.ordering import (
    FINGERPRINT_PARTS,
    ORDER_PARTS,
    VERSION,
    OrderedDataset,
    Ordering,
    Readers,
    Seeding,
    checked_place,
    differences,
    fingerprint,
    mismatch,
)
from lightning_faulttolerant.streaming.sharded import ShardedDataset
from lightning_faulttolerant.streaming.shards import Ids, Stream, Wait, given_streams
from lightning_faulttolerant.streaming.world import HandedWorld, World, current_world

_log = logging.getLogger(__name__)

_BATCHES_AHEAD = 8  # the original's value, if predownload is None


class StreamingDataset(ShardedDataset, OrderedDataset, IterableDataset[Any]):
    """An iterable data set of shards in a directory or at a URL, resumable in the middle of an epoch.

    Every iteration is one epoch. The order of an epoch depends only on `shuffle_seed`, the epoch, and
    `num_canonical_nodes`. Ranks and data-loading workers take their parts of it. A position therefore means the same
    samples for any number of ranks and workers, and a resume begins there immediately. A sample that can't be read
    raises where it is needed: an epoch is never shorter than planned.

    Args:
        local: Directory of the shards, or of their cache; ``None`` with `streams`.
        remote: Directory or URL to fetch them from (``s3://``, ``gs://``, ``hf://``, ``http://``, any of fsspec's);
            ``None`` if all are in `local`.
        split: Subdirectory of both.
        shuffle: Whether an epoch's order is random.
        predownload: How many samples ahead of the current one shards are fetched.
        keep_zip: Whether compressed shards are kept next to the decompressed ones; ``None``: if `remote` is local.
        download_retry: How many times a failed download is tried again.
        download_timeout: Seconds for one download.
        validate_hash: Hash algorithm to check shards with. Their sizes are always checked.
        shuffle_seed: Seed of the order.
        num_canonical_nodes: How many parts of the data are read side by side; ``None``: the number of nodes of the
            first run.
        batch_size: Samples per batch of one rank. `StreamingDataLoader` knows its own. With any other loader that has
            several workers, set it here to make positions exact.
        streams: Data sets to mix, in place of `local` and `remote`.
        cache_limit: Bytes that the cache may take on this machine: a number, or a string such as ``"10gb"``.
        epoch_size: Samples of an epoch, if streams are mixed by proportions or have no weight.
        shuffle_block_size: How many samples are shuffled together. ``None``: those of eight shards.
        sampling_method: ``"balanced"`` or ``"fixed"``: whether each epoch draws other samples of a stream that is read
            in part.
        sampling_granularity: How many samples are taken from a shard at a time, if it is read in part.
        batching_method: ``"random"``: each batch mixes all streams. ``"stratified"``: each has the same share of each
            stream. ``"per_stream"``: each global batch is of one stream. The last two need `batch_size`, and the same
            global batch size when a run continues.
        partition_algo: Accepted without effect; any number of ranks can read here.
        allow_unsafe_types: Read pickled columns, which run any code that is in them.
        replication: How many consecutive ranks get the same samples (tensor or sequence parallelism).
        storage_options: Options of fsspec's file system: credentials, addresses.

    Raises:
        ValueError: If arguments contradict each other.
        IndexFileError: If an index can't be fetched or read.

    Example:
        >>> dataset = StreamingDataset("/data/train", shuffle=True, batch_size=32)  # doctest: +SKIP
    """

    _channel: Channel | None = None
    _unheard: Channel | None = None
    _handed_world: HandedWorld | None = None

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
        shuffle_block_size: int | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        batching_method: str = "random",
        partition_algo: str = "relaxed",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        _check_counts(batch_size=batch_size, predownload=predownload, replication=replication)
        defaults = {
            "split": split,
            "keep_zip": keep_zip,
            "download_retry": download_retry,
            "download_timeout": download_timeout,
            "validate_hash": validate_hash,
            "storage_options": storage_options,
        }
        given = given_streams(streams, local, remote)
        own = [stream.with_defaults(**defaults) for stream in given]
        super().__init__(own, cache_limit=cache_limit, allow_unsafe_types=allow_unsafe_types)
        self.batch_size = batch_size
        self.predownload, self.replication = predownload, replication
        seeding = Seeding(seed=shuffle_seed, num_canonical_nodes=num_canonical_nodes)
        self._ordering = Ordering(
            shard_sizes=self._shards.sizes,
            streams=self.streams,
            shuffle=shuffle,
            block_size=shuffle_block_size,
            epoch_size=epoch_size,
            seeding=seeding,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            batching_method=batching_method,
        )
        self._ordering.check_batches(batch_size)
        for number, stream in (*enumerate(given), *enumerate(own)):
            stream.resolve(self._ordering.shares, number)
        self._fingerprint = fingerprint(self._shards.infos)
        self._book = EpochBook(seeding)

    @property
    def shuffle_seed(self) -> int:
        """The seed of the order: the seed in a state, once one was loaded."""
        return self._book.seeding.seed

    @property
    def num_canonical_nodes(self) -> int:
        """The number of parts of the data that are read side by side."""
        return self._ordering.num_canonical_nodes(self._book.seeding, self._world().num_nodes)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._book.next_epoch

    @property
    def num_positions(self) -> int:
        """The number of positions in an epoch, for all ranks together."""
        return self._num_positions()

    @property
    def book(self) -> EpochBook:
        """The record of this data set's epochs."""
        return self._book

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch, wherever this one was entered."""
        return -(-self._num_positions() // self._world().num_ranks)

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        world = start.world.in_this_worker()
        self._book.drawn = drawn = NumDrawn()
        return Samples(plan=self._plan, read=self._read, note=self._note, start=start, world=world, drawn=drawn)

    def _begin(self) -> IterationStart:
        channel, self._unheard = self._channel or self._unheard, None
        if channel is not None:
            return channel.heard()
        if get_worker_info() is None:
            epoch, sample = self._book.begin(self._normal)
        else:
            epoch, sample = self._book.begin_in_worker(self._normal, is_vague=self.batch_size is None)
        return IterationStart(epoch=epoch, sample=sample, batch_size=self.batch_size or 1, world=self._world())

    def begin_epoch(self, *, batch_size: int, drop_last: bool) -> IterationStart:
        """Begin the next iteration in the main process, for a loader that informs its workers by `tell`.

        Args:
            batch_size: Samples per batch of one rank.
            drop_last: Whether a last batch that is not full is left out.
        """
        world = self._world()
        least = batch_size * world.num_ranks if drop_last else 1
        epoch, sample = self._book.begin(functools.partial(self._normal, least=least))
        return IterationStart(epoch=epoch, sample=sample, batch_size=batch_size, world=world)

    @contextlib.contextmanager
    def told_by(self, channel: Channel, *, is_read_here: bool) -> Iterator[None]:
        """Let iterations and workers that are created in the block learn from a loader where they begin."""
        # A derived class's __iter__ may be a generator. In this process it begins later, at its first sample.
        self._channel, self._unheard = channel, channel if is_read_here else None
        try:
            yield
        finally:
            self._channel = None

    def _normal(self, epoch: int, sample: int, *, least: int = 1, readers: Readers | None = None) -> tuple[int, int]:
        left = self._num_positions(readers) - sample
        return (epoch, sample) if left >= least or not sample else (epoch + 1, 0)

    def _note(self, start: IterationStart) -> None:
        info = get_worker_info()
        if info is None or info.id == 0:
            self._book.note(start.epoch, start.sample, is_moved=True)

    def _plan(self, start: IterationStart, world: World) -> Plan:
        order = self._ordering.of(start.epoch, self._book.seeding, Readers.of(world, start.batch_size))
        return Plan(order, self.deal(start, world), are_lent=start.are_lent)

    def deal(self, start: IterationStart, world: World) -> RemainingPositions:
        """Return how the rest of an epoch is dealt to the readers.

        Args:
            start: Where it begins.
            world: The readers.

        Raises:
            ValueError: If the epoch can't be entered there with these batches.
        """
        return self._ordering.deal(start.sample, self._book.seeding, world, start.batch_size)

    def bytes_of_samples(self, num_samples: int) -> int:
        """Return how many bytes so many samples have at most, if all samples are equally large."""
        return self._shards.bytes_of_samples(num_samples)

    def _readers(self) -> Readers:
        return Readers.of(self._world(), self.batch_size or 1)

    def _num_positions(self, readers: Readers | None = None) -> int:
        return self._ordering.num_positions(self._book.seeding, readers or self._readers())

    def _read(self, plan: Plan, num_taken: int) -> Iterator[Any]:
        is_plain = self._gives_plain_samples()
        at_most, place = self._shards.block_samples, num_taken
        with self._prefetcher(plan, num_taken) as ahead:
            wait = None if ahead is None else ahead.wait
            for ids in plan.blocks(num_taken, at_most=at_most):
                if ahead is not None:
                    ahead.advance(place)
                place += len(ids)
                if is_plain:
                    yield from self._shards.samples(ids, wait, are_lent=plan.are_lent)
                else:
                    yield from self._own_samples(ids, wait)

    def _own_samples(self, ids: Ids, wait: Wait | None) -> Iterator[object]:
        """Yield the samples as a derived class returns them."""
        shards, _ = self._shards.locate(ids)
        for number, shard in zip(ids.tolist(), shards.tolist(), strict=True):
            self._shards.reader(shard, wait)
            yield self[number]

    def _prefetcher(self, plan: Plan, num_taken: int) -> contextlib.AbstractContextManager[Prefetcher | None]:
        caches = self._shards.caches
        if not any(cache.has_remote for cache in caches):
            return contextlib.nullcontext()
        needs = self._shards.needs(plan.blocks(num_taken, at_most=self._shards.block_samples), num_taken)
        wanted = self.predownload or _BATCHES_AHEAD * plan.deal.batch_size
        ahead = self._shards.samples_ahead(wanted, num_readers=plan.deal.world.readers_per_node)
        return Prefetcher(caches, needs, predownload=ahead, first=plan.end_of_batch(num_taken))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the position in the epoch, as a state that is the same on every rank.

        Args:
            num_samples: The number of samples that all ranks together have consumed.
            from_beginning: Whether they are counted from the epoch's beginning, or from where this iteration began.

        Raises:
            StreamingError: If the position is unknown, because several workers take turns in batches of unknown size.
        """
        if num_samples and self._book.is_vague:
            raise StreamingError(
                "Several data-loading workers take turns by batches, but this data set doesn't know the batch size. "
                "So it can't know which samples were consumed. Pass batch_size= to StreamingDataset, or use "
                "StreamingDataLoader."
            )
        epoch, start = self._book.place
        return self.state_at(epoch, num_samples if from_beginning else start + num_samples)

    def state_at(self, epoch: int, sample: int, *, least: int = 1) -> dict[str, object]:
        """Return the state of a position.

        Args:
            epoch: The epoch.
            sample: The number of its samples that all ranks together have consumed.
            least: The smallest number of samples that must be left. With fewer, the state is the start of the next
                epoch.
        """
        readers, seeding = self._readers(), self._book.seeding
        epoch, sample = self._normal(epoch, sample, least=least, readers=readers)
        return {
            "epoch": epoch,
            "sample_in_epoch": sample,
            "shuffle_seed": seeding.seed,
            "num_canonical_nodes": self._ordering.num_canonical_nodes(seeding, readers.world.num_nodes),
            "version": VERSION,
            "order": self._ordering.describe(readers),
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, obj: Mapping[str, Any], strict: bool = True) -> None:
        """Let the next iteration begin at the position of a state.

        A state of MosaicML Streaming has another order inside an epoch. If it is in the middle of one, the next
        iteration begins the next epoch.

        Args:
            obj: The state.
            strict: Whether other data, or another order, is an error. Otherwise it is a warning.

        Raises:
            ValueError: If it is not a state of a streaming data set.
            FingerprintMismatchError: If it was saved with other data, or in another order.
        """
        epoch, sample = checked_place(obj)
        own = self._ordering.describe(self._readers())
        differing = differences(obj.get("fingerprint", {}), self._fingerprint, FINGERPRINT_PARTS)
        differing += differences(obj.get("order", {}), own, ORDER_PARTS)
        if differing and strict:
            raise mismatch(differing)
        if differing:
            _log.warning("The state belongs to other data or to another order: %s.", "; ".join(differing))
        if "order" not in obj and 0 < sample < self.epoch_size:
            _log.warning(
                "The state comes from MosaicML Streaming, in the middle of epoch %d, which has another order there. "
                "So the next iteration begins epoch %d.",
                epoch, epoch + 1,
            )  # fmt: skip
            epoch, sample = epoch + 1, 0
        seeding = Seeding(
            seed=int(obj["shuffle_seed"]),
            num_canonical_nodes=int(obj["num_canonical_nodes"]) if obj["num_canonical_nodes"] else None,
        )
        self._book.put(epoch, sample, seeding)
        _log.info("Resumed at epoch %d, sample %d.", epoch, sample)

    def _world(self) -> World:
        handed = self._handed_world
        world = handed.world if handed is not None and handed.is_for_this_worker else current_world()
        return world.replicated(self.replication) if self.replication else world

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_unheard": None, "_handed_world": HandedWorld.of_this_process()}


def _check_counts(*, batch_size: int | None, predownload: int | None, replication: int | None) -> None:
    counts = {"batch_size": batch_size, "predownload": predownload, "replication": replication}
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer or None, not {value!r}.")
    if predownload is not None and batch_size is not None and predownload < batch_size:
        warnings.warn(
            f"predownload < batch_size ({predownload} < {batch_size}). A batch then waits for shards that could be "
            "fetched before it. Pass a predownload of at least batch_size.",
            stacklevel=3,  # where the data set is created
        )
