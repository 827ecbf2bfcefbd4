"""Autosaves that are sets of objects below a URL: a series treats them like files."""

from __future__ import annotations

import errno
import logging
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_faulttolerant.checkpoint import autosave_files
from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, read_manifest
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NoValidCheckpointError,
    RunInUseError,
)
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.storage.store import open_store
from tests.checkpoint.writers import SHARD, begin_objects, load_objects, save_objects
from tests.file_faults import FaultyURLs, fail_with


@pytest.fixture
def autosaves() -> Iterator[AutosaveSeries]:
    """A series of two, in memory."""
    root = f"memory://{uuid.uuid4().hex}"
    yield AutosaveSeries(f"{root}/run/fit-0", keep_last=2)
    fsspec.filesystem("memory").store.clear()


def _newest(autosaves: AutosaveSeries) -> int | None:
    found = AutosaveSeries(autosaves.directory).load_newest()
    return None if found is None else found[1]["number"]


def _names(autosaves: AutosaveSeries) -> list[str]:
    return autosaves.store.names()


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def test_newest_is_loaded_and_older_ones_go(autosaves):
    """The newest set must be found by its number, its unsharded part loaded, and no object of older ones be left."""
    assert autosaves.load_newest() is None
    urls = [save_objects(autosaves, number) for number in range(4)]
    assert autosaves.paths() == urls[2:]
    assert _newest(autosaves) == 3
    assert autosaves.newest() == urls[3]
    assert verify_path(urls[3]).num_files == 2
    assert autosaves.store.tree() == sorted(
        f"{_name(url)}/{name}" for url in urls[2:] for name in (MANIFEST_NAME, METADATA_NAME, SHARD)
    )


def test_files_and_sets_are_one_series(autosaves):
    """A run that has saved files and now saves sets, or the reverse, must continue from the newest of all."""
    autosaves.save({"number": 1}, epoch=0, batch=1, global_step=1)
    save_objects(autosaves, 2)
    assert _newest(autosaves) == 2
    autosaves.save({"number": 3}, epoch=0, batch=3, global_step=3)
    assert _newest(autosaves) == 3
    assert len(autosaves.paths()) == 2


