"""The order of an epoch, made of what is read, how it is shuffled, and its canonical nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lightning_faulttolerant.streaming.order.blocks import BlockOrder, SequentialOrder
from lightning_faulttolerant.streaming.order.draws import Ints
from lightning_faulttolerant.streaming.order.mixing import chosen_of_shards
from lightning_faulttolerant.streaming.order.rows import EvenRows
from lightning_faulttolerant.streaming.order.units import Units, units_of

DEFAULT = "blocks"


class EpochOrder(Protocol):
    """Which sample stands at which position of an epoch. A pure function: it has no state that matters."""

    @property
    def num_positions(self) -> int:
        """Of the whole epoch, with what an order of the original library repeats."""
        ...

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions, counted over all shards of all streams.

        Ask for many at once: a call costs microseconds, a sample in it some nanoseconds.

        Args:
            positions: Any, in any order, from 0 to ``num_positions - 1``.
        """
        ...


def epoch_order(
    shard_sizes: Sequence[Sequence[int] | Ints],
    *,
    epoch: int,
    seed: int = 9176,
    shuffle: bool = False,
    algorithm: str | None = None,
    block_size: int | None = None,
    num_canonical_nodes: int = 1,
    num_nodes: int = 1,
    chosen: Sequence[int] | None = None,
    sampling_method: str = "balanced",
    sampling_granularity: int = 1,
) -> EpochOrder:
    """Return the order of an epoch.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        epoch: Which one, from 0.
        seed: Of the order.
        shuffle: Whether the samples are shuffled.
        algorithm: ``"blocks"``, which ``None`` stands for, or one of the original library's.
        block_size: What the algorithm takes for a block, in samples.
        num_canonical_nodes: How many parts of the data set are read side by side.
        num_nodes: How many nodes read; only some orders of the original library depend on it.
        chosen: How many samples of each stream the epoch has, see `shares_of_streams`; by default each once.
        sampling_method: ``"balanced"`` (other samples of a stream that is read in part in each epoch) or ``"fixed"``.
        sampling_granularity: How many samples are taken from a shard at a time, where it is read in part.
    """
    _check(locals())
    if chosen is None:
        chosen = [int(np.sum(sizes)) for sizes in shard_sizes]
    draw = (seed, epoch) if shuffle and sampling_method == "balanced" else (seed,)
    units = _units(shard_sizes, chosen, granularity=sampling_granularity, draw=draw)
    if shuffle:
        return BlockOrder(units, seed=seed, epoch=epoch, num_canonical_nodes=num_canonical_nodes, block_size=block_size)
    return SequentialOrder(units, EvenRows(num_samples=units.num_samples, num_rows=num_canonical_nodes))


def _check(given: dict[str, object]) -> None:
    for name in ("sampling_granularity", "num_canonical_nodes", "num_nodes", "block_size"):
        value = given[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}.")
    for name in ("seed", "epoch"):
        value = given[name]
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, not {value!r}.")
    if given["sampling_method"] not in ("balanced", "fixed"):
        raise ValueError(f"sampling_method must be 'balanced' or 'fixed', not {given['sampling_method']!r}.")
    if given["algorithm"] not in (None, DEFAULT):
        raise ValueError(f"shuffle_algo must be {DEFAULT!r}, not {given['algorithm']!r}.")


def _units(
    shard_sizes: Sequence[Sequence[int] | Ints],
    chosen: Sequence[int],
    *,
    granularity: int,
    draw: tuple[int, ...],
) -> Units:
    sizes = [np.asarray(of_stream, np.int64) for of_stream in shard_sizes]
    of_shards = [
        chosen_of_shards(size, count, granularity=granularity, draw=draw, stream=stream)
        for stream, (size, count) in enumerate(zip(sizes, chosen, strict=True))
    ]
    return units_of(np.concatenate(sizes), np.concatenate(of_shards), draw=draw)
