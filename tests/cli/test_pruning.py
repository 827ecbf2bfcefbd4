from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.cli import pruning
from lightning_faulttolerant.storage.lock import RunLock
from tests.cli.checkpoints import call, flip, save, save_series

Capture = pytest.CaptureFixture[str]


def names(directory: Path) -> list[str]:
    """Return all files below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def autosaves(*steps: int, folder: str = "run/fit-1/") -> list[str]:
    """Return the names of the autosaves of these steps."""
    return [f"{folder}autosave-{step:08d}-epoch=0-batch={step}.ckpt" for step in steps]


def test_the_newest_of_each_fit_are_kept(tmp_path: Path, capsys: Capture) -> None:
    """The newest N of each fit stay, and the output gives what was deleted and how much was freed."""
    paths = save_series(tmp_path / "run" / "fit-1", 4)
    save_series(tmp_path / "run" / "fit-2", 1)
    freed = os.path.getsize(paths[0]) + os.path.getsize(paths[1])
    found = call(capsys, "prune", tmp_path, "--keep-last", 2)
    assert (found.status, found.err) == (0, "")
    assert names(tmp_path) == autosaves(3, 4) + autosaves(1, folder="run/fit-2/")
    assert found.lines[0] == f"{tmp_path}/run/fit-1: 2 kept, 2 deleted"
    assert all(f"deleted {Path(path).name}" in found.out for path in paths[:2])
    assert found.lines[-1] == f"2 autosaves deleted, {freed / 1000:.3g} kB"


def test_autosaves_of_keep_every_are_never_deleted(tmp_path: Path, capsys: Capture) -> None:
    """Neither those among the newest nor those that a run has moved away are deleted, and the others are."""
    series = AutosaveSeries(tmp_path / "run" / "fit-1", keep_last=2)
    for step in (1, 2, 3, 4):
        series.save({}, epoch=0, batch=step, global_step=step, keep=step in (1, 3))
    found = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert found.status == 0
    assert names(tmp_path) == [
        "run/fit-1/autosave-00000003-epoch=0-batch=3-kept.ckpt",
        "run/fit-1/autosave-00000004-epoch=0-batch=4.ckpt",
        "run/fit-1/kept/autosave-00000001-epoch=0-batch=1-kept.ckpt",
    ]
    assert call(capsys, "prune", tmp_path / "run" / "fit-1" / "kept", "--keep-last", 1).status == 0
    assert len(names(tmp_path)) == 3


def test_damaged_autosaves_do_not_count_as_kept(tmp_path: Path, capsys: Capture) -> None:
    """The newest N that verify are kept, however many newer ones don't; those stay, and are reported."""
    paths = save_series(tmp_path / "run" / "fit-1", 5)
    flip(paths[4])
    flip(paths[3])
    found = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert found.status == 0
    assert names(tmp_path) == autosaves(3, 4, 5)
    assert "2 damaged autosaves are left; --damaged deletes them" in found.out


def test_damaged_ones_are_deleted_on_demand(tmp_path: Path, capsys: Capture) -> None:
    """With --damaged, those that don't verify and those set aside are deleted too."""
    paths = save_series(tmp_path / "run" / "fit-1", 4)
    flip(paths[3])
    AutosaveSeries(tmp_path / "run" / "fit-1").newest()
    flip(paths[2])
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--damaged")
    assert (found.status, names(tmp_path)) == (0, autosaves(2))


def test_of_a_fit_in_which_nothing_verifies_nothing_is_deleted(tmp_path: Path, capsys: Capture) -> None:
    """If no autosave verifies, all stay, also with --damaged: they may be all that is left of the run."""
    for path in save_series(tmp_path / "run" / "fit-1", 3):
        flip(path)
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--damaged")
    assert (found.status, names(tmp_path)) == (0, autosaves(1, 2, 3))
    assert "no autosave here verifies" in found.out


