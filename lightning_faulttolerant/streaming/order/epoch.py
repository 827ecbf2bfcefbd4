"""The order of an epoch: the number of samples of each stream and shard, the shuffle, and the canonical nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_faulttolerant.streaming.order.shuffles import (
    BlockOrder,
    Ints,
    Rows,
    SequentialShardOrder,
    Units,
    key_of,
    permutation,
    units_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """How much of a stream an epoch has. At most one of the three is set. Without any, the stream is read once.

    Args:
        proportion: Relative to the other streams, at least 0. Then every stream has one, and ``epoch_size`` applies.
        repeat: How many times its samples are read, at least 0. May be a fraction.
        choose: How many of its samples are read, at least 0.
    """

    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("proportion", "repeat", "choose")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"A stream has at most one of proportion, repeat and choose, not {given}.")
        for name, value in given.items():
            if value < 0:
                raise ValueError(f"{name} of a stream must be at least 0, not {value}.")

    @property
    def is_given(self) -> bool:
        """Whether the stream has a weight."""
        return not self.proportion is self.repeat is self.choose is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """The shares that result from the weights, with one entry for each stream.

    Args:
        proportions: The stream's proportion of the epoch.
        repeats: How many times the samples of the stream are read, on average.
        chosen: The number of the stream's samples in the epoch.
    """

    proportions: tuple[float, ...]
    repeats: tuple[float, ...]
    chosen: tuple[int, ...]

    @property
    def epoch_size(self) -> int:
        """The number of samples in an epoch."""
        return sum(self.chosen)


def shares_of_streams(
    weights: Sequence[Weight], sizes: Sequence[int], *, epoch_size: int | None = None, seed: int
) -> Shares:
    """Return the number of samples of each stream in an epoch.

    If the proportions don't divide evenly, a few streams get one sample more. The seed selects these streams once for
    all epochs.

    Args:
        weights: One weight for each stream.
        sizes: The number of samples of each stream.
        epoch_size: The samples of all streams together. Only with proportions, or if no stream has a weight.
        seed: The seed of the order.

    Raises:
        ValueError: Proportions are combined with other weights, or other weights with ``epoch_size``.

    Source: ``Stream.apply_weights`` of MosaicML Streaming 0.13, which returns the same numbers.
    """
    if not all(sizes):
        raise ValueError(f"Stream {[*sizes].index(0)} has no samples.")
    if epoch_size is not None and epoch_size < 0:
        raise ValueError(f"epoch_size must be at least 0, not {epoch_size}.")
    relative = [weight.proportion is not None for weight in weights]
    if any(relative) and not all(relative):
        raise ValueError(
            f"Stream {relative.index(True)} has a proportion and stream {relative.index(False)} has none: a proportion"
            " is relative to all streams. Give every stream a proportion, or none."
        )
    num_samples = np.asarray(sizes, np.int64)
    if all(relative):
        parts = np.array([weight.proportion for weight in weights], np.float64)
        if not parts.sum():
            raise ValueError("The proportions of all streams are 0.")
        chosen = _divided(epoch_size or int(num_samples.sum()), parts / parts.sum(), seed)
        return _shares(parts / parts.sum(), chosen, num_samples)
    if epoch_size and not any(weight.is_given for weight in weights):
        parts = num_samples / num_samples.sum()
        return _shares(parts, _divided(epoch_size, parts, seed), num_samples)
    if epoch_size:
        raise ValueError(
            f"epoch_size is {epoch_size}, but repeat and choose of the streams already say how large the epoch is."
            " Leave out epoch_size, or give each stream a proportion instead."
        )
    chosen = np.array([_chosen(weight, size) for weight, size in zip(weights, sizes, strict=True)], np.int64)
    if not chosen.sum():
        raise ValueError("The epoch is empty: repeat or choose of every stream is 0.")
    return _shares(chosen / chosen.sum(), chosen, num_samples)


def _chosen(weight: Weight, size: int) -> int:
    if weight.repeat is not None:
        return int(weight.repeat * size)
    return size if weight.choose is None else weight.choose


def _divided(total: int, parts: Ints, seed: int) -> Ints:
    chosen = (total * parts).astype(np.int64)
    short = total - int(chosen.sum())
    chosen[np.random.default_rng(seed).choice(len(parts), short, False)] += 1
    return chosen


def _shares(proportions: Ints, chosen: Ints, sizes: Ints) -> Shares:
    repeats = chosen / sizes
    return Shares(
        proportions=tuple(proportions.tolist()), repeats=tuple(repeats.tolist()), chosen=tuple(chosen.tolist())
    )


def chosen_of_shards(shard_size: Ints, chosen: int, *, granularity: int, draw: tuple[int, ...], stream: int) -> Ints:
    """Return the number of samples of each shard of a stream in an epoch, for the orders that need no preparation.

    Every shard is read whole as often as it fits. Each shard gets a share of the rest in proportion to its size,
    rounded up or down to the next ``granularity`` samples. This is systematic sampling over the shards in a random
    order. The cost depends on the number of shards, not on the number of samples.

    Args:
        shard_size: The number of samples of each shard.
        chosen: The number of samples of the stream in the epoch.
        granularity: How many samples are taken from a shard at a time. A large value takes a small share from few
            shards.
        draw: The inputs of the choice: the seed, and the epoch if each epoch draws again.
        stream: The number of the stream.
    """
    total = int(shard_size.sum())
    times, rest = divmod(chosen, total)
    of_shards = shard_size * times
    if not rest:
        return of_shards
    order = permutation(key_of("shares of shards", *draw, stream), len(shard_size))
    sizes = [int(size) for size in shard_size[order]]
    grains = [-(-size // granularity) for size in sizes]
    wanted, available = -(-rest // granularity), sum(grains)
    # Of all shards' grains in a row, take every (available / wanted)-th, starting at a random one.
    before, taken = key_of("first grain", *draw, stream) % available, []
    for grain in grains:
        after = before + grain * wanted
        taken.append(after // available - before // available)
        before = after
    parts = [min(size, count * granularity) for size, count in zip(sizes, taken, strict=True)]
    of_shards[order] += np.array(_fitted(parts, sizes, rest), np.int64)
    return of_shards


def _fitted(parts: list[int], sizes: list[int], total: int) -> list[int]:
    """Add or remove samples to correct the sum where a shard's last grain is smaller."""
    excess = sum(parts) - total
    for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if not excess:
            break
        changed = max(part - excess, 0) if excess > 0 else min(part - excess, size)
        excess -= part - changed
        parts[place] = changed
    return parts


