"""The store law under errors of the file system: each is raised as what it is, and the old file stays."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.writers import (
    DIRECTORY,
    FILE_WRITERS,
    INCREMENTAL,
    SHARDS,
    WRITERS,
    content,
    exit_code,
    leftovers,
    prepared,
)
from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with, lose, write_short

ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EROFS]
EACH_WRITER = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)

_SKIPPED = 77
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


@pytest.mark.parametrize(
    ("writer", "number"),
    [
        *((writer, number) for writer in FILE_WRITERS if writer is not INCREMENTAL for number in ERRORS),
        *((INCREMENTAL, number) for number in (errno.ENOSPC, errno.EIO)),
        *(pytest.param(INCREMENTAL, number, marks=pytest.mark.slow) for number in ERRORS[2:]),
        (DIRECTORY, errno.EACCES),
        *(pytest.param(SHARDS, number, marks=pytest.mark.slow) for number in (errno.ENOSPC, errno.EIO)),
        *(pytest.param(DIRECTORY, number, marks=pytest.mark.slow) for number in ERRORS if number != errno.EACCES),
    ],
    ids=lambda value: errno.errorcode.get(value) if isinstance(value, int) else value.name,
)
def test_an_error_at_any_step_is_raised_and_keeps_the_old_file(writer, number, tmp_path):
    """The error must keep its number and path, the old save must stay, nothing may be left, and the next must work."""
    fresh = prepared(writer, tmp_path, num_saves=3)
    for at in range(1, 200):
        here = fresh()
        raised = None
        with FaultyFiles(tmp_path, fail_with(number), at=at) as files:
            try:
                writer.save(here, 4)
            except OSError as error:
                raised = error
        if raised is None:
            assert len(files.steps) < at, f"the error at {files.steps[at - 1]} was swallowed"
            assert at > 6
            return
        assert (raised.errno, raised.strerror) == (number, os.strerror(number))
        assert str(here) in str(raised.filename)
        # The new file may be found only if it was published already.
        is_published = any(step.kind == "rename" for step in files.steps[: at - 1])
        assert writer.number(here) in ((3, 4) if is_published else (3,))
        assert not writer.cleans_up or leftovers(here) == []
        writer.save(here, 5)
        assert writer.number(here) == 5
        assert leftovers(here) == []
    raise AssertionError("the save does not end")


@pytest.mark.parametrize("first", [1, 2])
@EACH_WRITER
def test_a_disk_that_is_full_and_stays_full(writer, first, tmp_path):
    """If each write from some point on fails, the error must be the first one's, not that of the cleanup."""
    writer.save(tmp_path / "run", 1)
    with (
        FaultyFiles(tmp_path, fail_with(errno.ENOSPC), kind="write", at=first, lasting=True) as files,
        pytest.raises(OSError, match="No space left on device") as caught,
    ):
        writer.save(tmp_path / "run", 2)
    assert caught.value.errno == errno.ENOSPC
    assert sum(step.kind == "write" for step in files.steps) >= first
    assert writer.number(tmp_path / "run") == 1
    assert not writer.cleans_up or leftovers(tmp_path) == []


def _in_a_full_tmpfs(directory: Path, main: Callable[[], None]) -> int:
    """Run a function in a forked process whose directory is a file system of 2 MiB."""

    def mount_and_run() -> None:
        system = ctypes.CDLL(None, use_errno=True)
        is_root = os.geteuid() == 0
        flags = _CLONE_NEWNS if is_root else _CLONE_NEWNS | _CLONE_NEWUSER
        if system.unshare(flags) or system.mount(b"none", b"/", None, 0x44000, None):  # MS_REC | MS_PRIVATE
            os._exit(_SKIPPED)
        if system.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, b"size=2m"):
            os._exit(_SKIPPED)
        main()

    return exit_code(mount_and_run)


@EACH_WRITER
def test_a_small_file_system_runs_full(writer, tmp_path):
    """On a disk that is really full, the save must raise ENOSPC and keep all files; with room again, it must work."""
    directory = tmp_path / "mounted"
    directory.mkdir()

    def main() -> None:
        writer.save(directory / "run", 1)
        filler = directory / "filler"
        free = os.statvfs(directory)
        filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 100_000))
        with pytest.raises(OSError, match="No space left on device") as caught:
            writer.save(directory / "run", 2)
        assert caught.value.errno == errno.ENOSPC
        assert writer.number(directory / "run") == 1
        assert not writer.cleans_up or leftovers(directory) == []
        filler.unlink()
        writer.save(directory / "run", 2)
        assert writer.number(directory / "run") == 2

    code = _in_a_full_tmpfs(directory, main)
    if code == _SKIPPED:
        pytest.skip("no tmpfs may be mounted here; test_a_disk_that_is_full_and_stays_full shows the same by injection")
    assert code == 0
    assert list(directory.iterdir()) == [], "it was not mounted"


@EACH_WRITER
def test_a_directory_that_may_not_be_written(writer):
    """A missing permission must be raised as such, and the old file must stay; root runs this as another user."""
    directory = Path(tempfile.mkdtemp())
    try:
        writer.save(directory / "run", 1)
        directory.chmod(0o755)
        (directory / "run").chmod(0o555)

        def main() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            with pytest.raises(PermissionError):
                writer.save(directory / "run", 2)

        assert exit_code(main) == 0
        assert writer.number(directory / "run") == 1
        assert not writer.cleans_up or leftovers(directory) == []
    finally:
        (directory / "run").chmod(0o755)
        shutil.rmtree(directory)


@EACH_WRITER
def test_short_writes_lose_nothing(writer, tmp_path):
    """A system that accepts only half of each write must get the rest."""
    with FaultyFiles(tmp_path, write_short, kind="write") as files:
        writer.save(tmp_path / "run", 1)
    assert sum(step.num_bytes for step in files.steps) > content(1)["weights"].nbytes * 1.5
    assert writer.number(tmp_path / "run") == 1


@EACH_WRITER
def test_a_lost_rename_is_an_error(writer, tmp_path):
    """A rename that is reported as done and is not must be raised; the old file must stay, and nothing may be left."""
    writer.save(tmp_path / "run", 1)
    with (
        FaultyFiles(tmp_path, lose, kind="rename"),
        pytest.raises(OSError, match="reported a rename that it did not do") as caught,
    ):
        writer.save(tmp_path / "run", 2)
    assert caught.value.errno == errno.EIO
    assert writer.number(tmp_path / "run") == 1
    assert not writer.cleans_up or leftovers(tmp_path) == []


@EACH_WRITER
def test_an_error_in_cleaning_up_does_not_hide_the_first(writer, tmp_path):
    """If even the temporary file can't be deleted, the raised error must be the first one."""

    def fail(step, carry_out):
        raise OSError({"fsync": errno.EIO, "unlink": errno.EROFS}[step.kind], step.kind)

    writer.save(tmp_path / "run", 1)
    with FaultyFiles(tmp_path, fail, kind=("fsync", "unlink")), pytest.raises(OSError, match="fsync") as caught:
        writer.save(tmp_path / "run", 2)
    assert caught.value.errno == errno.EIO
    assert writer.number(tmp_path / "run") == 1
