"""Autosaves that are directories of shards: a series treats them like files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.contents import list_files, sum_files
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, NoValidCheckpointError
from tests.processes import dead_process_id

SHARD = "__0_0.distcp"


def _begin(autosaves: AutosaveSeries, number: int) -> str:
    begun = autosaves.begin_directory(epoch=0, batch=number)
    torch.save({"number": number}, Path(begun, METADATA_NAME))
    Path(begun, SHARD).write_bytes(bytes([number]) * 1000)
    return begun


def _save(autosaves: AutosaveSeries, number: int) -> Path:
    begun = _begin(autosaves, number)
    return Path(autosaves.commit_directory(begun, sum_files(begun, list_files(begun))))


def _newest(autosaves: AutosaveSeries) -> int | None:
    found = autosaves.load_newest()
    return None if found is None else found[1]["number"]


@pytest.fixture
def autosaves(tmp_path):
    """A series of two, in a directory that does not exist yet."""
    return AutosaveSeries(tmp_path / "run" / "fit-0", keep_last=2)


def test_newest_is_loaded_and_older_ones_go(autosaves):
    """The newest directory must be found by its number, its unsharded part loaded, and older ones deleted."""
    paths = [_save(autosaves, number) for number in range(4)]
    assert autosaves.paths() == [str(path) for path in paths[2:]]
    assert _newest(autosaves) == 3
    assert sorted(os.listdir(autosaves.directory)) == [path.name for path in paths[2:]]


def test_files_and_directories_are_one_series(autosaves):
    """A run that has saved files and now saves directories, or the reverse, must continue from the newest of all."""
    autosaves.save({"number": 1}, epoch=0, batch=1, global_step=1)
    _save(autosaves, 2)
    assert _newest(autosaves) == 2
    autosaves.save({"number": 3}, epoch=0, batch=3, global_step=3)
    assert _newest(autosaves) == 3
    assert len(autosaves.paths()) == 2


@pytest.mark.parametrize("damage", ["byte", "shard", "metadata", "manifest"])
def test_damaged_directory_is_set_aside(autosaves, damage, caplog):
    """A changed byte, a lost shard or a lost manifest must be detected, and the previous directory must be used."""
    _save(autosaves, 0)
    path = _save(autosaves, 1)
    if damage == "byte":
        Path(path, SHARD).write_bytes(bytes(1000))
    else:
        Path(path, {"shard": SHARD, "metadata": METADATA_NAME, "manifest": MANIFEST_NAME}[damage]).unlink()
    with caplog.at_level(logging.WARNING):
        assert _newest(AutosaveSeries(autosaves.directory)) == 0
    assert f"{path}.damaged" in caplog.text
    assert Path(f"{path}.damaged", SHARD).exists() == (damage != "shard")


def test_only_damaged_directories_are_an_error(autosaves):
    """A series in which no directory verifies must never be taken for a fresh start."""
    Path(_save(autosaves, 0), SHARD).unlink()
    with pytest.raises(NoValidCheckpointError):
        autosaves.load_newest()


def test_keep_last_counts_directories_that_verify(autosaves):
    """A directory of an earlier process that is damaged now must not count."""
    paths = [_save(autosaves, number) for number in range(2)]
    Path(paths[1], SHARD).unlink()
    newest = _save(AutosaveSeries(autosaves.directory, keep_last=2), 2)
    assert autosaves.paths() == [str(paths[0]), str(newest)]


def test_directory_that_was_never_committed_is_removed_by_the_next_process(autosaves):
    """A killed writer's directory must not be found, and must be gone after the next save."""
    _save(autosaves, 0)
    begun = _begin(autosaves, 1)
    dead = begun.replace(f"-{os.getpid()}-", f"-{dead_process_id()}-")
    os.rename(begun, dead)
    assert _newest(autosaves) == 0
    _save(autosaves, 2)
    assert not os.path.exists(dead)
    assert _newest(autosaves) == 2


def test_directory_of_a_failed_save_is_gone_after_the_next(autosaves):
    """A directory that this process has begun and not committed must not stay forever."""
    begun = _begin(autosaves, 1)
    _save(autosaves, 2)
    assert not os.path.exists(begun)


def test_dropped_directory_is_gone(autosaves):
    """A dropped directory must be gone immediately, and dropping it twice must not be an error."""
    begun = _begin(autosaves, 1)
    autosaves.drop_directory(begun)
    autosaves.drop_directory(begun)
    assert os.listdir(autosaves.directory) == []


def test_without_metadata_nothing_is_committed(autosaves):
    """Shards without the metadata file must not become an autosave."""
    begun = autosaves.begin_directory(epoch=0, batch=0)
    Path(begun, SHARD).write_bytes(b"1")
    with pytest.raises(DamagedCheckpointError):
        autosaves.commit_directory(begun, sum_files(begun, list_files(begun)))
    assert autosaves.paths() == []


def test_nothing_is_committed_into_a_directory_that_is_no_longer_ours(autosaves, tmp_path):
    """If another process has taken the directory over, nothing may be published or deleted."""

    def check() -> None:
        raise CheckpointError("taken over")

    _save(autosaves, 0)
    taken = AutosaveSeries(autosaves.directory, check=check)
    with pytest.raises(CheckpointError, match="taken over"):
        _save(taken, 1)
    assert _newest(autosaves) == 0


def test_set_aside_and_removed(autosaves):
    """Directories must move together into a subdirectory, and all must be gone when the run is done."""
    for number in range(2):
        _save(autosaves, number)
    aside = autosaves.set_aside("label")
    assert _newest(autosaves) is None
    assert len(os.listdir(aside)) == 2
    assert _save(autosaves, 2).name.startswith("autosave-00000003-")
    autosaves.remove_all()
    assert not os.path.exists(autosaves.directory)