def test_superseded_ones_are_deleted_on_demand(tmp_path: Path, capsys: Capture) -> None:
    """Autosaves of a superseded run stay unless --superseded is given; then their folder goes too."""
    folder = tmp_path / "run" / "fit-1"
    save_series(folder, 2)
    AutosaveSeries(folder).set_aside("another-ckpt_path")
    save_series(folder, 1)
    before = names(tmp_path)
    assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 0
    assert names(tmp_path) == before
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--superseded")
    assert found.status == 0
    assert [path.name for path in folder.iterdir()] == ["autosave-00000003-epoch=0-batch=1.ckpt"]
    assert f"deleted superseded-0001-another-ckpt_path{os.sep}autosave-00000001" in found.out


def test_of_a_directory_in_a_fit_nothing_else_is_deleted(tmp_path: Path, capsys: Capture) -> None:
    """Superseded autosaves that are named, by their directory or by one of them, are deleted alone."""
    folder = tmp_path / "run" / "fit-1"
    save_series(folder, 2)
    aside = AutosaveSeries(folder).set_aside("discarded")
    assert aside is not None
    save_series(folder, 3)
    for place in (aside, next(Path(aside).iterdir())):
        found = call(capsys, "prune", place, "--keep-last", 1, "--superseded", "--dry-run")
        assert found.lines[0] == f"{folder}: 0 kept, 2 would delete"
        assert found.lines[-1].startswith("2 autosaves would be deleted")


def test_autosaves_of_keep_every_in_a_superseded_run_are_never_deleted(tmp_path: Path, capsys: Capture) -> None:
    """--superseded deletes the others, and leaves the folder with the kept ones."""
    series = AutosaveSeries(tmp_path / "run" / "fit-1", keep_last=2)
    for step in (1, 2):
        series.save({}, epoch=0, batch=step, global_step=step, keep=step == 1)
    series.set_aside("discarded")
    save_series(tmp_path / "run" / "fit-1", 1)
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--superseded")
    assert (found.status, found.lines[-1][:19]) == (0, "1 autosave deleted,")
    assert names(tmp_path) == [
        "run/fit-1/autosave-00000003-epoch=0-batch=1.ckpt",
        "run/fit-1/superseded-0001-discarded/autosave-00000001-epoch=0-batch=1-kept.ckpt",
    ]


def test_files_of_others_are_never_deleted(tmp_path: Path, capsys: Capture) -> None:
    """Files that only look like autosaves, those of ModelCheckpoint, links, and notes stay."""
    folder = tmp_path / "run" / "fit-1"
    paths = save_series(folder, 3)
    others = ["autosave-1-epoch=0-batch=1.ckpt", "autosave-00000001-epoch=0-batch=1.ckpt.bak", "last.ckpt", "notes.txt"]
    for name in others:
        save(folder / name)
    (folder / "autosave-00000000-epoch=0-batch=0.ckpt").symlink_to(paths[0])
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--damaged", "--superseded")
    assert found.status == 0
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, Path(paths[2]).name, "autosave-00000000-epoch=0-batch=0.ckpt"}


