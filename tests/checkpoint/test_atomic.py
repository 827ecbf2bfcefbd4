"""The old file or the new one, whatever happens in between."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_faulttolerant.checkpoint.saving import atomic_torch_save, atomic_write_bytes
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.storage.local import atomic_writer, find_leftovers

FORK = multiprocessing.get_context("fork")


def _load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_save_writes_what_torch_load_reads(tmp_path):
    """A saved object must load again, and no other file may be left in the directory."""
    atomic_torch_save({"weights": torch.arange(3)}, tmp_path / "a.ckpt")
    assert torch.equal(_load(tmp_path / "a.ckpt")["weights"], torch.arange(3))
    assert _names(tmp_path) == ["a.ckpt"]


def test_write_bytes_replaces_the_old_content(tmp_path):
    """A small file must hold exactly the new bytes, even if it was longer before."""
    atomic_write_bytes(b"a long old content", tmp_path / "meta.json")
    atomic_write_bytes(b"{}", tmp_path / "meta.json", fsync=False)
    assert (tmp_path / "meta.json").read_bytes() == b"{}"


def test_temporary_file_is_in_the_directory_of_the_target(tmp_path):
    """The temporary file must be beside the target, under the documented name, and the target still unchanged."""
    atomic_write_bytes(b"old", tmp_path / "a.ckpt")
    with atomic_writer(tmp_path / "a.ckpt") as file:
        file.write(b"new")
        (temporary,) = (name for name in _names(tmp_path) if name != "a.ckpt")
        assert temporary.startswith(".a.ckpt.tmp-")
        assert f"-{os.getpid()}-" in temporary
        assert (tmp_path / "a.ckpt").read_bytes() == b"old"


def test_symlink_stays_and_its_target_is_replaced(tmp_path):
    """A write to a link must change the file that it points to, even if that is in another directory."""
    (tmp_path / "real").mkdir()
    atomic_write_bytes(b"old", tmp_path / "real" / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to(Path("real") / "a.ckpt")
    atomic_write_bytes(b"new", tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "real" / "a.ckpt").read_bytes() == b"new"
    assert _names(tmp_path / "real") == ["a.ckpt"]


def test_mode_of_the_new_file_follows_the_umask(tmp_path):
    """A new file must be as readable as one that open() creates, not private like the files of tempfile."""
    before = os.umask(0o027)
    try:
        atomic_write_bytes(b"x", tmp_path / "a.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "a.ckpt").stat().st_mode & 0o777 == 0o640


def test_very_long_name_is_written(tmp_path):
    """A name as long as the file system allows must work, although the temporary name is longer."""
    path = tmp_path / ("ä" * 125 + ".ckpt")
    atomic_write_bytes(b"x", path)
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "fsync"), KeyboardInterrupt(), SystemExit(143)])
def test_exception_in_the_block_keeps_the_old_file(tmp_path, error):
    """Whatever ends the block, including a Ctrl-C, must leave the old file and no temporary file."""
    atomic_write_bytes(b"old", tmp_path / "a.ckpt")
    with pytest.raises(type(error)), atomic_writer(tmp_path / "a.ckpt") as file:  # noqa: PT012 - the block raises
        file.write(b"new")
        raise error
    assert (tmp_path / "a.ckpt").read_bytes() == b"old"
    assert _names(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    ("function", "error"),
    [("fsync", OSError(errno.EIO, "bad disk")), ("replace", PermissionError(errno.EACCES, "not yours"))],
)
def test_failing_system_call_is_raised(tmp_path, monkeypatch, function, error):
    """An error of fsync or of the rename must reach the caller, and the old file must stay in place."""
    atomic_torch_save({"step": 1}, tmp_path / "a.ckpt")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(type(error), match=error.strerror):
        atomic_torch_save({"step": 2}, tmp_path / "a.ckpt")
    assert _load(tmp_path / "a.ckpt") == {"step": 1}
    assert _names(tmp_path) == ["a.ckpt"]


def test_failing_fsync_of_the_directory_is_raised(tmp_path, monkeypatch):
    """A disk error at the directory must be raised; a file system without this operation must not raise an error."""
    real, answers = os.fsync, []

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answers[-1], "fsync of the directory")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    answers.append(errno.EINVAL)
    atomic_write_bytes(b"x", tmp_path / "a.ckpt")
    answers.append(errno.EIO)
    with pytest.raises(OSError, match="fsync of the directory"):
        atomic_write_bytes(b"y", tmp_path / "a.ckpt")


def test_file_and_directory_are_synced_around_the_rename(tmp_path, monkeypatch):
    """The bytes must be synced before the rename, and the directory after it; without fsync neither is synced."""
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(f"rename {source.stat().st_size}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic_write_bytes(b"xyz", tmp_path / "a.ckpt")
    assert calls == ["file", "rename 3", "directory"]
    calls.clear()
    atomic_write_bytes(b"xyz", tmp_path / "a.ckpt", fsync=False)
    assert calls == ["rename 3"]


def test_full_disk_is_raised_as_what_it_is(tmp_path):
    """A write that fails halfway must raise its OSError, which torch.save hides, and keep the old file."""
    atomic_torch_save({"step": 1}, tmp_path / "a.ckpt")

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            atomic_torch_save({"weights": torch.zeros(20_000, dtype=torch.int64)}, tmp_path / "a.ckpt")
        except OSError as error:
            os._exit(42 if error.errno == errno.EFBIG else 1)

    process = FORK.Process(target=write_too_much)
    process.start()
    process.join()
    assert process.exitcode == 42
    assert _load(tmp_path / "a.ckpt") == {"step": 1}
    assert _names(tmp_path) == ["a.ckpt"]


def test_missing_directory_directory_and_pipe_are_refused(tmp_path):
    """A path that can't become a file must be refused before anything is written, and a pipe must stay a pipe."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        atomic_write_bytes(b"x", tmp_path / "missing" / "a.ckpt")
    with pytest.raises(IsADirectoryError):
        atomic_write_bytes(b"x", tmp_path / "folder")
    with pytest.raises(ValueError, match="not a regular file"):
        atomic_write_bytes(b"x", tmp_path / "pipe")
    assert _names(tmp_path) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs")
