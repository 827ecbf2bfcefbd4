"""The original library's data set, reduced to the parts that determine its order."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.order import Weight
from tests.foreign import mosaic


def their_streams(weights: list[Weight], sizes: list[list[int]], epoch_size: int | None, seed: int) -> tuple[Any, int]:
    """Return the original's streams, with the weights that it derives, and its epoch size."""
    of_streams = mosaic().Stream
    streams = [
        of_streams(local="/nowhere", proportion=weight.proportion, repeat=weight.repeat, choose=weight.choose)
        for weight in weights
    ]
    samples = np.array([sum(of_stream) for of_stream in sizes])
    return streams, of_streams.apply_weights(streams, samples, epoch_size, seed)


class Theirs:
    """The parts of the original's data set that its resampling reads."""

    def __init__(self, sizes: list[list[int]], streams: Any, method: str, granularity: int, seed: int) -> None:
        counts = [len(of_stream) for of_stream in sizes]
        self.streams, self.num_streams = streams, len(streams)
        self.shards_per_stream = np.array(counts)
        self.shard_offset_per_stream = np.cumsum(counts) - counts
        self.samples_per_shard = np.concatenate(sizes)
        self.sample_offset_per_shard = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self.sampling_method, self.sampling_granularity, self.shuffle_seed = method, granularity, seed
        self.shuffle = False

    def resampled(self, epoch: int, *, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of each unit, and all ids."""
        self.epoch_seed_change = shuffle and self.sampling_method == "balanced"
        return self.resample_streams(epoch)

    def resample_streams(self, epoch: int, stream: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of each unit, and all ids, of one stream or of all."""
        found: tuple[np.ndarray, np.ndarray] = mosaic().StreamingDataset.resample_streams(self, epoch, stream)
        return found

    def plan(self, method: str, *, world: tuple[int, int, int], epoch: int, sample: int, **settings: Any) -> np.ndarray:
        """Return the samples of the batches of each worker of each rank of each node."""
        vars(self).update(settings, partition_algo="relaxed", initial_physical_nodes=None)
        self.epoch_seed_change = self.shuffle and self.sampling_method == "balanced"
        place = mosaic("streaming.base.world").World(*world, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: np.ndarray = mosaic("streaming.base.batching").generate_work(method, self, place, epoch, sample)
        return found