def test_a_dry_run_says_the_same_and_deletes_nothing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --dry-run nothing is written or deleted, and the same files are named."""
    save_series(tmp_path / "run" / "fit-1", 3)
    before = names(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "prune", "run", "--keep-last", 1, "--dry-run").lines[0] == "run/fit-1: 1 kept, 2 would delete"
    dry = call(capsys, "prune", tmp_path, "--keep-last", 1, "--dry-run")
    assert (dry.status, names(tmp_path)) == (0, before)
    assert dry.lines[-1].startswith("2 autosaves would be deleted, ")
    real = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert dry.out.replace("would delete", "deleted").replace("would be deleted", "deleted") == real.out


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield another process that holds the lock of a run."""
    program = (
        "import sys; from pathlib import Path; from lightning_faulttolerant.storage.lock import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_in_use_is_left_alone(tmp_path: Path, capsys: Capture, other_process: subprocess.Popen[str]) -> None:
    """While a process trains, its run is not pruned: status 1 with host and process; other runs are pruned."""
    save_series(tmp_path / "run" / "fit-1", 3)
    save_series(tmp_path / "other" / "fit-1", 3)
    for directory in (tmp_path, tmp_path / "run", tmp_path / "run" / "fit-1"):
        found = call(capsys, "prune", directory, "--keep-last", 1)
        assert found.status == 1
        assert f"in use by process {other_process.pid} on " in found.err
    assert [name for name in names(tmp_path) if name.endswith(".ckpt")] == [
        *autosaves(3, folder="other/fit-1/"),
        *autosaves(1, 2, 3),
    ]


def test_the_lock_is_held_while_files_are_deleted(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts while its directory is pruned is refused, and afterwards the lock is gone."""
    from lightning_faulttolerant.errors import RunInUseError
    from lightning_faulttolerant.storage.local import LocalStore

    save_series(tmp_path / "run" / "fit-1", 2)
    delete, refused = LocalStore.delete, []

    def delete_while_somebody_starts(store: LocalStore, name: str) -> None:
        with pytest.raises(RunInUseError):
            RunLock(tmp_path / "run").acquire()
        refused.append(name)
        delete(store, name)

    monkeypatch.setattr(LocalStore, "delete", delete_while_somebody_starts)
    assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 0
    assert len(refused) == 1
    with RunLock(tmp_path / "run"):
        pass


def test_what_was_saved_before_the_lock_was_taken_counts(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An autosave saved during the wait for the lock is among the newest: the directory is listed again."""
    folder = tmp_path / "run" / "fit-1"
    save_series(folder, 2)
    acquire = RunLock.acquire

    def acquire_late(lock: RunLock) -> None:
        save_series(folder, 1)
        acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", acquire_late)
    assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 0
    assert [path.name for path in folder.iterdir()] == ["autosave-00000003-epoch=0-batch=1.ckpt"]


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_at_least_one_is_kept(tmp_path: Path, capsys: Capture, number: str) -> None:
    """A number below 1 is refused as wrong usage, and nothing is deleted."""
    save_series(tmp_path, 1)
    found = call(capsys, "prune", tmp_path, f"--keep-last={number}")
    assert found.status == 2
    assert "of at least 1" in found.err
    assert len(names(tmp_path)) == 1


def test_how_many_to_keep_must_be_said(tmp_path: Path, capsys: Capture) -> None:
    """Without --keep-last nothing is deleted."""
    assert call(capsys, "prune", tmp_path).status == 2


def test_a_series_outside_of_a_run_is_pruned_too(tmp_path: Path, capsys: Capture) -> None:
    """Autosaves in a directory of another name are pruned under the lock of that directory."""
    save_series(tmp_path / "mine", 2)
    with RunLock(tmp_path / "mine"):
        assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 1
    assert call(capsys, "prune", tmp_path / "mine", "--keep-last", 1).status == 0
    assert names(tmp_path) == ["mine/autosave-00000002-epoch=0-batch=2.ckpt"]


@pytest.mark.parametrize("empty", ["", "file://"])
def test_an_empty_name_is_not_where_one_stands(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    """With `prune "$RUN"`, where RUN has no value, nothing is deleted."""
    save_series(tmp_path / "run/fit-1", 3)
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "prune", empty, "--keep-last", 1).status == 2
    assert len(names(tmp_path)) == 3


def test_a_run_that_cannot_be_pruned_does_not_keep_others_from_it(tmp_path: Path, capsys: Capture) -> None:
    """If the lock of one run can't be taken, or a file can't be deleted, status is 2, and the others are pruned."""
    for name in "abc":
        save_series(tmp_path / name / "fit-1", 2)
    (tmp_path / "b/run.lock").mkdir()
    found = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert found.status == 2
    assert f"{tmp_path / 'b'}: pruning ended early: " in found.err
    assert found.lines[-1].startswith("2 autosaves deleted, ")
    assert [name[0] for name in names(tmp_path)] == ["a", "b", "b", "c"]


def test_an_autosave_that_is_gone_meanwhile_is_no_error(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are deleted by hand at the same time do not stop the others from being deleted."""
    first, second, _ = save_series(tmp_path / "run/fit-1", 3)
    plan = pruning._plan

    def planned(*arguments: Any) -> Any:
        made = plan(*arguments)
        Path(second).unlink()
        return made

    monkeypatch.setattr(pruning, "_plan", planned)
    assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 0
    assert not Path(first).exists()
