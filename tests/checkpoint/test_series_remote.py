"""A series of autosaves keeps its promises in every kind of store."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from typing import Any

import fsspec
import pytest
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import (
    DamagedCheckpointError,
    NoValidCheckpointError,
    RunInUseError,
    UnsafeCheckpointError,
)
from tests.s3 import client
from tests.storage.stores import damaging, read, requests_to_s3, write

FORK = multiprocessing.get_context("fork")


def save(autosaves: AutosaveSeries, number: int) -> str:
    """Write an autosave."""
    return autosaves.save({"number": number}, epoch=0, batch=number, global_step=number)


def flip_a_byte(path: str) -> None:
    """Change a byte in the middle of a file, without its store noticing."""
    with fsspec.open(path, "rb") as file:
        data = bytearray(file.read())
    data[len(data) // 2] ^= 0xFF
    with fsspec.open(path, "wb") as file:
        file.write(data)


def names(autosaves: AutosaveSeries) -> list[str]:
    """Return the names of the files in the directory of a series."""
    return autosaves.store.names()


@pytest.fixture
def autosaves(any_url: str) -> AutosaveSeries:
    """A series of two, in each kind of store."""
    return AutosaveSeries(any_url, keep_last=2)


def test_newest_are_kept_and_loaded(autosaves: AutosaveSeries) -> None:
    """After each save the newest two exist, and a resume loads the last one."""
    assert autosaves.load_newest() is None
    saved = []
    for number in range(4):
        saved.append(save(autosaves, number))
        assert autosaves.paths() == saved[-2:]
        assert autosaves.load_newest() == (saved[-1], {"number": number})
        assert autosaves.newest() == saved[-1]


def test_damaged_one_is_set_aside_and_the_one_before_taken(
    autosaves: AutosaveSeries, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte that flips in the store is found when the autosave is loaded; the log names the one used instead."""
    first, second = save(autosaves, 1), save(autosaves, 2)
    flip_a_byte(second)
    with caplog.at_level(logging.WARNING):
        assert autosaves.load_newest() == (first, {"number": 1})
    [message] = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert second in message
    assert f"Used instead: {first}" in message
    assert autosaves.paths() == [first]
    assert f"{os.path.basename(second)}.damaged" in names(autosaves)
    assert save(autosaves, 3) > second, "a number is not given twice"


def test_only_damaged_ones_are_an_error(autosaves: AutosaveSeries) -> None:
    """If no autosave verifies, the run does not silently start over."""
    path = save(autosaves, 1)
    flip_a_byte(path)
    for _ in range(2):
        with pytest.raises(NoValidCheckpointError, match="none of them verifies"):
            autosaves.load_newest()


def test_refusal_to_unpickle_is_no_damage(autosaves: AutosaveSeries) -> None:
    """A file that weights_only=True refuses is reported as such; it keeps its name, and no older one is used."""
    save(autosaves, 1)
    path = autosaves.save({"mine": argparse.Namespace()}, epoch=0, batch=2, global_step=2)
    with pytest.raises(UnsafeCheckpointError, match="is not damaged"):
        autosaves.load_newest()
    assert autosaves.paths()[-1] == path


def test_files_of_others_are_never_touched(autosaves: AutosaveSeries) -> None:
    """Saving, pruning, setting aside and removing do not change any file that is not ours."""
    foreign = ["last.ckpt", "autosave.ckpt", "autosave-1-epoch=0-batch=0.ckpt", "superseded-0001-mine/notes.txt"]
    for name in foreign:
        write(autosaves.store.url, name, b"mine")
    for number in range(3):
        save(autosaves, number)
    flip_a_byte(save(autosaves, 3))
    autosaves.load_newest()
    autosaves.set_aside("label")
    save(autosaves, 4)
    assert "superseded-0002-label" in names(autosaves)
    autosaves.remove_all()
    assert all(read(autosaves.store.path(name)) == b"mine" for name in foreign)
    assert names(autosaves) == sorted([*foreign[:3], "superseded-0001-mine"])


def test_removing_all_leaves_nothing(autosaves: AutosaveSeries) -> None:
    """A finished run leaves none of its files in the store, whether set aside or not."""
    save(autosaves, 1)
    autosaves.set_aside("label")
    flip_a_byte(save(autosaves, 2))
    save(autosaves, 3)
    autosaves.remove_all()
    assert names(autosaves) == []


