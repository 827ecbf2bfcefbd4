from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_faulttolerant.checkpoint.ranks import RankGroup
from tests.ranks import on_ranks


def test_channel_that_was_closed_can_be_made_again(tmp_path: Path) -> None:
    """Two successive fits in the same processes each have a channel."""

    def main(rank: int) -> Any:
        answers = []
        for number in range(3):
            channel = RankGroup(range(2), timedelta(seconds=10))
            answers.append(channel.to_all("step", [number, rank]))
            channel.close()
        return answers

    expected = [[[number, 0], [number, 1]] for number in range(3)]
    assert on_ranks(main, tmp_path) == [expected, expected]