@pytest.mark.parametrize("damage", ["byte", "shard", "metadata", "manifest"])
def test_damaged_set_is_set_aside(autosaves, damage, caplog):
    """A changed byte or a lost object must be detected, and the previous set must be used."""
    save_objects(autosaves, 0)
    url = save_objects(autosaves, 1)
    store = open_store(url)
    if damage in ("byte", "manifest"):
        name = SHARD if damage == "byte" else MANIFEST_NAME
        content = bytearray(store.read(name))
        content[len(content) // 2] ^= 1
        store.replace(name, bytes(content))
    else:
        store.delete({"shard": SHARD, "metadata": METADATA_NAME}[damage])
    with caplog.at_level(logging.WARNING):
        assert _newest(autosaves) == 0
    assert f"It was set aside as {url}.damaged" in caplog.text
    assert _names(autosaves) == [_name(AutosaveSeries(autosaves.directory).paths()[0]), f"{_name(url)}.damaged"]
    assert _name(save_objects(AutosaveSeries(autosaves.directory), 2)) > _name(url)


def test_only_damaged_sets_are_an_error(autosaves):
    """A series in which no set verifies must never be taken for a fresh start."""
    open_store(save_objects(autosaves, 0)).delete(SHARD)
    for _ in range(2):
        with pytest.raises(NoValidCheckpointError):
            AutosaveSeries(autosaves.directory).load_newest()


def test_set_without_its_manifest_never_counts(autosaves):
    """Objects without a manifest are those of a killed writer, or being deleted: unseen, and gone after a save."""
    save_objects(autosaves, 0)
    url = save_objects(autosaves, 1)
    open_store(url).delete(MANIFEST_NAME)
    later = AutosaveSeries(autosaves.directory)
    assert _newest(later) == 0
    assert len(later.paths()) == 1
    assert not any(name.endswith(".damaged") for name in _names(later))
    with pytest.raises(DamagedCheckpointError):
        verify_path(url)
    assert _name(save_objects(later, 2)) > _name(url), "a number is not given twice"
    assert _name(url) not in _names(later)


def test_set_that_was_begun_names_its_writer_and_never_counts(autosaves):
    """A set that is being written must not be loaded, must say who writes it, and must be gone after the next save."""
    save_objects(autosaves, 0)
    begun = begin_objects(autosaves, 1)
    assert not read_manifest(begun).is_committed
    assert _newest(autosaves) == 0
    with pytest.raises(DamagedCheckpointError, match=r"process \d+ on .* began it"):
        verify_path(begun)
    later = AutosaveSeries(autosaves.directory)
    assert save_objects(later, 2) != begun
    assert _name(begun) not in _names(later)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_first_set_that_was_not_completed_is_no_damage(autosaves, has_manifest):
    """A run whose first save was killed must start from the beginning, without an error."""
    begun = begin_objects(autosaves, 1)
    if not has_manifest:
        open_store(begun).delete(MANIFEST_NAME)
    assert _newest(autosaves) is None
    assert AutosaveSeries(autosaves.directory).newest() is None


def test_name_is_begun_by_one_process_only(autosaves):
    """Of two processes that believe to hold the run, only one may write objects under a name."""
    autosave_files.begin_in_store(autosaves.store, "autosave-00000001-epoch=0-batch=0.ckpt")
    with pytest.raises(FileExistsError):
        autosave_files.begin_in_store(autosaves.store, "autosave-00000001-epoch=0-batch=0.ckpt")


def test_keep_last_counts_sets_that_verify(autosaves):
    """A set of an earlier process that is damaged now must not count."""
    urls = [save_objects(autosaves, number) for number in range(2)]
    open_store(urls[1]).delete(SHARD)
    newest = save_objects(AutosaveSeries(autosaves.directory, keep_last=2), 2)
    assert AutosaveSeries(autosaves.directory).paths() == [urls[0], newest]


def test_dropped_set_is_gone(autosaves):
    """A dropped set must be gone immediately, and dropping it twice must not be an error."""
    begun = begin_objects(autosaves, 1)
    autosaves.drop_directory(begun)
    autosaves.drop_directory(begun)
    assert autosaves.store.tree() == []


def test_without_metadata_nothing_is_committed(autosaves):
    """Shards without the file for everything else must not become an autosave."""
    begun = begin_objects(autosaves, 0)
    open_store(begun).delete(METADATA_NAME)
    with pytest.raises(DamagedCheckpointError):
        autosaves.commit_directory(begun, {})
    assert autosaves.paths() == []


@pytest.mark.parametrize("num_good_checks", [0, 1])
def test_nothing_is_committed_or_deleted_for_who_has_lost_the_run(autosaves, num_good_checks):
    """A process whose lock was taken over must commit nothing, and delete nothing of the new holder's."""
    for number in range(2):
        save_objects(autosaves, number)
    theirs = begin_objects(autosaves, 2)
    checks = [None] * num_good_checks + [RunInUseError("taken")] * 9

    def check() -> None:
        error = checks.pop(0)
        if error is not None:
            raise error

    late = AutosaveSeries(autosaves.directory, keep_last=2, check=check)
    with pytest.raises(CheckpointError, match="taken"):
        save_objects(late, 3)
    assert num_good_checks or _name(theirs) in _names(autosaves)
    assert [read_manifest(url).is_committed for url in autosaves.paths()] == [True, True]
    assert _newest(autosaves) == 1


def test_kept_sets_stay(autosaves):
    """A set that is kept for good must leave the series whole, into its own directory."""
    kept = save_objects(autosaves, 0, keep=True)
    for number in range(1, 4):
        save_objects(autosaves, number)
    [path] = [f"{autosaves.store.url}/kept/{_name(kept)}"]
    assert verify_path(path).num_files == 2
    autosaves.remove_all()
    assert autosaves.store.tree() == [f"kept/{_name(kept)}/{name}" for name in (SHARD, MANIFEST_NAME, METADATA_NAME)]


def test_set_aside_and_removed(autosaves):
    """Sets must move together into a subdirectory, and all must be gone when the run is done."""
    for number in range(2):
        save_objects(autosaves, number)
    aside = autosaves.set_aside("label")
    assert _newest(autosaves) is None
    assert len(open_store(aside).names()) == 2
    assert "autosave-00000003-" in save_objects(autosaves, 2)
    open_store(aside).delete(f"{open_store(aside).names()[0]}/{MANIFEST_NAME}")  # as if the move was interrupted
    autosaves.remove_all()
    assert autosaves.store.tree() == []


def test_copied_directory_is_a_set(autosaves, tmp_path: Path):
    """A local directory that was copied into the store, and a set that was copied out of it, must load."""
    local = AutosaveSeries(tmp_path / "fit-0")
    url = save_objects(autosaves, 5)
    target = tmp_path / "fit-0" / _name(url)
    target.mkdir(parents=True)
    for name in open_store(url).tree():
        (target / name).write_bytes(open_store(url).read(name))
    assert local.load_newest() == (str(target), {"number": 5})
    load_objects(url)


def test_entries_are_those_of_the_content(autosaves):
    """The manifest must have size and checksum of each object."""
    url = save_objects(autosaves, 1)
    for name, entry in read_manifest(url).files.items():
        content = open_store(url).read(name)
        assert (entry.size_bytes, entry.crc32) == (len(content), zlib.crc32(content))


def test_manifest_goes_first_and_is_copied_last(autosaves, monkeypatch):
    """A process that is killed while it deletes or moves a set must leave one that counts and is whole, or none."""
    steps: list[str] = []

    def note(kind: str) -> None:
        real = getattr(RemoteStore, kind)

        def noted(store: RemoteStore, *names: str) -> None:
            steps.append(f"{kind} {names[-1]}")
            real(store, *names)

        monkeypatch.setattr(RemoteStore, kind, noted)

    note("delete")
    note("copy")
    url = save_objects(autosaves, 1)
    name = _name(url)
    autosave_files.rename(autosaves.store, name, "moved")
    moved = [f"copy moved/{inner}" for inner in (METADATA_NAME, SHARD, MANIFEST_NAME)]
    deleted = [f"delete {inner}" for inner in (MANIFEST_NAME, SHARD, METADATA_NAME)]
    assert steps == [*moved, *deleted]


@pytest.mark.slow
def test_an_error_at_any_step_keeps_what_is_there():
    """Whichever request fails, the old set or the new one must load, and the next save must succeed."""
    url = f"faulty://law/{uuid.uuid4().hex}"
    for number in (1, 2):
        save_objects(AutosaveSeries(url), number)
    newest = 2
    for at in range(1, 200):
        raised = False
        with FaultyURLs(fail_with(errno.EIO), at=at) as files:
            try:
                save_objects(AutosaveSeries(url), newest + 1)
            except (OSError, RuntimeError):  # torch raises the second if its file fails
                raised = True
        found = AutosaveSeries(url).load_newest()
        assert found is not None
        assert load_objects(found[0]) in (newest, newest + 1)
        newest = found[1]["number"] + 1
        save_objects(AutosaveSeries(url), newest)
        assert load_objects(AutosaveSeries(url).load_newest()[0]) == newest
        if len(files.steps) < at:  # nothing failed any more
            break
    assert not raised
    assert 10 < at < 199
