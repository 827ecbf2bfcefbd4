"""Buffers that DDP leaves to each rank: a resume must not set all of them to rank 0's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.rank_runs import RankNet, assert_ranks_continue, for_ranks
from tests.runs import FIRST_EPOCH

pytestmark = for_ranks


class ManualNet(RankNet):
    """Uses manual optimization: DDP sends buffers only before the first batch, so each rank's batch norm differs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_each_rank_keeps_its_buffers() -> None:
    """A rank whose batch norm has processed other batches than rank 0's continues with its own statistics."""
    assert_ranks_continue(FIRST_EPOCH, rank=1, module=ManualNet)