class EpochOrder(Protocol):
    """The sample at each position of an epoch. It is a pure function: its state does not affect the result."""

    @property
    def num_positions(self) -> int:
        """The number of positions in the whole epoch, repeats included."""
        ...

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions, counted over all shards of all streams.

        Request many in one call: a call costs microseconds, a sample in it some nanoseconds.

        Args:
            positions: Any positions, in any order, from 0 to ``num_positions - 1``.
        """
        ...


def epoch_order(
    shard_sizes: Sequence[Sequence[int] | Ints],
    *,
    epoch: int,
    seed: int = 9176,
    shuffle: bool = False,
    block_size: int | None = None,
    num_canonical_nodes: int = 1,
    chosen: Sequence[int] | None = None,
    sampling_method: str = "balanced",
    sampling_granularity: int = 1,
) -> EpochOrder:
    """Return the order of an epoch.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        epoch: The epoch, from 0.
        seed: The seed of the order.
        shuffle: Whether the samples are shuffled.
        block_size: How many samples are shuffled together, see `BlockOrder`.
        num_canonical_nodes: How many parts of the data set are read side by side.
        chosen: The number of samples of each stream in the epoch, see `shares_of_streams`. By default each sample once.
        sampling_method: ``"balanced"`` (each epoch draws other samples of a stream that is read in part) or
            ``"fixed"``.
        sampling_granularity: How many samples are taken at a time from a shard that is read in part.
    """
    _check(locals())
    sizes = [np.asarray(of_stream, np.int64) for of_stream in shard_sizes]
    chosen = [int(of_stream.sum()) for of_stream in sizes] if chosen is None else chosen
    draw = (seed, epoch) if sampling_method == "balanced" else (seed,)
    units = _units(sizes, chosen, draw, granularity=sampling_granularity)
    if not shuffle:
        return SequentialShardOrder(units, Rows(num_samples=sum(chosen), num_rows=num_canonical_nodes))
    return BlockOrder(units, seed=seed, epoch=epoch, num_canonical_nodes=num_canonical_nodes, block_size=block_size)


def _check(given: dict[str, object]) -> None:
    for name in ("sampling_granularity", "num_canonical_nodes", "block_size"):
        value = given[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}.")
    for name in ("seed", "epoch"):
        value = given[name]
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, not {value!r}.")
    if given["sampling_method"] not in ("balanced", "fixed"):
        raise ValueError(f"sampling_method must be 'balanced' or 'fixed', not {given['sampling_method']!r}.")


def _units(shard_sizes: Sequence[Ints], chosen: Sequence[int], draw: tuple[int, ...], *, granularity: int) -> Units:
    """Return the units that an epoch reads, without an array of all samples."""
    of_shards = [
        chosen_of_shards(sizes, count, granularity=granularity, draw=draw, stream=stream)
        for stream, (sizes, count) in enumerate(zip(shard_sizes, chosen, strict=True))
    ]
    return units_of(np.concatenate(shard_sizes), np.concatenate(of_shards), draw=draw)
