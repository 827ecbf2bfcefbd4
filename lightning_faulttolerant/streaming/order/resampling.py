"""How the original library draws the samples of an epoch from streams that are read in part, or more than once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_faulttolerant.streaming.order.draws import Ints


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
