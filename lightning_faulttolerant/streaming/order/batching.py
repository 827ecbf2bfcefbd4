"""Batches that have a fixed share of each stream, or samples of one stream only.

Then the order depends on the global batch size: its positions are those of one global batch after the other, and an
epoch can be entered only between two of them. Samples that don't fill a last batch are left out, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.order.deal import Deal, nodes_of
from lightning_faulttolerant.streaming.order.draws import Ints, key_of, permutation
from lightning_faulttolerant.streaming.order.epoch import DEFAULT, EpochOrder, epoch_order
from lightning_faulttolerant.streaming.order.mixing import Shares
from lightning_faulttolerant.streaming.order.originals import default_block_size
from lightning_faulttolerant.streaming.order.units import grouped
from lightning_faulttolerant.streaming.world import World

BATCHING_METHODS = ("random", "stratified", "per_stream")


def batched_order(
    shard_sizes: Sequence[Sequence[int] | Ints],
    *,
    batching_method: str,
    shares: Shares,
    world: World,
    batch_size: int,
    epoch: int,
    seed: int = 9176,
    shuffle: bool = False,
    algorithm: str | None = None,
    sampling_method: str = "balanced",
    **settings: Any,
) -> EpochOrder:
    """Return the order of an epoch whose batches are of the streams in a certain way.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        batching_method: ``"stratified"``: every global batch has the same number of samples of each stream, in
            proportion to their shares of the epoch. ``"per_stream"``: every global batch is of one stream.
        shares: Of the streams in an epoch.
        world: Who reads; of it only an order of the original library depends on more than the number of ranks.
        batch_size: Samples of one batch of one rank.
        epoch: As in `epoch_order`, for each stream by itself; so do those that follow.
        seed: Of the order.
        shuffle: Whether samples are shuffled.
        algorithm: How; those of the original library give its batches too.
        sampling_method: ``"balanced"`` or ``"fixed"``.
        settings: The others of `epoch_order`; a ``block_size`` is that of all streams together.

    Raises:
        ValueError: The method is unknown, or a stream has too few samples for a batch, or too small a share.
    """
    if batching_method not in BATCHING_METHODS[1:]:
        raise ValueError(f"batching_method must be one of {', '.join(BATCHING_METHODS)}, not {batching_method!r}.")
    is_original = algorithm not in (None, DEFAULT)
    of_streams = {"epoch": epoch, "seed": seed, "shuffle": shuffle, "algorithm": algorithm, **settings}
    _, ranks_per_node = nodes_of(world)
    one_node = World(num_ranks=ranks_per_node, ranks_per_node=ranks_per_node)
    readers = world if batching_method == "per_stream" else one_node
    orders = _of_streams(
        shard_sizes, shares, readers if is_original else None, sampling_method=sampling_method, **of_streams
    )
    samples = world.num_ranks * batch_size
    if batching_method == "stratified":
        return StratifiedOrder(orders, portions(shares.proportions, samples))
    drawn = seed + epoch if shuffle and sampling_method == "balanced" else seed
    return PerStreamOrder(
        orders, samples, drawn=drawn, key=None if is_original else key_of("streams of batches", drawn)
    )


def _of_streams(
    shard_sizes: Sequence[Sequence[int] | Ints], shares: Shares, filled_for: World | None, **settings: Any
) -> list[EpochOrder]:
    """The orders of the streams; those of the original library are filled for who reads."""
    block_size = settings.pop("block_size", None)
    if filled_for is not None:
        settings["num_nodes"], _ = nodes_of(filled_for)
        block_size = block_size or default_block_size(settings.get("num_canonical_nodes", 1))
    orders: list[EpochOrder] = []
    first = 0
    for sizes, chosen, proportion in zip(shard_sizes, shares.chosen, shares.proportions, strict=True):
        of_stream = None if block_size is None else max(1, int(block_size * proportion))
        order = epoch_order([sizes], chosen=[chosen], block_size=of_stream, **settings)
        if filled_for is not None:
            order = FilledOrder(order, filled_for)
        orders.append(OffsetOrder(order, first))
        first += int(np.sum(sizes))
    return orders


def batched_deal(
    *, batching_method: str, algorithm: str | None, num_positions: int, start: int, world: World, batch_size: int
) -> Deal:
    """Return how the batches of a `batched_order` are dealt.

    Raises:
        ValueError: ``start`` is inside a global batch, so that samples would be lost or read twice.
    """
    samples = world.num_ranks * batch_size
    if start % samples:
        raise ValueError(
            f"An epoch in {batching_method} batches can't continue from sample {start}: its global batches have"
            f" {samples} samples ({world.num_ranks} ranks, batch_size={batch_size}), and this is inside of one."
            " Continue with the global batch size that the run began with."
        )
    is_in_turn = batching_method == "stratified" and algorithm not in (None, DEFAULT)
    return Deal(num_positions=num_positions, start=start, world=world, batch_size=batch_size, is_in_turn=is_in_turn)


def portions(proportions: Sequence[float], num_samples: int) -> tuple[int, ...]:
    """Return how many samples of each stream a global batch has: largest remainders.

    Raises:
        ValueError: A stream would have none.

    Source: ``batching/stratified.py`` of MosaicML Streaming 0.13.
    """
    exact = num_samples * np.array(proportions)
    counts = np.array([int(proportion * num_samples) for proportion in proportions])
    counts[np.flip(np.argsort(exact - counts))[: num_samples - int(counts.sum())]] += 1
    if not counts.all():
        stream = int(np.argmin(counts))
        raise ValueError(
            f"Stream {stream} is {proportions[stream]:.2%} of the epoch, which is no sample of a global batch of"
            f" {num_samples}. Pass a larger batch_size, or a larger proportion of this stream."
        )
    return tuple(counts.tolist())


class OffsetOrder:
    """The order of one stream, with ids counted over all.

    Args:
        order: Of the stream.
        first: The id of its first sample.
    """

    def __init__(self, order: EpochOrder, first: int) -> None:
        self._order = order
        self._first = first

    @property
    def num_positions(self) -> int:
        """Of the stream's part of the epoch."""
        return self._order.num_positions

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        return self._first + self._order.sample_ids(positions)


