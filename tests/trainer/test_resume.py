"""What ranks continue from, and what a run says of kernels that may give another result when they are repeated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_faulttolerant import FaultTolerance, atomic_torch_save
from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from lightning_faulttolerant.trainer.resume import repeating
from lightning_faulttolerant.trainer.resume.choice import Choice, read_by_all
from tests.ranks import on_ranks
from tests.runs import fit_net

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


def test_nondeterministic_kernels_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start names the settings of an accelerator that allow them; a CPU has none."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    found = repeating.nondeterministic(trainer)
    assert found == ["use_deterministic_algorithms is off", "CUBLAS_WORKSPACE_CONFIG is not set"]
    with caplog.at_level("INFO"):
        fit_net([FaultTolerance(dirpath=tmp_path / "cpu")], tmp_path, max_steps=1)
        assert "nondeterministic" not in caplog.text
        monkeypatch.setattr(repeating, "nondeterministic", lambda _: found)
        fit_net([FaultTolerance(dirpath=tmp_path / "gpu")], tmp_path, max_steps=1)
    assert f"The kernels of this run may be nondeterministic: {'; '.join(found)}. Its state" in caplog.text
