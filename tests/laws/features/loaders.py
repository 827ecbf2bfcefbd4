"""Loaders, samplers, and data sets."""

from __future__ import annotations

from torch.utils.data import DataLoader

from lightning_faulttolerant import InterruptibleDistributedGroupedBatchSampler
from tests.laws.data_sets import HoldingDataset, NoisyDataset, RaggedBatches
from tests.laws.rows import add, row, rows_of

add("shuffled", part="loaders", shows="content", train=rows_of(24))
add("two workers", part="loaders", shows="content", train=rows_of(32, num_workers=2))
add("persistent workers", part="loaders", shows="content", train=rows_of(32, num_workers=2, persistent_workers=True))


@row("train", part="loaders", shows="content")
def generators_in_workers() -> DataLoader:
    """Samples draw from generators that the data set holds, in two workers."""
    return DataLoader(HoldingDataset(32), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


@row("train", part="loaders", shows="content", ranks=False)
def ragged_batches() -> DataLoader:
    """A batch sampler draws batches of other sizes from NumPy's global generator."""
    return DataLoader(HoldingDataset(32), batch_sampler=RaggedBatches())


@row("train", part="loaders", shows="content")
def grouped() -> DataLoader:
    """Batches of groups continue without calls of ``advance``."""
    sampler = InterruptibleDistributedGroupedBatchSampler(range(24), [i % 4 for i in range(24)], 4, seed=3)
    return DataLoader(NoisyDataset(24), batch_sampler=sampler)