def test_checksums_are_written_where_the_user_switched_them_off(tmp_path):
    """Our files must have CRCs whatever torch's option says, and the option must be restored, even after an error."""
    torch.serialization.set_crc32_options(False)
    try:
        atomic_torch_save({"step": 1}, tmp_path / "a.ckpt")
        with pytest.raises(FileNotFoundError):
            atomic_torch_save({"step": 1}, tmp_path / "missing" / "a.ckpt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify_file(tmp_path / "a.ckpt").has_checksums


def test_nothing_is_drawn_from_global_generators(tmp_path):
    """Saving must not change the random numbers of the training that saves."""
    before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()
    atomic_torch_save({"step": 1}, tmp_path / "a.ckpt")
    after = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()
    assert before[:3] == after[:3]
    assert torch.equal(before[3], after[3])


def _overwrite_for_ever(path: Path) -> None:
    number = 0
    while True:
        number += 1
        atomic_torch_save({"number": number, "weights": torch.full((20_000,), number)}, path)


def test_path_always_loads_when_its_writer_is_killed(tmp_path):
    """After SIGKILL at any moment the path must hold one whole save, and the dead process's leftovers must be found."""
    path = tmp_path / "last.ckpt"
    atomic_torch_save({"number": 0, "weights": torch.full((20_000,), 0)}, path)
    last_numbers = set()
    for _ in range(20):
        process = FORK.Process(target=_overwrite_for_ever, args=(path,))
        process.start()
        time.sleep(random.SystemRandom().uniform(0.005, 0.06))
        process.kill()
        process.join()
        verify_file(path)
        checkpoint = _load(path)
        assert torch.equal(checkpoint["weights"], torch.full((20_000,), checkpoint["number"]))
        last_numbers.add(checkpoint["number"])
    assert len(last_numbers) > 1, "no kill came after a write: the test has seen nothing"
    leftovers = [leftover for leftover, _ in find_leftovers(tmp_path)]
    assert sorted([path, *leftovers]) == sorted(tmp_path.iterdir())


def test_leftovers_of_the_living_and_of_other_hosts_are_not_reported(tmp_path):
    """A temporary file must count as left over only if its writer is known to be dead."""
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    host = os.uname().nodename
    (tmp_path / f".a.ckpt.tmp-{host}-{dead.pid}-0123456789abcdef").touch()
    (tmp_path / f".b.ckpt.tmp-elsewhere-{dead.pid}-0123456789abcdef").touch()
    (tmp_path / f".c.ckpt.tmp-{host}-{os.getppid()}-0123456789abcdef").touch()
    (tmp_path / f".d.ckpt.tmp-{host}-{dead.pid}-of-somebody-else").touch()
    assert [target for _, target in find_leftovers(tmp_path)] == ["a.ckpt"]
    assert [target for _, target in find_leftovers(tmp_path, other_hosts=True)] == ["a.ckpt", "b.ckpt"]
    assert list(find_leftovers(tmp_path / "missing")) == []


def test_leftover_of_an_earlier_process_with_our_id_is_reported(tmp_path):
    """In containers each start has the same process id: leftovers of the last process must go, our files must stay."""
    (tmp_path / f".a.ckpt.tmp-{os.uname().nodename}-{os.getpid()}-0123456789abcdef").touch()
    with atomic_writer(tmp_path / "b.ckpt"):
        assert sorted(os.listdir(tmp_path))[1].startswith(".b.ckpt.tmp-")
        assert [target for _, target in find_leftovers(tmp_path)] == ["a.ckpt"]
