"""The arguments of a data set that determine the order of its epochs, as properties of the same names."""

from __future__ import annotations

from lightning_faulttolerant.streaming.order.epoch import DEFAULT
from lightning_faulttolerant.streaming.ordering import Ordering


class OrderedDataset:
    """A data set that reads its samples in its own order."""

    _ordering: Ordering

    @property
    def shuffle(self) -> bool:
        """Whether an epoch's order is random."""
        return self._ordering.shuffle

    @property
    def shuffle_algo(self) -> str:
        """The shuffle algorithm."""
        return self._ordering.algorithm or DEFAULT

    @property
    def shuffle_block_size(self) -> int | None:
        """The block size of the shuffle algorithm, in samples; ``None`` is the algorithm's choice."""
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
