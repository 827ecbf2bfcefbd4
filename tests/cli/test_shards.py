"""Autosaves that are directories of shards, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.contents import list_files, sum_files
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.records.lines import append_line
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


def test_one_that_lightning_has_saved_is_a_checkpoint_without_checksums(tmp_path, capsys):
    """A directory of shards without a manifest must be found from above, and inspected."""
    folder = tmp_path / "checkpoints" / "epoch=1.ckpt"
    folder.mkdir(parents=True)
    torch.save({"epoch": 1, "global_step": 7}, folder / METADATA_NAME)
    assert call(capsys, "verify", tmp_path).status == 1
    (folder / ".metadata").write_bytes(b"")
    assert call(capsys, "verify", tmp_path).lines == [f"{folder}: no checksums: it has no {MANIFEST_NAME}"]
    assert "no checksums" in call(capsys, "list", tmp_path).out
    for place in (tmp_path, folder):
        result = call(capsys, "inspect", place)
        assert (result.status, result.lines[0]) == (0, str(folder / METADATA_NAME))


@pytest.mark.parametrize("command", ["list", "report", "prune"])
def test_one_stands_for_its_run(saved, capsys, command):
    """A directory of shards must be found itself, and lead to its fit and its run."""
    append_line(saved[0].parents[1] / "history.jsonl", {"event": "begin", "fit": 1, "time": 1.0})
    more = ["--keep-last", "2"] if command == "prune" else []
    result = call(capsys, command, str(saved[2]), *more)
    assert result.status == 0
    assert {"list": saved[2].name, "report": "Run run", "prune": f"deleted {saved[0].name}"}[command] in result.out


def test_pruned_to_the_newest_that_verify(saved, tmp_path, capsys):
    """Older directories must be deleted, and one that does not verify must not count."""
    (saved[2] / SHARD).unlink()
    result = call(capsys, "prune", str(tmp_path), "--keep-last", "1")
    assert result.status == 0
    assert [path.exists() for path in saved] == [False, True, True]
