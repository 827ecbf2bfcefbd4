"""The positions that each rank reads in each step, and batches that mix streams in fixed shares.

A global step has the same samples in every world. It takes the next ``num_ranks * batch_size`` positions. Node ``a``
takes the positions that are ``a`` modulo the number of nodes, and deals them to its ranks in turn. Of a rank's ``W``
workers, worker ``w`` reads the steps ``w``, ``w + W``, ...

Batches can have a fixed share of each stream, or samples of one stream only. The order then depends on the global batch
size. Its positions are one global batch after the other, and an epoch can start or resume only between two of them.
Samples that don't fill a last batch are left out, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.order.epoch import EpochOrder, Shares, epoch_order
from lightning_faulttolerant.streaming.order.shuffles import Ints, grouped, key_of, permutation
from lightning_faulttolerant.streaming.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingPositions:
    """The rest of an epoch, dealt to one rank.

    All ranks get equally many samples in every step. If the remaining positions don't divide evenly, some ranks repeat
    a sample of their node in the last step. There are fewer repeats than ranks, and no sample is left out.

    Args:
        num_positions: The number of positions in the whole epoch.
        start: The number of positions that all ranks together had consumed before.
        world: The reader.
        batch_size: The number of samples in one batch of one rank.

    Source: the partition of MosaicML Streaming 0.13 (``orig``, ``relaxed``), without its tables.
    """

    num_positions: int
    start: int = 0
    world: World
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}.")
        if not 0 <= self.start <= self.num_positions:
            raise ValueError(
                f"An epoch of {self.num_positions} positions can't continue from position {self.start}. The state is"
                " that of another data set or of another epoch_size."
            )

    @property
    def num_samples(self) -> int:
        """The number of samples that each rank reads from here to the end of the epoch."""
        return -(-(self.num_positions - self.start) // self.world.num_ranks)

    @property
    def num_steps(self) -> int:
        """The number of steps from here to the end of the epoch. The last one may have a smaller batch."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_full_steps(self) -> int:
        """The number of steps from here that have a position for each sample, without repeats."""
        return (self.num_positions - self.start) // self._of_step

    def positions(self, step: int) -> Ints:
        """Return the positions of the batch of this rank in a step, counted from ``start``, in order."""
        return self._full(np.array([step]))[0] if step < self.num_full_steps else self._last(step)

    def positions_of_worker(self, first: int, count: int) -> list[Ints]:
        """Return the positions of the next ``count`` batches of this worker, which has read ``first`` batches.

        Fewer are returned at the end of the epoch. Concatenate them to request their samples in one call.
        """
        world = self.world
        steps = range(world.worker + first * world.num_workers, self.num_steps, world.num_workers)[:count]
        full = range(steps.start, min(steps.stop, self.num_full_steps), steps.step)
        return [*self._full(np.array(full, np.int64)), *map(self._last, steps[len(full) :])]

    def _full(self, steps: Ints) -> Ints:
        """Return the positions in full steps: a row for each step, a column for each sample."""
        num_nodes, ranks_per_node = self.world.num_nodes, self.world.ranks_per_node
        of_batch = np.arange(self.batch_size, dtype=np.int64)
        node, rank_of_node = divmod(self.world.rank, ranks_per_node)
        base = self.start + steps[:, None] * self._of_step
        positions: Ints = base + (node - base) % num_nodes + num_nodes * (rank_of_node + ranks_per_node * of_batch)
        return positions

    @property
    def _of_step(self) -> int:
        return self.world.num_ranks * self.batch_size

    def _last(self, step: int) -> Ints:
        """Return the positions in a step that is not full and may repeat some."""
        num_nodes, ranks_per_node = self.world.num_nodes, self.world.ranks_per_node
        node, rank_of_node = divmod(self.world.rank, ranks_per_node)
        first = self.start + (node - self.start) % num_nodes
        of_node = max(0, -(-(self.num_positions - first) // num_nodes))
        begin = step * self.batch_size
        places = rank_of_node + ranks_per_node * np.arange(begin, min(begin + self.batch_size, self.num_samples))
        missing = self.num_samples * ranks_per_node - of_node
        if not of_node:  # fewer positions than nodes: this node has no samples
            return self.start + places % (self.num_positions - self.start)
        has_enough = ranks_per_node + missing - 1 <= of_node
        again = places - ranks_per_node - missing + 1 if has_enough else places % of_node
        return first + num_nodes * np.where(places < of_node, places, again)


BATCHING_METHODS = ("random", "stratified", "per_stream")


def batched_order(
    shard_sizes: Sequence[Sequence[int] | Ints],
    *,
    batching_method: str,
    shares: Shares,
    num_samples: int,
    epoch: int,
    seed: int = 9176,
    shuffle: bool = False,
    sampling_method: str = "balanced",
    **settings: Any,
) -> EpochOrder:
    """Return the order of an epoch with stratified or per-stream batches.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        batching_method: ``"stratified"``: every global batch has the same number of samples of each stream, in
            proportion to the streams' shares of the epoch. ``"per_stream"``: every global batch is of one stream.
        shares: The shares of the streams in an epoch.
        num_samples: The number of samples in a global batch.
        epoch: As in `epoch_order`, for each stream separately. The same holds for the arguments below.
        seed: The seed of the order.
        shuffle: Whether samples are shuffled.
        sampling_method: ``"balanced"`` or ``"fixed"``.
        settings: The other arguments of `epoch_order`. A ``block_size`` is that of all streams together.

    Raises:
        ValueError: A stream has too few samples for a batch, or too small a share.
    """
    settings |= {"epoch": epoch, "seed": seed, "shuffle": shuffle, "sampling_method": sampling_method}
    orders = _of_streams(shard_sizes, shares, **settings)
    if batching_method == "stratified":
        return StratifiedOrder(orders, portions(shares.proportions, num_samples))
    drawn = seed + epoch if shuffle and sampling_method == "balanced" else seed
    return PerStreamOrder(orders, num_samples, key=key_of("streams of batches", drawn))


def _of_streams(
    shard_sizes: Sequence[Sequence[int] | Ints], shares: Shares, *, block_size: int | None = None, **settings: Any
) -> list[EpochOrder]:
    """Return the orders of the streams."""
    orders: list[EpochOrder] = []
    first = 0
    for sizes, chosen, proportion in zip(shard_sizes, shares.chosen, shares.proportions, strict=True):
        of_stream = None if block_size is None else max(1, int(block_size * proportion))
        order = epoch_order([sizes], chosen=[chosen], block_size=of_stream, **settings)
        orders.append(OffsetOrder(order, first))
        first += int(np.sum(sizes))
    return orders


def check_between_batches(start: int, num_ranks: int, batch_size: int, *, batching_method: str) -> None:
    """Raise ValueError if ``start`` is inside a global batch: samples would be lost or read twice."""
    samples = num_ranks * batch_size
    if start % samples:
        raise ValueError(
            f"An epoch in {batching_method} batches can't continue from sample {start}: its global batches have"
            f" {samples} samples ({num_ranks} ranks, batch_size={batch_size}), and this is inside of one."
            " Continue with the global batch size that the run began with."
        )


def portions(proportions: Sequence[float], num_samples: int) -> tuple[int, ...]:
    """Return the number of samples of each stream in a global batch, by largest remainders.

    Raises:
        ValueError: A stream would have no samples.

    Source: ``batching/stratified.py`` of MosaicML Streaming 0.13.
    """
    exact = num_samples * np.array(proportions)
    counts = np.array([int(proportion * num_samples) for proportion in proportions])
    counts[np.flip(np.argsort(exact - counts))[: num_samples - int(counts.sum())]] += 1
    if not counts.all():
        stream = int(np.argmin(counts))
        raise ValueError(
            f"Stream {stream} is {proportions[stream]:.2%} of the epoch, which is less than a sample of a global batch"
            f" of {num_samples}. Pass a larger batch_size, or a larger proportion of this stream."
        )
    return tuple(counts.tolist())


class OffsetOrder:
    """The order of one stream, with ids counted over all streams.

    Args:
        order: The order of the stream.
        first: The id of the stream's first sample.
    """

    def __init__(self, order: EpochOrder, first: int) -> None:
        self._order = order
        self._first = first

    @property
    def num_positions(self) -> int:
        """The number of positions in the stream's part of the epoch."""
        return self._order.num_positions

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        return self._first + self._order.sample_ids(positions)


class StratifiedOrder:
    """Global batches with a fixed number of samples of each stream, until one stream lacks samples for another batch.

    Args:
        orders: The orders of the streams.
        portions: The number of samples of each stream in a global batch.
    """

    def __init__(self, orders: Sequence[EpochOrder], portions: Sequence[int]) -> None:
        self._orders = orders
        self._portions = np.array(portions, np.int64)
        self._stops = np.cumsum(self._portions)
        self._num_batches = min(order.num_positions // portion for order, portion in zip(orders, portions, strict=True))

    @property
    def num_positions(self) -> int:
        """The number of positions in full batches."""
        return self._num_batches * int(self._stops[-1])

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        batches, places = np.divmod(np.asarray(positions, np.int64), self._stops[-1])
        streams = np.searchsorted(self._stops, places, side="right")
        within = batches * self._portions[streams] + places - (self._stops - self._portions)[streams]
        return _ids_of(self._orders, streams, within)


class PerStreamOrder:
    """Global batches of one stream each, in random order over all streams. Keeps a number for each batch.

    Args:
        orders: The orders of the streams.
        num_samples: The number of samples in a global batch.
        key: The key for the order of the streams.

    Raises:
        ValueError: A stream has too few samples for a global batch.

    Source: ``batching/per_stream.py`` of MosaicML Streaming 0.13.
    """

    def __init__(self, orders: Sequence[EpochOrder], num_samples: int, *, key: int) -> None:
        self._orders = orders
        self._num_samples = num_samples
        counts = [order.num_positions // num_samples for order in orders]
        if not all(counts):
            raise ValueError(
                f"Stream {counts.index(0)} has {orders[counts.index(0)].num_positions} samples in an epoch, too few for"
                f" a global batch of {num_samples}: none of them would be read. Pass a smaller batch_size."
            )
        self._streams = np.repeat(np.arange(len(counts)), counts)
        self._streams = self._streams[permutation(key, len(self._streams))]
        # The number of each batch among the batches of its stream.
        order = np.argsort(self._streams, kind="stable")
        self._numbers = np.empty(len(order), np.int64)
        self._numbers[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def num_positions(self) -> int:
        """The number of positions in full batches."""
        return len(self._streams) * self._num_samples

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        batches, places = np.divmod(np.asarray(positions, np.int64), self._num_samples)
        return _ids_of(self._orders, self._streams[batches], self._numbers[batches] * self._num_samples + places)


def _ids_of(orders: Sequence[EpochOrder], streams: Ints, positions: Ints) -> Ints:
    ids = np.empty(len(positions), np.int64)
    for stream, where in grouped(streams):
        ids[where] = orders[stream].sample_ids(positions[where])
    return ids
