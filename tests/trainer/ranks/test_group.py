"""Ranks exchange values, and a lost rank is an error on the others, never a hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from tests.ranks import on_ranks


def test_first_learns_from_all_and_tells_all(tmp_path: Path) -> None:
    """Rank 0 gets every value in the ranks' order, and its own value reaches all ranks."""

    def main(rank: int) -> Any:
        ranks = connect_all()
        told = ranks.to_first("values", {"rank": rank, "size": rank * 1000 * "x"})
        numbers = None if told is None else [value["rank"] for value in told]
        answer = [ranks.rank, ranks.num_ranks, numbers, ranks.from_first("value", f"of {rank}")]
        ranks.close()
        return answer

    assert on_ranks(main, tmp_path / "ranks", num_ranks=3) == [
        [0, 3, [0, 1, 2], "of 0"], [1, 3, None, "of 0"], [2, 3, None, "of 0"]
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["to_first", "from_first"])
def test_ranks_that_lost_each_other_say_where_they_are(tmp_path: Path, method: str) -> None:
    """Ranks at different steps don't take each other's values for their own."""

    def main(rank: int) -> Any:
        ranks = connect_all()
        return getattr(ranks, method)(f"step {rank}", rank)

    answers = on_ranks(main, tmp_path / "ranks")
    answer = answers[0 if method == "to_first" else 1]
    assert answer.startswith("RanksLostError: the ranks are out of step")
    assert "step 0" in answer
    assert "step 1" in answer


def test_dead_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    """A rank that waits for a killed rank raises immediately."""

    def main(rank: int) -> Any:
        ranks = connect_all()
        ranks.from_first("connected", rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ranks.to_first("step", rank)

    alive, dead = on_ranks(main, tmp_path / "ranks")
    assert dead == "dead"
    assert alive.startswith("RanksLostError: rank 0 had no answer at 'step'")
