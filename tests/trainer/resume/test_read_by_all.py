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


def read(tmp_path: Path, name: str) -> list[Any]:
    """Read it on two ranks that are in the directories "0" and "1", and return the weight of each."""

    def main(rank: int) -> Any:
        os.chdir(tmp_path / str(rank))
        ranks = connect_all()
        try:
            choice = read_by_all(ranks, Choice(path=NAME, origin=None, is_autosave=True))
        finally:
            ranks.close()
        return choice.checkpoint and choice.checkpoint["state_dict"]["weight"].tolist()

    return on_ranks(main, tmp_path / name)


def test_each_node_reads_its_own_disk(tmp_path: Path) -> None:
    """A copy is as good as a shared disk; another file of that name, or none, is an error that names the rank."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        atomic_torch_save({"state_dict": {"weight": torch.full((4,), float(rank))}}, tmp_path / str(rank) / NAME)
    for answer in read(tmp_path, "other"):
        assert answer.startswith(
            f"CheckpointError: {NAME} can't be read by all ranks. rank 1: its file of this name differs"
        )
    shutil.copyfile(tmp_path / "0" / NAME, tmp_path / "1" / NAME)
    assert read(tmp_path, "copy") == [None, [0.0] * 4]  # rank 0 has read it before
    (tmp_path / "1" / NAME).unlink()
    for answer in read(tmp_path, "none"):
        assert "rank 1: DamagedCheckpointError" in answer