class FilledOrder:
    """An order with so many samples once more that all ranks have equally many: as the original's last step has them.

    Args:
        order: Which is filled.
        world: The ranks that read it.
    """

    def __init__(self, order: EpochOrder, world: World) -> None:
        self._order = order
        self._deals = [
            Deal(num_positions=order.num_positions, world=replace(world, rank=rank), batch_size=1)
            for rank in range(world.num_ranks)
        ]

    @property
    def num_positions(self) -> int:
        """With the samples that come once more."""
        return self._deals[0].num_samples * len(self._deals)

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        positions = np.array(positions, np.int64)
        for where in np.flatnonzero(positions >= self._order.num_positions):
            position = int(positions[where])
            num_nodes, ranks_per_node = nodes_of(self._deals[0].world)
            rank = position % num_nodes * ranks_per_node + position // num_nodes % ranks_per_node
            positions[where] = self._deals[rank].positions(position // len(self._deals))[0]
        return self._order.sample_ids(positions)


class StratifiedOrder:
    """Global batches with the same number of samples of each stream, as many as all streams have samples for.

    Args:
        orders: Of the streams.
        portions: How many samples of each stream a global batch has.
    """

    def __init__(self, orders: Sequence[EpochOrder], portions: Sequence[int]) -> None:
        self._orders = orders
        self._portions = np.array(portions, np.int64)
        self._stops = np.cumsum(self._portions)
        self._num_batches = min(order.num_positions // portion for order, portion in zip(orders, portions, strict=True))

    @property
    def num_positions(self) -> int:
        """Of full batches."""
        return self._num_batches * int(self._stops[-1])

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        batches, places = np.divmod(np.asarray(positions, np.int64), self._stops[-1])
        streams = np.searchsorted(self._stops, places, side="right")
        within = batches * self._portions[streams] + places - (self._stops - self._portions)[streams]
        return _ids_of(self._orders, streams, within)


class PerStreamOrder:
    """Global batches of one stream each, those of all streams in random order; keeps a number for each batch.

    Args:
        orders: Of the streams.
        num_samples: Of a global batch.
        drawn: What the order of the streams is drawn from, as the original draws it.
        key: What it is drawn from otherwise.

    Raises:
        ValueError: A stream has too few samples for a global batch.

    Source: ``batching/per_stream.py`` of MosaicML Streaming 0.13.
    """

    def __init__(self, orders: Sequence[EpochOrder], num_samples: int, *, drawn: int, key: int | None) -> None:
        self._orders = orders
        self._num_samples = num_samples
        counts = [order.num_positions // num_samples for order in orders]
        if not all(counts):
            raise ValueError(
                f"Stream {counts.index(0)} has {orders[counts.index(0)].num_positions} samples in an epoch, too few for"
                f" a global batch of {num_samples}: none of them would be read. Pass a smaller batch_size."
            )
        self._streams = np.repeat(np.arange(len(counts)), counts)
        if key is None:
            np.random.default_rng(drawn).shuffle(self._streams)
        else:
            self._streams = self._streams[permutation(key, len(self._streams))]
        # Of the batches of its stream, which each is.
        order = np.argsort(self._streams, kind="stable")
        self._numbers = np.empty(len(order), np.int64)
        self._numbers[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def num_positions(self) -> int:
        """Of full batches."""
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
