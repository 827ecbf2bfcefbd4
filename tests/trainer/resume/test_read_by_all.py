"""All ranks continue from the same autosave, also if a path leads each node to its own disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant import atomic_torch_save
from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from lightning_faulttolerant.trainer.resume.choice import Choice, read_by_all
from tests.ranks import on_ranks

NAME = "autosave-00000001-epoch=0-batch=3.ckpt"


def save(path: Path, weight: float) -> None:
    """Write an autosave whose size does not depend on the weight."""
    path.parent.mkdir(parents=True)
    atomic_torch_save({"state_dict": {"weight": torch.full((4,), weight)}}, path)


def read(tmp_path: Path) -> list[Any]:
    """Read it on two ranks that are in the directories "0" and "1", and return the weight of each."""

    def main(rank: int) -> Any:
        os.chdir(tmp_path / str(rank))
        ranks = connect_all()
        try:
            choice = read_by_all(ranks, Choice(path=NAME, origin=None, is_autosave=True))
        finally:
            ranks.close()
        return choice.checkpoint and choice.checkpoint["state_dict"]["weight"].tolist()

    return on_ranks(main, tmp_path / "ranks")


def test_the_same_file_on_two_disks_is_read(tmp_path: Path) -> None:
    """A copy is as good as a shared disk. Rank 0 has read it before."""
    save(tmp_path / "0" / NAME, 1)
    (tmp_path / "1").mkdir()
    shutil.copyfile(tmp_path / "0" / NAME, tmp_path / "1" / NAME)
    assert read(tmp_path) == [None, [1.0] * 4]


def test_another_file_of_that_name_is_an_error(tmp_path: Path) -> None:
    """Otherwise, the ranks would continue with different weights. Each rank raises, and the error names the rank."""
    for rank in range(2):
        save(tmp_path / str(rank) / NAME, rank)
    for answer in read(tmp_path):
        assert answer.startswith(
            f"CheckpointError: {NAME} can't be read by all ranks. rank 1: its file of this name differs"
        )


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """The error names the rank that does not see it."""
    save(tmp_path / "0" / NAME, 1)
    (tmp_path / "1").mkdir()
    for answer in read(tmp_path):
        assert "rank 1: DamagedCheckpointError" in answer
