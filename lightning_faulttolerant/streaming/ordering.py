"""The order of a streaming data set's epochs, and its state: a position, and all that the position depends on.

The state contains nothing about ranks or workers, so it is the same on every rank and can be loaded with another number
of them. It contains no paths: the data may have moved.

The arguments of the data set define the order. `OrderedDataset` gives a data set these arguments as properties of the
same names.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.storage.store import parse_number
from lightning_faulttolerant.streaming.format.index import ShardInfo
from lightning_faulttolerant.streaming.order.batching import (
    BATCHING_METHODS,
    RemainingPositions,
    batched_order,
    check_between_batches,
)
from lightning_faulttolerant.streaming.order.epoch import EpochOrder, epoch_order, shares_of_streams
from lightning_faulttolerant.streaming.shards import Ids, Stream
from lightning_faulttolerant.streaming.world import World

VERSION = 1
_PLACE = ("epoch", "sample_in_epoch", "shuffle_seed", "num_canonical_nodes")
FINGERPRINT_PARTS = {
    "num_samples": "number of samples",
    "num_shards": "number of shards",
    "num_bytes": "bytes in all shards",
    "samples": "samples of each shard",
    "basenames": "names of the files",
    "sizes": "sizes of the files",
}
"""What each entry of a fingerprint means, by its key."""

Fingerprint = dict[str, object]


def fingerprint(shards: Sequence[ShardInfo]) -> Fingerprint:
    """Return what identifies the data: counts, names, and sizes of the shards in order; a hash, if the index has one.

    Of the hashes that all files have, the first by name is used: data with equally large samples differs in nothing
    else.
    """
    files = [file for shard in shards for file in shard.files]
    algorithms = sorted(set.intersection(*(set(file.hashes) for file in files)) if files else ())
    hashes = {f"{name} of the files": digest(file.hashes[name] for file in files) for name in algorithms[:1]}
    return {
        "num_samples": sum(shard.num_samples for shard in shards),
        "num_shards": len(shards),
        "num_bytes": sum(file.num_bytes for file in files),
        "samples": digest(shard.num_samples for shard in shards),
        "basenames": digest(file.basename for file in files),
        "sizes": digest(file.num_bytes for file in files),
        **hashes,
    }


def digest(values: Iterable[object]) -> str:
    """Return a short string that differs if the values do."""
    return hashlib.blake2b("\0".join(map(str, values)).encode(), digest_size=8).hexdigest()


def checked_place(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the position of a state.

    Raises:
        ValueError: If it is not a state of a streaming data set.
    """
    missing = [key for key in _PLACE if key not in state]
    if missing:
        raise ValueError(
            f"This is not the state of a streaming data set: it lacks {', '.join(missing)}; it has"
            f" {', '.join(map(str, state)) or 'nothing'}. Pass what state_dict() returned."
        )
    if state.get("version", VERSION) > VERSION:
        raise ValueError(f"The state has version {state['version']}, which is newer than ours, {VERSION}.")
    epoch, sample = int(state["epoch"]), int(state["sample_in_epoch"])
    # The original library writes this before its first iteration.
    return (0, 0) if epoch < 0 else (epoch, max(0, sample))


def differences(saved: Mapping[str, object], now: Mapping[str, object], what: Mapping[str, str]) -> list[str]:
    """Return the differences between two fingerprints, each with both values."""
    return [
        f"{what.get(key, key)}: {saved[key]} -> {now[key]}" for key in now if key in saved and saved[key] != now[key]
    ]


def mismatch(differing: Sequence[str]) -> FingerprintMismatchError:
    """Return the error that reports a state of other data, or of another order."""
    return FingerprintMismatchError(
        "The state was saved with other data or in another order than this data set has, so its position would refer to"
        f" different samples. Saved -> now: {'; '.join(differing)}. Use the data set that saved it, or pass"
        " strict=False to load_state_dict to continue at this position anyway."
    )


_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_KEPT_ORDERS = 2  # an epoch that ends, and the next one

