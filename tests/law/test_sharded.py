"""Strategies that shard: a run that is killed goes on exactly, from a directory that each rank wrote its part of."""

from __future__ import annotations

import pytest

from tests.rank_runs import assert_ranks_go_on, for_ranks
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut
from tests.sharded import ShardedNet, fsdp2

pytestmark = for_ranks


@pytest.mark.parametrize(("cut", "rank"), [(FIRST_EPOCH, 0), (LATER_EPOCH, 1)], ids=["first", "later"])
def test_fsdp2_goes_on(cut: Cut, rank: int) -> None:
    """With one rank of FSDP2 killed, both go on exactly where they were."""
    assert_ranks_go_on(cut, rank=rank, module=ShardedNet, strategy=fsdp2())
