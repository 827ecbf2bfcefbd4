"""What the arguments of a data set make of the order of its epochs, by the names of these arguments."""

from __future__ import annotations

from lightning_faulttolerant.streaming.order.epoch import DEFAULT
from lightning_faulttolerant.streaming.ordering import Ordering


class OrderedDataset:
    """A data set that reads its samples in an order of its own."""

    _ordering: Ordering

    @property
    def shuffle(self) -> bool:
        """Whether an epoch's order is random."""
        return self._ordering.shuffle

    @property
    def shuffle_algo(self) -> str:
        """How it is shuffled."""
        return self._ordering.algorithm or DEFAULT

    @property
    def shuffle_block_size(self) -> int | None:
        """What that takes for a block, in samples; ``None`` is its own choice."""
        return self._ordering.block_size

    @property
    def sampling_method(self) -> str:
        """Whether each epoch draws other samples, of a stream that is read in part."""
        return self._ordering.sampling_method

    @property
    def sampling_granularity(self) -> int:
        """How many samples are taken from a shard at a time, where it is read in part."""
        return self._ordering.sampling_granularity

    @property
    def batching_method(self) -> str:
        """Of which streams the samples of a batch are."""
        return self._ordering.batching_method

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch, of all ranks together."""
        return self._ordering.shares.epoch_size
