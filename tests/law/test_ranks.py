"""Several ranks: each goes on where it was, with its own generators, loaders, metrics, logged values and gradients."""

from __future__ import annotations

import pytest

from tests.rank_runs import assert_ranks_go_on, for_ranks, shuffled
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut

pytestmark = for_ranks


@pytest.mark.parametrize(
    ("num_workers", "cut", "rank"), [(0, FIRST_EPOCH, 0), (2, LATER_EPOCH, 1)], ids=["no-workers", "workers"]
)
def test_two_ranks_go_on(num_workers: int, cut: Cut, rank: int) -> None:
    """With one rank killed, both go on exactly where they were."""
    assert_ranks_go_on(cut, rank=rank, train=lambda: shuffled(num_workers))
