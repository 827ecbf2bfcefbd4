"""The order of a streaming data set's epochs, as its arguments say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.order import (
    EpochOrder,
    default_canonical_nodes,
    epoch_order,
    kept_nodes,
    shares_of_streams,
)
from lightning_faulttolerant.streaming.order.epoch import DEFAULT
from lightning_faulttolerant.streaming.order.rows import PaddedRows
from lightning_faulttolerant.streaming.shards import Ids
from lightning_faulttolerant.streaming.state import digest
from lightning_faulttolerant.streaming.stream import Stream
from lightning_faulttolerant.streaming.world import World

_THOUSANDS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
_KEPT_ORDERS = 2  # an epoch that ends, and the next one

WHAT = {
    "shuffle": "shuffle",
    "shuffle_algo": "shuffle_algo",
    "shuffle_block_size": "shuffle_block_size",
    "epoch_size": "samples of an epoch",
    "sampling": "sampling_method and sampling_granularity",
    "weights": "how many samples of each stream an epoch has",
}
"""What an order depends on, by its key in a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeding:
    """What a state says of the order, and a resume takes over.

    Args:
        seed: Of the order.
        num_canonical_nodes: How many parts of the data are read side by side; ``None``: as the first run has nodes.
        initial_nodes: The number of nodes of the first run, where a state has said it.
    """

    seed: int
    num_canonical_nodes: int | None = None
    initial_nodes: int | None = None


class Ordering:
    """Makes the order of an epoch.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        streams: With their weights.
        shuffle: Whether the order is random.
        algorithm: How it is shuffled.
        block_size: What the algorithm takes for a block, in samples.
        epoch_size: Samples of an epoch: a number, or a text such as ``"10k"``.
        seeding: What the order is drawn from, until a state says otherwise.
        sampling_method: Whether samples are drawn anew in each epoch.
        sampling_granularity: How many samples are taken from a shard at a time.
        batching_method: Of which streams the samples of a batch are.

    Raises:
        ValueError: If arguments contradict each other.
    """

    def __init__(
        self,
        *,
        shard_sizes: Sequence[Ids],
        streams: Sequence[Stream],
        shuffle: bool,
        algorithm: str | None,
        block_size: int | None,
        epoch_size: int | str | None,
        seeding: Seeding,
        sampling_method: str,
        sampling_granularity: int,
        batching_method: str,
    ) -> None:
        if batching_method != "random":
            raise ValueError(
                f"batching_method={batching_method!r} is not known here: batches are mixed of all streams ('random')."
                " Make a data set and a loader for each stream if a batch must be of one."
            )
        self.shuffle = shuffle
        self.algorithm = algorithm
        self._shard_sizes = [np.asarray(sizes, np.int64) for sizes in shard_sizes]
        self._block_size = block_size
        self._method = sampling_method
        self._granularity = sampling_granularity
        sizes = [int(of_stream.sum()) for of_stream in self._shard_sizes]
        weights = [stream.weight for stream in streams]
        self.shares = shares_of_streams(weights, sizes, epoch_size=_count(epoch_size), seed=seeding.seed)
        self._orders: dict[tuple[int, Seeding, int], EpochOrder] = {}
        self._made(0, seeding, 1, shuffle=shuffle and not self.is_original)  # says what is wrong with the arguments

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_orders": {}}

    def of(self, epoch: int, seeding: Seeding, world: World) -> EpochOrder:
        """Return the order of an epoch."""
        key = (epoch, seeding, world.num_nodes)
        if key not in self._orders:
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = self._made(epoch, seeding, world.num_nodes, shuffle=self.shuffle)
        return self._orders[key]

    def _made(self, epoch: int, seeding: Seeding, num_nodes: int, *, shuffle: bool) -> EpochOrder:
        return epoch_order(
            self._shard_sizes,
            epoch=epoch,
            seed=seeding.seed,
            shuffle=shuffle,
            algorithm=self.algorithm,
            block_size=self._block_size,
            num_canonical_nodes=self.num_canonical_nodes(seeding, num_nodes),
            num_nodes=self.initial_nodes(seeding, num_nodes) or num_nodes,
            chosen=self.shares.chosen,
            sampling_method=self._method,
            sampling_granularity=self._granularity,
        )

    def num_positions(self, seeding: Seeding, num_nodes: int) -> int:
        """Return how many positions every epoch has, without making its order."""
        if not self.is_original:
            return self.shares.epoch_size
        return PaddedRows(
            num_samples=self.shares.epoch_size,
            num_rows=self.num_canonical_nodes(seeding, num_nodes),
            num_nodes=self.initial_nodes(seeding, num_nodes) or num_nodes,
        ).num_positions

    def num_canonical_nodes(self, seeding: Seeding, num_nodes: int) -> int:
        """Return how many parts of the data are read side by side."""
        return seeding.num_canonical_nodes or default_canonical_nodes(self.algorithm, num_nodes)

    def initial_nodes(self, seeding: Seeding, num_nodes: int) -> int | None:
        """Return the number of nodes that batches are dealt to first, where the original library does so."""
        if not self.is_original:
            return None
        return kept_nodes(
            num_canonical_nodes=self.num_canonical_nodes(seeding, num_nodes),
            num_nodes=num_nodes,
            initial_nodes=seeding.initial_nodes,
        )

    @property
    def is_original(self) -> bool:
        """Whether the order is the original library's, bit for bit."""
        return self.algorithm not in (None, DEFAULT)

    def describe(self) -> dict[str, Any]:
        """Return what the order depends on, beside seed and canonical nodes: plain values for a state."""
        return {
            "shuffle": self.shuffle,
            "shuffle_algo": self.algorithm or DEFAULT,
            "shuffle_block_size": self._block_size if self.shuffle else None,
            "epoch_size": self.shares.epoch_size,
            "sampling": f"{self._method} {self._granularity}",
            "weights": digest(self.shares.chosen),
        }


def _count(size: int | str | None) -> int | None:
    """Return a number of samples: ``"10k"`` is 10,000."""
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", size.strip().lower().replace(",", ""))
    if match is None:
        raise ValueError(f"epoch_size={size!r} is no number of samples. Give a number, or a text such as '10k'.")
    return int(float(match[1]) * 1000 ** _THOUSANDS[match[2]])
