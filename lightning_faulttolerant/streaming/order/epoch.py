"""The order of an epoch, from the samples that are read, the shuffle, and the canonical nodes.

Streams that are read in part, or more than once, are drawn as the original library draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_faulttolerant.streaming.order.blocks import BlockOrder, SequentialShardOrder, Units, units_of
from lightning_faulttolerant.streaming.order.draws import EvenRows, Ints, PaddedRows
from lightning_faulttolerant.streaming.order.mixing import chosen_of_shards
from lightning_faulttolerant.streaming.order.originals import SHUFFLES, TableOrder, shuffled

DEFAULT = "blocks"


class EpochOrder(Protocol):
    """The sample at each position of an epoch. It is a pure function: its state does not affect the result."""

    @property
    def num_positions(self) -> int:
        """The number of positions in the whole epoch, including those that an order of the original library repeats."""
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
        epoch: The epoch, from 0.
        seed: The seed of the order.
        shuffle: Whether the samples are shuffled.
        algorithm: ``"blocks"`` (the same as ``None``, see `BlockOrder`), or the name of an algorithm of the original
            library. With such a name, the order is that of the original library, with and without ``shuffle``.
        block_size: The block size of the algorithm, in samples.
        num_canonical_nodes: How many parts of the data set are read side by side.
        num_nodes: The number of nodes that read. Only some orders of the original library depend on it.
        chosen: The number of samples of each stream in the epoch, see `shares_of_streams`. By default each sample once.
        sampling_method: ``"balanced"`` (each epoch draws other samples of a stream that is read in part) or
            ``"fixed"``.
        sampling_granularity: How many samples are taken at a time from a shard that is read in part.
    """
    _check(locals())
    sizes = [np.asarray(of_stream, np.int64) for of_stream in shard_sizes]
    chosen = [int(of_stream.sum()) for of_stream in sizes] if chosen is None else chosen
    draw = Draw(
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        is_balanced=sampling_method == "balanced",
        granularity=sampling_granularity,
    )
    if algorithm is None or algorithm == DEFAULT:
        units = _units(sizes, chosen, draw)
        if not shuffle:
            return SequentialShardOrder(units, EvenRows(num_samples=sum(chosen), num_rows=num_canonical_nodes))
        return BlockOrder(units, seed=seed, epoch=epoch, num_canonical_nodes=num_canonical_nodes, block_size=block_size)
    rows = PaddedRows(num_samples=sum(chosen), num_rows=num_canonical_nodes, num_nodes=num_nodes)
    return _of_the_original(sizes, chosen, draw, rows, algorithm=algorithm, block_size=block_size)


def _of_the_original(
    sizes: Sequence[Ints],
    chosen: Sequence[int],
    draw: Draw,
    rows: PaddedRows,
    *,
    algorithm: str,
    block_size: int | None,
) -> EpochOrder:
    are_whole = all(int(of_stream.sum()) == count for of_stream, count in zip(sizes, chosen, strict=True))
    units = _units(sizes, chosen, draw) if are_whole else None
    if units is not None and not draw.shuffle:
        return SequentialShardOrder(units, rows)
    # If every shard is read once, a sample's place is its id, so an array of all ids is not needed.
    of_units, ids = resampled(sizes, chosen, draw) if units is None else (units.size, None)
    if ids is not None and not draw.shuffle:
        return TableOrder(ids, rows)
    places = shuffled(
        algorithm,
        of_units,
        num_canonical_nodes=rows.num_rows,
        seed=draw.seed,
        epoch=draw.epoch,
        block_size=block_size,
    )
    return TableOrder(places if ids is None else ids[places], rows)


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
    known = (DEFAULT, *SHUFFLES)
    if given["algorithm"] is not None and given["algorithm"] not in known:
        raise ValueError(f"shuffle_algo must be one of {', '.join(known)}, not {given['algorithm']!r}.")


def _units(shard_sizes: Sequence[Ints], chosen: Sequence[int], draw: Draw) -> Units:
    """Return the units that an epoch reads, without an array of all samples."""
    key = (draw.seed, draw.epoch) if draw.is_balanced else (draw.seed,)
    of_shards = [
        chosen_of_shards(sizes, count, granularity=draw.granularity, draw=key, stream=stream)
        for stream, (sizes, count) in enumerate(zip(shard_sizes, chosen, strict=True))
    ]
    return units_of(np.concatenate(shard_sizes), np.concatenate(of_shards), draw=key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The inputs that determine the samples of streams that are read in part.

    Args:
        seed: The seed of the order.
        epoch: The epoch of the order.
        shuffle: Whether samples are shuffled. Only then does the number of samples of a shard change with the epoch.
        is_balanced: Whether each epoch draws other samples.
        granularity: How many samples are taken from a shard at a time.
    """

    seed: int
    epoch: int
    shuffle: bool
    is_balanced: bool
    granularity: int


def resampled(shard_sizes: Sequence[Ints], chosen: Sequence[int], draw: Draw) -> tuple[Ints, Ints]:
    """Return the samples of each unit (a shard, or a part of it), and the ids of all samples, unit by unit.

    Args:
        shard_sizes: The number of samples of each shard, for each stream.
        chosen: The number of samples of each stream in the epoch.
        draw: The inputs of the draw.

    Source: ``StreamingDataset.resample_streams`` of MosaicML Streaming 0.13.
    """
    generator = np.random.default_rng(draw.seed + draw.epoch if draw.is_balanced else draw.seed)
    seed = draw.seed + draw.epoch if draw.shuffle and draw.is_balanced else draw.seed
    first = 0
    units: list[Ints] = []
    ids: list[Ints] = []
    for sizes, count in zip(shard_sizes, chosen, strict=True):
        of_shards = samples_of_shards(sizes, count, granularity=draw.granularity, seed=seed)
        for size, of_shard in zip(sizes.tolist(), of_shards.tolist(), strict=True):
            if size:
                times, rest = divmod(of_shard, size)
                units.append(np.array([size] * times + [rest] * (rest > 0), np.int64))
                ids += [np.arange(first, first + size)] * times
                if rest:
                    ids.append(first + np.sort(generator.choice(size, rest, False)))
            first += size
    return np.concatenate(units), np.concatenate(ids)


def samples_of_shards(sizes: Ints, chosen: int, *, granularity: int, seed: int) -> Ints:
    """Return the number of samples of each shard of a stream in an epoch.

    Source: ``streaming/base/sampling.py`` of MosaicML Streaming 0.13.
    """
    total = int(sizes.sum())
    times, rest = divmod(chosen, total)
    of_shards = sizes * times
    if not rest:
        return of_shards
    counts = -(-sizes // granularity)
    shard = np.repeat(np.arange(len(sizes)), counts)
    grains = np.full(len(shard), granularity, np.int64)
    # An empty shard has no last grain. The original modifies the previous shard's grain instead, and so does this code.
    grains[np.cumsum(counts) - 1] = sizes - (counts - 1) * granularity
    order = np.random.default_rng(seed).permutation(len(shard))
    taken = np.diff(np.minimum(np.cumsum(grains[order]), rest), prepend=0)
    np.add.at(of_shards, shard[order], taken)
    return of_shards
