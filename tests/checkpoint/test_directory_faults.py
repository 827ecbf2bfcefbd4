"""At each step, AtomicDirectory is killed, loses power or meets a failing disk, and the last checkpoint stays."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from lightning_faulttolerant import AtomicDirectory
from lightning_faulttolerant.checkpoint.verify import verify_path
from tests.faulty_files import FaultyFiles, PowerLoss
from tests.file_faults import KINDS, fail_with, kill_after
from tests.processes import in_child

# Exit codes of child processes.
_FAILED, _SWALLOWED = 3, 4
_CHANGES = set(KINDS) - {"list"}


def _save(output: Path, number: int, *, force_save: bool = False, fsync: bool = False) -> None:
    saver = AtomicDirectory(output, keep_last=1, fsync=fsync)
    directory = saver.prepare_checkpoint_directory(force_save=force_save)
    os.mkdir(os.path.join(directory, "shards"))
    for name in ("number.txt", "shards/0.txt"):
        Path(directory, name).write_text(str(number) * 100)
    saver.symlink_latest(directory)


def _number_in(directory: str | None) -> int | None:
    if directory is None:
        return None
    assert verify_path(directory).has_checksums
    texts = {Path(directory, name).read_text() for name in ("number.txt", "shards/0.txt")}
    assert len(texts) == 1
    return int(texts.pop()[0])


def _check_recovery(output: Path, possible: tuple[int | None, ...], *, at: int) -> int | None:
    """Check that a new process finds a whole checkpoint by saver and link, saves the next one, and leaves no litter."""
    saver = AtomicDirectory(output, keep_last=1)
    found = _number_in(saver.latest())
    assert found in possible, f"step {at}: {found}"
    link = output / saver.symlink_name
    assert link.exists() == (found is not None), f"step {at}"
    assert found is None or _number_in(os.readlink(link)) == found
    _save(output, 9)
    assert _number_in(AtomicDirectory(output).latest()) == 9
    names = sorted(name for name in os.listdir(output) if "latest_checkpoint" not in name and "_force" not in name)
    assert len(names) == 1, f"step {at}: {names}"
    return found


@pytest.mark.parametrize("num_before", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_each_step_the_last_checkpoint_stays(tmp_path, num_before):
    """After SIGKILL after any step, the previous checkpoint or the new one must be the latest, whole and linked."""
    found, at, exit_code = [], 0, -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        at += 1
        output = tmp_path / str(at)
        output.mkdir()
        for number in range(num_before):
            _save(output, number, force_save=number == 0)

        def save(output=output, at=at):
            with FaultyFiles(output, kill_after, kind=_CHANGES, at=at):
                _save(output, 5, fsync=True)

        exit_code = in_child(save)
        found.append(_check_recovery(output, (num_before - 1 if num_before else None, 5), at=at))
        assert not num_before or (output / "AtomicDirectory_checkpoint_0_force").is_dir()
        shutil.rmtree(output)
    assert exit_code == 0
    assert at > 30
    # Before the commit it is the old one, afterwards the new one, with one change between.
    assert found == sorted(found, key=lambda number: number == 5)
    assert set(found) == {num_before - 1 if num_before else None, 5}


@pytest.mark.parametrize("keeps", ["synced", "names", "removals"])
def test_power_lost_at_each_step_the_last_checkpoint_stays(tmp_path, keeps):
    """Whatever the disk has kept, the previous or the new checkpoint must be whole; a finished save must be kept."""
    at, has_lost = 0, True
    while has_lost:
        at += 5  # only every fifth of these steps: all of them take long
        output = tmp_path / str(at)
        output.mkdir()
        _save(output, 1)

        def save(output=output, at=at):
            with PowerLoss(output, at=at, keeps=keeps) as power:
                _save(output, 5, fsync=True)
            os._exit(_FAILED if power.has_lost else 0)

        exit_code = in_child(save)
        assert exit_code in (0, _FAILED)
        has_lost = exit_code == _FAILED
        _check_recovery(output, (1, 5) if has_lost else (5,), at=at)
        shutil.rmtree(output)


@pytest.mark.parametrize(("number", "start"), [(errno.ENOSPC, 1), (errno.EIO, 2)])
def test_error_at_each_step_is_raised_and_the_last_checkpoint_stays(tmp_path, number, start):
    """A full or bad disk must be reported wherever it happens, and cost at most the new checkpoint."""
    at, failed = start, True
    while failed:
        output = tmp_path / str(at)
        output.mkdir()
        _save(output, 1)

        def save(output=output, at=at):
            files = FaultyFiles(output, fail_with(number), at=at)
            try:
                with files:
                    _save(output, 5, fsync=True)
            except OSError:
                os._exit(_FAILED)
            os._exit(_SWALLOWED if len(files.steps) >= at else 0)

        exit_code = in_child(save)
        assert exit_code in (0, _FAILED), f"step {at}: {exit_code}"
        failed = exit_code == _FAILED
        _check_recovery(output, (1, 5) if failed else (5,), at=at)
        shutil.rmtree(output)
        at += 3
    assert at > 60


def test_reader_beside_a_writer_finds_a_whole_checkpoint_each_time(tmp_path):
    """While another process saves and deletes without a pause, a reader must find a checkpoint and damage nothing."""
    _save(tmp_path, 1)

    def save_on():
        for number in range(2, 9):
            for _ in range(4):
                _save(tmp_path, number)

    process_id = os.fork()
    if not process_id:
        code = 1
        try:
            save_on()
            code = 0
        finally:
            os._exit(code)
    last, num_looks = 0, 0
    while not (ended := os.waitpid(process_id, os.WNOHANG))[0]:
        latest = AtomicDirectory(tmp_path).latest()
        assert latest is not None
        with contextlib.suppress(FileNotFoundError):  # deleted since
            number = int(Path(latest, "number.txt").read_text()[0])
            assert number >= last
            last = number
        num_looks += 1
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert num_looks > 10
    assert not any("damaged" in name for name in os.listdir(tmp_path))
    assert _number_in(AtomicDirectory(tmp_path).latest()) == 8
