"""Autosaves that are directories of shards, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.contents import list_files, sum_files
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from tests.cli.checkpoints import call, checkpoint

SHARD = "__0_0.distcp"


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Save three directories of one fit."""
    series = AutosaveSeries(tmp_path / "run" / "fit-1", keep_last=100)
    paths = []
    for step in range(1, 4):
        begun = series.begin_directory(epoch=0, batch=step)
        content = checkpoint(step=step, batch=step, world_size=2)
        torch.save({key: content[key] for key in content if key != "state_dict"}, Path(begun, METADATA_NAME))
        Path(begun, SHARD).write_bytes(bytes([step]) * 1000)
        paths.append(Path(series.commit_directory(begun, sum_files(begun, list_files(begun)))))
    return paths


def test_listed_with_what_they_hold(saved, tmp_path, capsys):
    """Each directory must be one row, with step, ranks, and whether all of it verifies."""
    (saved[1] / SHARD).write_bytes(bytes(1000))
    result = call(capsys, "list", str(tmp_path))
    rows = [line.split() for line in result.out.splitlines() if "autosave-" in line and "not as written" not in line]
    assert [(row[0], row[1], row[-2], row[-1]) for row in rows] == [
        (saved[0].name, "1", "2", "verified"),
        (saved[1].name, "2", "2", "damaged"),
        (saved[2].name, "3", "2", "verified"),
    ]


def test_one_without_its_manifest_is_damaged(saved, tmp_path, capsys):
    """A directory without its manifest must be shown, as damaged."""
    (saved[2] / MANIFEST_NAME).unlink()
    assert f"{saved[2].name}: damaged: it has no {MANIFEST_NAME}" in call(capsys, "list", str(tmp_path)).out
    assert call(capsys, "verify", str(saved[2])).status == 1


def test_inspected_without_the_shards(saved, capsys):
    """State outside the shards must be shown: position and the states of the ranks."""
    result = call(capsys, "inspect", str(saved[0]))
    assert result.status == 0
    assert "batch 1, step 1" in result.out


def test_pruned_to_the_newest_that_verify(saved, tmp_path, capsys):
    """Older directories must be deleted, and one that does not verify must not count."""
    (saved[2] / SHARD).unlink()
    result = call(capsys, "prune", str(tmp_path), "--keep-last", "1")
    assert result.status == 0
    assert [path.exists() for path in saved] == [False, True, True]
