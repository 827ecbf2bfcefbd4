"""The law for batches of groups: under the callback no code calls ``advance``, and the batches continue."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant import InterruptibleDistributedGroupedBatchSampler
from tests.data_sets import NoisyDataset
from tests.runs import Cut, assert_continues, each_cut

GROUPS = [i % 4 for i in range(32)]


@each_cut
def test_grouped_batches_continue_without_advance(cut: Cut) -> None:
    """Each epoch has its own order, since Lightning sets the sampler's epoch, and a resume keeps its batches."""

    def train() -> DataLoader[Any]:
        sampler = InterruptibleDistributedGroupedBatchSampler(range(32), GROUPS, 4, seed=3)
        return DataLoader(NoisyDataset(), batch_sampler=sampler)

    assert_continues(cut, train=train)
