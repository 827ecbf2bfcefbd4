"""A series finds the newest autosave that verifies, file or set of shards, in any store, and touches no other file."""

import argparse
import os
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME, begin_in_store
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_path, verify_path
from lightning_faulttolerant.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NoValidCheckpointError,
    RunInUseError,
    UnsafeCheckpointError,
)
from lightning_faulttolerant.storage.store import is_url, open_store
from tests.checkpoint.writers import SHARD, begin_objects, newest_of, save_objects
from tests.messages import error_of
from tests.processes import dead_process_id
from tests.storage.stores import damaging, read, requests_to_s3, write

HOST = os.uname().nodename


def save_file(series, number):
    """Save a file; return its path."""
    return series.save({"number": number}, epoch=0, batch=number, global_step=number)


SAVES = [save_file, save_objects]


@pytest.fixture(params=SAVES, ids=lambda save: save.__name__)
def save(request):
    """Save an autosave as a file, or as a set of shards."""
    return request.param


@pytest.fixture
def series(any_url):
    """A series of two, in each kind of store, in a directory that does not exist yet."""
    return AutosaveSeries(any_url, keep_last=2)


@pytest.fixture
def local(tmp_path):
    """A series of two on the disk."""
    return AutosaveSeries(tmp_path / "run" / "fit-0", keep_last=2)


def newest(series):
    """Return the number of the autosave that a new process would load, or None."""
    found = AutosaveSeries(series.directory).load_newest()
    return None if found is None else found[1]["number"]