def test_leftovers_of_dead_writers_go(autosaves: AutosaveSeries) -> None:
    """A killed writer's temporary file goes at the next save; that of a living one stays."""
    process = FORK.Process(target=int)
    process.start()
    process.join()
    host = os.uname().nodename
    for process_id in (process.pid, os.getppid()):
        name = f".autosave-00000009-epoch=0-batch=0.ckpt.tmp-{host}-{process_id}-0123456789abcdef"
        write(autosaves.store.url, name, b"")
    path = save(autosaves, 1)
    assert names(autosaves) == [name, os.path.basename(path)]


@pytest.mark.parametrize("num_good_checks", [0, 1])
def test_nothing_is_published_or_deleted_for_who_has_lost_the_run(any_url: str, num_good_checks: int) -> None:
    """A process whose lock was taken over writes no autosave, and deletes none of the new holder's."""
    before = [save(AutosaveSeries(any_url, keep_last=2), number) for number in range(2)]
    checks = [None] * num_good_checks + [RunInUseError("taken")]

    def check() -> None:
        error = checks.pop(0)
        if error is not None:
            raise error

    late = AutosaveSeries(any_url, keep_last=2, check=check)
    with pytest.raises(RunInUseError):
        save(late, 2)
    assert late.paths()[:2] == before
    assert len(late.paths()) == 2 + num_good_checks
    assert late.load_newest() == (late.paths()[-1], {"number": 1 + num_good_checks})


def test_resume_reads_its_autosave_once(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is transferred once to be verified and loaded, and the later ones not at all."""
    autosaves = AutosaveSeries(f"{s3}/run", keep_last=3)
    saved = [save(autosaves, number) for number in range(3)]
    with requests_to_s3(monkeypatch) as calls:
        assert autosaves.load_newest() == (saved[-1], {"number": 2})
    assert [arguments["Key"] for method, arguments in calls if method == "get_object"] == [
        saved[-1].removeprefix(f"{s3}/")
    ]


def test_damaged_upload_keeps_what_is_there(s3: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autosave that does not arrive as it was sent is an error immediately, and no earlier one is deleted for it."""
    autosaves = AutosaveSeries(f"{s3}/run", keep_last=1)
    first = save(autosaves, 1)
    with (
        requests_to_s3(monkeypatch, damaging(lambda data: data[:-1] + b"x")),
        pytest.raises(DamagedCheckpointError, match="did not arrive as it was sent"),
    ):
        save(autosaves, 2)
    assert autosaves.paths() == [first]
    assert autosaves.load_newest() == (first, {"number": 1})
    assert len(client(s3_endpoint).list_objects_v2(Bucket=s3.removeprefix("s3://"))["Contents"]) == 2


def _save_for_ever(url: str, saved: Any) -> None:
    autosaves = AutosaveSeries(url, keep_last=1)
    for number in range(1, 1_000):
        autosaves.save({"weights": torch.full((2_000_000,), number)}, epoch=0, batch=number, global_step=number)
        saved.value = number


def test_writer_that_is_killed_during_uploads_leaves_the_last_one_sound(
    s3: str, s3_endpoint: str, small_parts: int
) -> None:
    """After SIGKILL at any moment of an upload the last autosave loads, and the start drops the lost parts."""
    url, bucket = f"{s3}/run", s3.removeprefix("s3://")
    num_rounds = num_orphans = 0
    while num_rounds < 2 or (num_orphans == 0 and num_rounds < 10):
        num_rounds += 1
        saved = FORK.Value("i", 0)
        process = FORK.Process(target=_save_for_ever, args=(url, saved))
        process.start()
        deadline = time.monotonic() + 30
        while not saved.value and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3 * os.urandom(1)[0] / 255)
        process.kill()
        process.join()
        num_orphans += len(client(s3_endpoint).list_multipart_uploads(Bucket=bucket).get("Uploads", []))
        autosaves = AutosaveSeries(url)
        autosaves.store.abort_uploads()
        assert "Uploads" not in client(s3_endpoint).list_multipart_uploads(Bucket=bucket)
        found = autosaves.load_newest()
        assert found is not None
        number = int(found[1]["weights"][0])
        assert number >= saved.value
        assert bool((found[1]["weights"] == number).all())
    assert num_orphans > 0, "no kill came during an upload: the test has seen nothing"
