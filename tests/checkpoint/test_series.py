"""The newest autosave that verifies is found, and none of the user's files is touched."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import IO

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from lightning_faulttolerant.checkpoint import series
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, read_back
from lightning_faulttolerant.errors import DamagedCheckpointError, NoValidCheckpointError
from tests.processes import dead_process_id

FORK = multiprocessing.get_context("fork")


def _save(autosaves: AutosaveSeries, number: int) -> Path:
    return Path(autosaves.save({"number": number}, epoch=number // 3, batch=number % 3, global_step=number))


def _newest(autosaves: AutosaveSeries) -> Path | None:
    newest = autosaves.newest()
    return None if newest is None else Path(newest)


def _paths(autosaves: AutosaveSeries) -> list[Path]:
    return [Path(path) for path in autosaves.paths()]


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data[:-100])


def _names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def autosaves(tmp_path):
    """A series of two, in a directory that does not exist yet."""
    return AutosaveSeries(tmp_path / "run" / "fit-0", keep_last=2)


def _leftover(directory: Path, *, host: str, process_id: int, name: str = "autosave-00000009-epoch=0-batch=0.ckpt"):
    path = directory / f".{name}.tmp-{host}-{process_id}-0123456789abcdef"
    path.touch()
    return path


def test_no_directory_means_no_autosave(autosaves):
    """A run that has never saved must answer None everywhere, create no directory and not fail."""
    assert _newest(autosaves) is None
    assert _paths(autosaves) == []
    assert autosaves.set_aside("label") is None
    autosaves.remove_all()
    assert not autosaves.directory.exists()


def test_keep_last_below_one_is_refused(tmp_path):
    """A series that would keep nothing must be refused when it is created."""
    with pytest.raises(ValueError, match="keep_last is 0"):
        AutosaveSeries(tmp_path, keep_last=0)


def test_save_names_the_file_by_sequence_epoch_and_batch(autosaves):
    """The name must say where the run was, and sort in the order of saving."""
    path = _save(autosaves, 5)
    assert path == autosaves.directory / "autosave-00000001-epoch=1-batch=2.ckpt"
    assert load_file(path) == {"number": 5}
    assert _newest(autosaves) == path


def test_keep_last_counts_those_that_verify(tmp_path):
    """An autosave of an earlier process that is damaged now must not count: the sound one before it must stay."""
    saved = [_save(AutosaveSeries(tmp_path, keep_last=3), number) for number in range(3)]
    _damage(saved[1])
    autosaves = AutosaveSeries(tmp_path, keep_last=3)
    newest = _save(autosaves, 3)
    later = _save(autosaves, 4)
    assert _paths(autosaves) == [saved[2], newest, later]
    assert saved[1].with_name(f"{saved[1].name}.damaged").exists()
    autosaves = AutosaveSeries(tmp_path, keep_last=2)
    _damage(later)
    last = _save(autosaves, 5)
    assert _paths(autosaves) == [newest, last]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_save_keeps_the_newest(tmp_path, keep_last):
    """After each save the newest keep_last files must exist, in order, and be the last ones saved."""
    autosaves = AutosaveSeries(tmp_path, keep_last=keep_last)
    saved = []
    for number in range(6):
        saved.append(_save(autosaves, number))
        assert _paths(autosaves) == saved[-keep_last:]
        assert _newest(autosaves) == saved[-1]


def test_order_is_that_of_the_numbers_not_of_the_letters(autosaves):
    """A sequence number with more than eight digits must still be the newest."""
    first = _save(autosaves, 0)
    second = first.rename(first.with_name("autosave-99999999-epoch=0-batch=0.ckpt"))
    third = _save(autosaves, 1)
    assert third.name == "autosave-100000000-epoch=0-batch=1.ckpt"
    assert _paths(autosaves) == [second, third]


def test_nothing_is_deleted_before_the_new_file_verifies(autosaves, monkeypatch):
    """With keep_last=1 a verified autosave must exist at each moment, even while the new one is read back."""
    autosaves = AutosaveSeries(autosaves.directory, keep_last=1)
    first = _save(autosaves, 0)
    seen = []
    monkeypatch.setattr(series, "read_back", lambda file: (seen.append(_paths(autosaves)), read_back(file))[1])
    second = _save(autosaves, 1)
    assert seen == [[first]]
    assert _paths(autosaves) == [second]


def test_file_that_does_not_read_back_is_set_aside_and_raised(autosaves, monkeypatch):
    """A disk that loses bytes must be reported with the step by the save itself, and earlier autosaves must be kept."""
    kept = [_save(autosaves, 0), _save(autosaves, 1)]
    real = series.save_to_file

    def save_badly(checkpoint: object, file: IO[bytes]) -> None:
        real(checkpoint, file)
        file.flush()
        _damage(Path(file.name))

    monkeypatch.setattr(series, "save_to_file", save_badly)
    with pytest.raises(DamagedCheckpointError, match=r"autosave of step 2 does not read back.*\.damaged"):
        _save(autosaves, 2)
    assert _paths(autosaves) == kept
    assert _newest(autosaves) == kept[-1]


def test_failing_fsync_is_raised_although_the_file_reads_back(autosaves, monkeypatch):
    """A file that the disk has refused to keep must not count as saved because memory still has it."""
    kept = [_save(autosaves, 0), _save(autosaves, 1)]
    real = os.fsync

    def refuse_once(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse_once)
    with pytest.raises(OSError, match="Input/output error"):
        _save(autosaves, 2)
    assert sorted(autosaves.directory.iterdir()) == kept


def test_failing_write_keeps_what_is_there(autosaves, monkeypatch):
    """A save that the disk refuses must raise, delete nothing and leave nothing behind."""
    kept = [_save(autosaves, 0), _save(autosaves, 1)]

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        _save(autosaves, 2)
    assert sorted(autosaves.directory.iterdir()) == kept


def test_newest_sets_a_damaged_file_aside_and_takes_the_one_before(autosaves, caplog):
    """A damaged newest file must be renamed, not deleted, and the log must name it, the reason, and its replacement."""
    first, second = _save(autosaves, 0), _save(autosaves, 1)
    _damage(second)
    data = second.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert _newest(autosaves) == first
    assert (second.parent / f"{second.name}.damaged").read_bytes() == data
    (message,) = caplog.messages
    assert str(second) in message
    assert "it is not a complete zip file" in message
    assert f"Used instead: {first}" in message
    assert _newest(autosaves) == first
    assert len(caplog.messages) == 1


def test_number_of_a_damaged_file_is_not_given_again(autosaves):
    """A save after a damaged file must sort after it, and pruning must leave the damaged one alone."""
    _save(autosaves, 0)
    _damage(_save(autosaves, 1))
    _newest(autosaves)
    for number in range(2, 6):
        _save(autosaves, number)
    assert _names(autosaves.directory) == [
        "autosave-00000002-epoch=0-batch=1.ckpt.damaged",
        "autosave-00000005-epoch=1-batch=1.ckpt",
        "autosave-00000006-epoch=1-batch=2.ckpt",
    ]


def test_only_damaged_files_are_an_error_that_lists_them(autosaves):
    """If no autosave verifies, the run must not silently start from scratch, at the second try neither."""
    paths = [_save(autosaves, 0), _save(autosaves, 1)]
    for path in paths:
        _damage(path)
    for _ in range(2):
        with pytest.raises(NoValidCheckpointError, match="none of them verifies") as caught:
            _newest(autosaves)
        assert all(f"{path}.damaged" in str(caught.value) for path in paths)
        assert _paths(autosaves) == []


def test_file_that_cannot_be_read_is_not_set_aside(autosaves, monkeypatch):
    """A missing permission is not damage: it must be raised, and the file must keep its name."""
    path = _save(autosaves, 0)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(series, "verify_autosave", refuse)
    with pytest.raises(PermissionError):
        _newest(autosaves)
    assert _paths(autosaves) == [path]


FOREIGN = [
    "last.ckpt",
    "epoch=0-step=3.ckpt",
    "autosave.ckpt",
    "autosave-1-epoch=0-batch=0.ckpt",
    "autosave-00000001-epoch=0-batch=0.ckpt.bak",
    "my-autosave-00000001-epoch=0-batch=0.ckpt",
    ".last.ckpt.tmp-HOST-PID-0123456789abcdef",
    "run.lock",
    "superseded-notes.txt",
    "superseded-0001-mine/notes.txt",
]


def _make_foreign(directory: Path) -> list[Path]:
    names = (name.replace("HOST", os.uname().nodename).replace("PID", str(dead_process_id())) for name in FOREIGN)
    paths = [directory / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    return paths


def test_files_of_others_are_never_touched(autosaves):
    """Saving, pruning, searching, setting aside and removing must not change any file that is not ours."""
    foreign = _make_foreign(autosaves.directory)
    for number in range(4):
        _save(autosaves, number)
    _damage(_paths(autosaves)[-1])
    _newest(autosaves)
    autosaves.set_aside("label")
    _save(autosaves, 4)
    autosaves.remove_all()
    assert all(path.read_text() == "mine" for path in foreign)
    assert sorted(path for path in autosaves.directory.rglob("*") if path.is_file()) == sorted(foreign)


def test_empty_directory_named_like_an_autosave_is_not_ours(autosaves):
    """A directory with nothing in it must not be taken for an autosave, whatever its name."""
    folder = autosaves.directory / "autosave-00000007-epoch=0-batch=0.ckpt"
    folder.mkdir(parents=True)
    path = _save(autosaves, 0)
    assert _newest(autosaves) == path
    autosaves.remove_all()
    assert folder.is_dir()


def test_leftovers_of_dead_writers_go_and_those_of_the_living_stay(autosaves):
    """A save must clean up after killed writers of this host, and of others if nothing has changed for an hour."""
    autosaves.directory.mkdir(parents=True)
    host, dead = os.uname().nodename, dead_process_id()
    gone = _leftover(autosaves.directory, host=host, process_id=dead)
    living = _leftover(autosaves.directory, host=host, process_id=os.getppid())
    elsewhere = _leftover(autosaves.directory, host="elsewhere", process_id=dead)
    long_still = _leftover(autosaves.directory, host="node7", process_id=dead)
    os.utime(long_still, (time.time() - 7200,) * 2)
    _save(autosaves, 0)
    assert [path.exists() for path in (gone, living, elsewhere, long_still)] == [False, True, True, False]
    autosaves.remove_all()
    assert list(autosaves.directory.iterdir()) == [living]


def test_set_aside_moves_everything_and_numbering_continues(autosaves):
    """After setting aside, no autosave may be left, the moved ones must be intact, and no number may be used twice."""
    first, second = _save(autosaves, 0), _save(autosaves, 1)
    _damage(second)
    folder = Path(autosaves.set_aside("other-origin"))
    assert folder == autosaves.directory / "superseded-0001-other-origin"
    assert _newest(autosaves) is None
    assert load_file(folder / first.name) == {"number": 0}
    third = _save(autosaves, 2)
    assert third.name.startswith("autosave-00000003-")
    assert Path(autosaves.set_aside("b")) == autosaves.directory / "superseded-0002-b"
    assert _names(autosaves.directory) == [
        "superseded-0001-other-origin",
        f"superseded-0001-other-origin/{first.name}",
        f"superseded-0001-other-origin/{second.name}",
        "superseded-0002-b",
        f"superseded-0002-b/{third.name}",
    ]


@pytest.mark.parametrize("label", ["", "a/b", "..\n", "a b"])
def test_label_that_is_no_name_is_refused(autosaves, label):
    """A label must not lead out of the directory."""
    _save(autosaves, 0)
    with pytest.raises(ValueError, match="can't be part of a name"):
        autosaves.set_aside(label)
    assert len(_paths(autosaves)) == 1


def test_set_aside_works_where_only_damaged_files_are_left(autosaves):
    """A user who chose another checkpoint must be able to continue when nothing verifies."""
    _damage(_save(autosaves, 0))
    with pytest.raises(NoValidCheckpointError):
        _newest(autosaves)
    assert autosaves.set_aside("gone") is not None
    assert _newest(autosaves) is None


def test_remove_all_removes_the_directory(autosaves):
    """A finished run must leave nothing of ours: autosaves, damaged, superseded, left over, or the directory."""
    _save(autosaves, 0)
    autosaves.set_aside("label")
    _save(autosaves, 1)
    _damage(_save(autosaves, 2))
    _newest(autosaves)
    _leftover(autosaves.directory, host="elsewhere", process_id=1)
    autosaves.remove_all()
    assert not autosaves.directory.exists()
    assert autosaves.directory.parent.exists()


@settings(database=None, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.sampled_from(["save", "damage newest", "damage oldest", "search"]), max_size=12),
    keep_last=st.integers(1, 3),
)
def test_newest_is_the_last_save_that_is_sound(tmp_path_factory, actions, keep_last):
    """After any sequence of saves and damage, the answer must be the newest sound file that was kept."""
    autosaves = AutosaveSeries(tmp_path_factory.mktemp("series"), keep_last=keep_last)
    kept: list[tuple[Path, bool]] = []
    any_damaged_aside = False
    for number, action in enumerate([*actions, "search"]):
        if action == "save":
            kept = [*kept, (_save(autosaves, number), True)][-keep_last:]
        elif action.startswith("damage") and kept:
            index = -1 if action == "damage newest" else 0
            if kept[index][1]:
                _damage(kept[index][0])
            kept[index] = (kept[index][0], False)
        elif action == "search":
            while kept and not kept[-1][1]:
                kept.pop()
                any_damaged_aside = True
            if not kept and any_damaged_aside:
                with pytest.raises(NoValidCheckpointError):
                    _newest(autosaves)
            else:
                assert _newest(autosaves) == (kept[-1][0] if kept else None)


def _save_for_ever(directory: Path) -> None:
    autosaves, number = AutosaveSeries(directory, keep_last=1), 0
    while True:
        number += 1
        autosaves.save({"weights": torch.full((5_000,), number)}, epoch=0, batch=number, global_step=number)


def test_newest_verifies_when_the_writer_is_killed(tmp_path):
    """After SIGKILL at any moment of saving and pruning, a sound autosave must exist, never an older one."""
    _save(AutosaveSeries(tmp_path), 0)
    newest = 0
    for _ in range(15):
        process = FORK.Process(target=_save_for_ever, args=(tmp_path,))
        process.start()
        time.sleep(0.005 + 0.05 * os.urandom(1)[0] / 255)
        process.kill()
        process.join()
        path = _newest(AutosaveSeries(tmp_path))
        assert path is not None
        assert newest <= int(path.name[9:17])
        newest = int(path.name[9:17])
    assert newest > 1, "no kill came after a save: the test has seen nothing"
    _save(AutosaveSeries(tmp_path, keep_last=1), 1)
    assert len(list(tmp_path.iterdir())) == 1