def flip(path, name=None):
    """Change a bit of an autosave, or of this file of it, without its store noticing."""
    if name is None and not os.path.isfile(path):
        name = next(iter(open_store(path).tree()), None)
    path = path if name is None else open_store(path).path(name)
    data = bytearray(read(path))
    data[len(data) // 2] ^= 1
    write(*path.rsplit("/", 1), data)


def test_newest_are_kept_and_loaded(series, save):
    """After each save the newest two exist, in order, with nothing else, and a resume loads the last one."""
    assert (series.load_newest(), series.paths(), series.set_aside("label")) == (None, [], None)
    series.remove_all()
    saved = []
    for number in range(4):
        saved.append(save(series, number))
        assert series.paths() == saved[-2:] == sorted(series.store.path(name) for name in series.store.names())
        assert newest(series) == number
        assert newest_of(series) == saved[-1]
    assert verify_path(saved[-1]).has_checksums
    assert os.path.basename(saved[0]) == "autosave-00000001-epoch=0-batch=0.ckpt"


def test_files_and_sets_are_one_series(series):
    """A run that has saved files and now saves sets, or the reverse, continues from the newest of all."""
    for number, save in enumerate(SAVES * 2):
        save(series, number)
        assert newest(series) == number
    assert len(series.paths()) == 2


def test_order_is_that_of_the_numbers_not_of_the_letters(local):
    """A sequence number with more than eight digits is still the newest."""
    first = Path(save_file(local, 0))
    second = first.rename(first.with_name("autosave-99999999-epoch=0-batch=0.ckpt"))
    third = save_file(local, 1)
    assert os.path.basename(third) == "autosave-100000000-epoch=0-batch=1.ckpt"
    assert local.paths() == [str(second), third]


DAMAGES = [
    (save_file, flip),
    *((save_objects, lambda path, name=name: flip(path, name)) for name in (SHARD, METADATA_NAME, MANIFEST_NAME)),
    (save_objects, lambda path: open_store(path).delete(SHARD)),
]


@pytest.mark.parametrize(("save", "damage"), DAMAGES)
def test_damaged_one_is_set_aside_and_the_one_before_taken(series, save, damage, caplog):
    """A changed bit or a lost file is found at the next resume, and logged once; no number is given twice."""
    first, second = save(series, 0), save(series, 1)
    damage(second)
    assert newest(series) == newest(series) == 0
    [message] = [message for message in caplog.messages if "set aside" in message]
    assert second in message
    assert f"Used instead: {first}" in message
    assert series.store.names() == [os.path.basename(first), f"{os.path.basename(second)}.damaged"]
    assert save(AutosaveSeries(series.directory), 2) > second
    assert newest(series) == 2


def test_keep_last_counts_those_that_verify(series, save):
    """An autosave of an earlier process that is damaged now does not count: the sound one before it stays."""
    paths = [save(series, number) for number in range(2)]
    flip(paths[1])
    later = AutosaveSeries(series.directory, keep_last=2)
    assert later.paths() == paths
    last = save(later, 2)
    assert AutosaveSeries(series.directory).paths() == [paths[0], last]


def test_what_is_no_damage_is_not_set_aside(series):
    """A file that weights_only=True refuses is an error; no older autosave is used instead."""
    save_file(series, 1)
    path = series.save({"mine": argparse.Namespace()}, epoch=0, batch=2, global_step=2)
    assert "is not damaged" in error_of(UnsafeCheckpointError, series.load_newest)
    assert series.paths()[-1] == path


FOREIGN = [
    *("last.ckpt", "epoch=0-step=3.ckpt", "autosave.ckpt", "autosave-1-epoch=0-batch=0.ckpt", "run.lock"),
    *("autosave-00000001-epoch=0-batch=0.ckpt.bak", "my-autosave-00000001-epoch=0-batch=0.ckpt"),
    *(f".last.ckpt.tmp-{HOST}-1-0123456789abcdef", "superseded-notes.txt", "superseded-0001-mine/notes.txt"),
]


def test_files_of_others_are_never_touched(series, save):
    """Saving, pruning, searching, setting aside and removing do not change any file that is not ours."""
    for name in FOREIGN:
        write(series.store.url, name, b"mine")
    empty = Path(series.directory, "autosave-00000007-epoch=0-batch=0.ckpt")
    if not is_url(series.directory):
        empty.mkdir()
    for number in range(4):
        path = save(series, number)
    flip(path)
    newest(series)
    series.set_aside("label")
    save(series, 4)
    assert "superseded-0002-label" in series.store.names()
    series.remove_all()
    assert series.store.tree() == sorted(FOREIGN)
    assert {read(series.store.path(name)) for name in FOREIGN} == {b"mine"}
    assert empty.is_dir() == (not is_url(series.directory))


def test_leftovers_of_dead_writers_go_and_those_of_the_living_stay(local):
    """A save cleans up after killed writers of this host, and of others if nothing has changed for an hour."""
    dead, living, elsewhere, old = (
        f".autosave-00000009-epoch=0-batch=0.ckpt.tmp-{owner}-0123456789abcdef"
        for owner in (f"{HOST}-{dead_process_id()}", f"{HOST}-1", "elsewhere-1", "node-1")
    )
    for name in (dead, living, elsewhere, old):
        write(str(local.directory), name, b"")
    os.utime(Path(local.directory, old), (time.time() - 7200,) * 2)
    path = save_file(local, 0)
    assert set(local.store.names()) == {living, elsewhere, os.path.basename(path)}
    local.remove_all()
    assert local.store.names() == [living]


def test_set_aside_moves_everything_and_remove_all_removes_it(series, save):
    """Autosaves move together, the damaged ones too, and intact; numbering continues; at the end, nothing is left."""
    first, second = save(series, 0), save(series, 1)
    flip(second)
    aside = series.set_aside("other-origin")
    assert aside == series.store.path("superseded-0001-other-origin")
    assert newest(series) is None
    assert load_path(open_store(aside).path(os.path.basename(first)))["number"] == 0
    assert open_store(aside).names() == [os.path.basename(path) for path in (first, second)]
    third = save(series, 2)
    assert "autosave-00000003-" in third
    flip(third)
    for _ in range(2):  # it does not silently start over, at the second try neither
        assert f"{third}.damaged" in error_of(NoValidCheckpointError, AutosaveSeries(series.directory).load_newest)
    assert series.set_aside("b") == series.store.path("superseded-0002-b")
    save(series, 3)
    series.remove_all()
    assert series.store.names() == []
    assert is_url(series.directory) or not os.path.exists(series.directory)


@pytest.mark.parametrize("num_good_checks", [0, 1])
def test_nothing_is_published_or_deleted_for_who_has_lost_the_run(series, save, num_good_checks):
    """A process whose lock was taken over deletes none of the new holder's autosaves, and what it saves is whole."""
    before = [save(series, number) for number in range(2)]
    checks = [None] * num_good_checks + [RunInUseError("taken")] * 9

    def check():
        error = checks.pop(0)
        if error is not None:
            raise error

    late = AutosaveSeries(series.directory, keep_last=2, check=check)
    assert "taken" in error_of(CheckpointError, lambda: save(late, 2))
    assert series.paths()[:2] == before
    assert num_good_checks or series.paths() == before
    assert newest(series) in (1, 1 + num_good_checks)


# Sets of shards, while they are written.


def test_set_that_is_dropped_or_failed_is_gone(series):
    """A dropped set is gone immediately, twice is no error; one without its metadata becomes no autosave."""
    begun = begin_objects(series, 1)
    for _ in range(2):
        series.drop_directory(begun)
    assert series.store.tree() == []
    begun = begin_objects(series, 0)
    open_store(begun).delete(METADATA_NAME)
    error_of(DamagedCheckpointError, lambda: series.commit_directory(begun, {}))
    assert series.paths() == []
    path = save_objects(series, 2)  # also removes what this process has begun and not committed
    assert series.store.names() == [os.path.basename(path)]


def test_set_of_a_store_is_created_once(remote_url):
    """The second of two that begin a set of one name is refused, and one that was begun does not count."""
    series = AutosaveSeries(remote_url)
    url = save_objects(series, 0)
    name = "autosave-00000009-epoch=0-batch=0.ckpt"
    begin_in_store(series.store, name)
    error_of(FileExistsError, lambda: begin_in_store(series.store, name))
    assert newest_of(series) == url
    assert save_objects(series, 1) > series.store.path(name), "a number is given twice"


# Requests of a series to S3.


def test_resume_reads_its_autosave_once_and_damaged_upload_keeps_it(s3, monkeypatch):
    """The file is transferred once to be verified and loaded. None is deleted for one that does not arrive as sent."""
    series = AutosaveSeries(f"{s3}/run", keep_last=2)
    saved = [save_file(series, number) for number in range(2)]
    with requests_to_s3(monkeypatch) as requests:
        assert series.load_newest() == (saved[-1], {"number": 1})
    keys = [arguments["Key"] for method, arguments in requests if method == "get_object"]
    assert keys == [saved[-1].removeprefix(f"{s3}/")]
    with requests_to_s3(monkeypatch, damaging(lambda data: data[:-1] + b"x")):
        assert "did not arrive as it was sent" in error_of(DamagedCheckpointError, lambda: save_file(series, 2))
    assert series.paths() == saved
    assert newest(series) == 1
    assert len(series.store.names()) == 3