ORDER_PARTS = {
    "batching": "batching_method and global batch size",
    "shuffle": "shuffle",
    "shuffle_block_size": "shuffle_block_size",
    "epoch_size": "samples of an epoch",
    "sampling": "sampling_method and sampling_granularity",
    "weights": "how many samples of each stream an epoch has",
}
"""The settings that an order depends on, by their keys in a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeding:
    """The part of a state that determines the order; a resume takes it over.

    Args:
        seed: The seed of the order.
        num_canonical_nodes: How many parts of the data are read side by side; ``None``: the first run's number of
            nodes.

    Raises:
        ValueError: If the number of parts is invalid.
    """

    seed: int
    num_canonical_nodes: int | None = None

    def __post_init__(self) -> None:
        parts = self.num_canonical_nodes
        if parts is not None and (isinstance(parts, bool) or parts < 1):
            raise ValueError(f"num_canonical_nodes must be a positive integer or None, not {parts!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Readers:
    """The properties of the readers that an order may depend on.

    Args:
        world: The world of their ranks; the same for each of them.
        batch_size: Samples per batch of one rank.
    """

    world: World = field(default_factory=World)
    batch_size: int = 1

    @classmethod
    def of(cls, world: World, batch_size: int) -> Readers:
        """Return the readers that a reader of `world` belongs to."""
        return cls(world=World(num_ranks=world.num_ranks, ranks_per_node=world.ranks_per_node), batch_size=batch_size)


class Ordering:
    """Creates the order of an epoch.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        streams: The streams, with their weights.
        shuffle: Whether the order is random.
        block_size: How many samples are shuffled together; ``None``: a few shards.
        epoch_size: Samples of an epoch: a number, or a string such as ``"10k"``.
        seeding: The values that the order is drawn from, until a state replaces them.
        sampling_method: Whether samples are drawn again in each epoch.
        sampling_granularity: How many samples are taken from a shard at a time.
        batching_method: Which streams the samples of a batch come from.

    Raises:
        ValueError: If arguments contradict each other.
    """

    def __init__(
        self,
        *,
        shard_sizes: Sequence[Ids],
        streams: Sequence[Stream],
        shuffle: bool,
        block_size: int | None,
        epoch_size: int | str | None,
        seeding: Seeding,
        sampling_method: str,
        sampling_granularity: int,
        batching_method: str,
    ) -> None:
        if batching_method not in BATCHING_METHODS:
            raise ValueError(f"batching_method must be one of {', '.join(BATCHING_METHODS)}, not {batching_method!r}.")
        self.batching_method = batching_method
        self.shuffle = shuffle
        self._shard_sizes = [np.asarray(sizes, np.int64) for sizes in shard_sizes]
        self.block_size = block_size
        self.sampling_method = sampling_method
        self.sampling_granularity = sampling_granularity
        sizes = [int(of_stream.sum()) for of_stream in self._shard_sizes]
        weights = [stream.weight for stream in streams]
        self.shares = shares_of_streams(weights, sizes, epoch_size=_count(epoch_size), seed=seeding.seed)
        self._digest = digest(self.shares.chosen)
        self._orders: dict[tuple[int, Seeding, Readers], EpochOrder] = {}
        if shuffle:
            _warn_of_small_blocks(block_size, self._shard_sizes)
        if not self.is_batched:  # raises if the arguments are wrong
            self._made(0, seeding, Readers())

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_orders": {}}

    def of(self, epoch: int, seeding: Seeding, readers: Readers) -> EpochOrder:
        """Return the order of an epoch."""
        key = (epoch, seeding, readers)
        if key not in self._orders:
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = self._made(epoch, seeding, readers)
        return self._orders[key]

    def _made(self, epoch: int, seeding: Seeding, readers: Readers) -> EpochOrder:
        options: dict[str, Any] = {
            "epoch": epoch,
            "seed": seeding.seed,
            "shuffle": self.shuffle,
            "block_size": self.block_size,
            "num_canonical_nodes": self.num_canonical_nodes(seeding, readers.world.num_nodes),
            "sampling_method": self.sampling_method,
            "sampling_granularity": self.sampling_granularity,
        }
        if self.is_batched:
            return batched_order(
                self._shard_sizes,
                batching_method=self.batching_method,
                shares=self.shares,
                num_samples=readers.world.num_ranks * readers.batch_size,
                **options,
            )
        return epoch_order(self._shard_sizes, chosen=self.shares.chosen, **options)

    def num_positions(self, seeding: Seeding, readers: Readers) -> int:
        """Return the number of positions of every epoch. An order is created only if the number depends on it."""
        if self.is_batched:
            return self.of(0, seeding, readers).num_positions
        return self.shares.epoch_size

    def deal(self, sample: int, seeding: Seeding, world: World, batch_size: int) -> RemainingPositions:
        """Return how the rest of an epoch is dealt to its readers.

        Args:
            sample: The number of samples of the epoch that all ranks have consumed before.
            seeding: The values that the order is drawn from.
            world: The readers.
            batch_size: Samples per batch of one rank.

        Raises:
            ValueError: If the epoch can't be entered there.
        """
        num_positions = self.num_positions(seeding, Readers.of(world, batch_size))
        if self.is_batched:
            check_between_batches(sample, world.num_ranks, batch_size, batching_method=self.batching_method)
        return RemainingPositions(num_positions=num_positions, start=sample, world=world, batch_size=batch_size)

    def num_canonical_nodes(self, seeding: Seeding, num_nodes: int) -> int:
        """Return the number of parts of the data that are read side by side."""
        return seeding.num_canonical_nodes or num_nodes

    def check_batches(self, batch_size: int | None) -> None:
        """Raise ValueError if the order depends on a batch size that is unknown."""
        if self.is_batched and batch_size is None:
            raise ValueError(f"batching_method={self.batching_method!r} needs batch_size: the order depends on it.")

    @property
    def is_batched(self) -> bool:
        """Whether the order depends on the global batch size, so an epoch can only be entered between batches."""
        return self.batching_method != "random"

    def describe(self, readers: Readers) -> dict[str, object]:
        """Return everything that the order depends on besides seed and canonical nodes: plain values for a state."""
        global_batch_size = readers.world.num_ranks * readers.batch_size
        return {
            "batching": f"{self.batching_method} {global_batch_size}" if self.is_batched else self.batching_method,
            "shuffle": self.shuffle,
            "shuffle_block_size": self.block_size if self.shuffle else None,
            "epoch_size": self.shares.epoch_size,
            "sampling": f"{self.sampling_method} {self.sampling_granularity}",
            "weights": self._digest,
        }


def _warn_of_small_blocks(block_size: int | None, shard_sizes: Sequence[Ids]) -> None:
    largest = max(int(sizes.max(initial=0)) for sizes in shard_sizes)
    if block_size is None or block_size >= largest:
        return
    warnings.warn(
        f"Shuffle block size was smaller than shard size for some shards ({block_size} < {largest} samples). Within an"
        " epoch these are not mixed with other shards. Give a shuffle_block_size of several shards.",
        stacklevel=4,  # where the data set is created
    )


def _count(size: int | str | None) -> int | None:
    """Return a number of samples: ``"10k"`` is 10,000."""
    if not isinstance(size, str):
        return size
    num_samples = parse_number(size, _THOUSANDS)
    if num_samples == 0:
        raise ValueError(f"epoch_size={size!r} is not a number of samples. Pass a number, or a text such as '10k'.")
    return num_samples


class OrderedDataset:
    """A data set that reads its samples in its own order."""

    _ordering: Ordering

    @property
    def shuffle(self) -> bool:
        """Whether an epoch's order is random."""
        return self._ordering.shuffle

    @property
    def shuffle_block_size(self) -> int | None:
        """How many samples are shuffled together; ``None``: a few shards."""
        return self._ordering.block_size

    @property
    def sampling_method(self) -> str:
        """Whether each epoch draws other samples of a stream that is read in part."""
        return self._ordering.sampling_method

    @property
    def sampling_granularity(self) -> int:
        """How many samples are taken from a shard at a time, if it is read in part."""
        return self._ordering.sampling_granularity

    @property
    def batching_method(self) -> str:
        """Which streams the samples of a batch come from."""
        return self._ordering.batching_method

    @property
    def epoch_size(self) -> int:
        """The number of samples of an epoch, of all ranks together."""
        return self._ordering.shares.epoch_size
