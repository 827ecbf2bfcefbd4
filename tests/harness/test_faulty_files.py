"""Each step below the directory is counted, fails as chosen, and nothing stays replaced."""

from __future__ import annotations

import builtins
import errno
import io
import multiprocessing
import os
import pathlib
import shutil
import signal
from pathlib import Path

import pytest

from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with, kill_after, kill_before, lose, write_short

FORK = multiprocessing.get_context("fork")


def _kinds(files: FaultyFiles) -> list[str]:
    return [step.kind for step in files.steps]


def _functions() -> dict[tuple[str, str], object]:
    return {
        (module.__name__, name): value for module in (os, io, builtins, pathlib) for name, value in vars(module).items()
    }


def _protocol(directory: Path) -> None:
    with open(directory / "new", "xb") as file:
        file.write(b"x" * 10)
        file.flush()
        os.fsync(file.fileno())
    os.replace(directory / "new", directory / "file")
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_steps_of_a_protocol_are_seen_in_order(tmp_path):
    """Each step must be counted once, under its kind, with its path and, for a write, its size."""
    with FaultyFiles(tmp_path) as files:
        _protocol(tmp_path)
    assert _kinds(files) == ["open", "write", "fsync", "close", "rename", "fsync_directory"]
    assert [step.number for step in files.steps] == [1, 2, 3, 4, 5, 6]
    assert files.steps[1].num_bytes == 10
    assert files.steps[4].path == tmp_path / "file"
    assert files.steps[5].path == tmp_path


@pytest.mark.parametrize(
    ("action", "kinds"),
    [
        (lambda d: (d / "sub").mkdir(), ["mkdir"]),
        (lambda d: os.makedirs(d / "sub" / "sub"), ["mkdir", "mkdir"]),
        (lambda d: (d / "file").unlink(), ["unlink"]),
        (lambda d: os.remove(d / "file"), ["unlink"]),
        (lambda d: (d / "file").replace(d / "other"), ["rename"]),
        (lambda d: (d / "file").rename(d / "other"), ["rename"]),
        (lambda d: (d / "link").symlink_to("file"), ["link"]),
        (lambda d: os.link(d / "file", d / "link"), ["link"]),
        (lambda d: list(d.iterdir()), ["list"]),
        (lambda d: list(d.glob("*")), ["list"]),
        (lambda d: os.truncate(d / "file", 1), ["truncate"]),
        (lambda d: (d / "file").write_bytes(b"12"), ["open", "write", "close"]),
        (lambda d: (d / "file").write_text("12"), ["open", "write", "close"]),
        (lambda d: shutil.rmtree(d / "tree"), ["list", "unlink", "rmdir"]),
        (lambda d: shutil.copyfile(d / "file", d / "copy"), ["open", "write", "write", "close"]),
        (lambda d: (d / "file").read_bytes(), []),
        (lambda d: (d / "file").stat(), []),
        (lambda d: (d.parent / f"{d.name}-beside").write_bytes(b"12"), []),
    ],
)
def test_functions_of_the_standard_library_are_seen(tmp_path, action, kinds):
    """Every function that changes or lists files must be counted; those that read, or work elsewhere, must not."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").touch()
    with FaultyFiles(tmp_path) as files:
        action(tmp_path)
    assert _kinds(files) == kinds


def test_relative_paths_links_and_descriptors_are_located(tmp_path, monkeypatch):
    """A step must be seen however its file is named."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    with FaultyFiles(tmp_path / "link") as files:
        descriptor = os.open("a", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"12")
        os.close(descriptor)
        folder = os.open(".", os.O_RDONLY)
        os.unlink("a", dir_fd=folder)
        os.close(folder)
        with open(os.fsencode(tmp_path / "link" / "b"), "ab", buffering=0) as file:
            file.write(b"1")
    assert [(step.kind, step.path.name) for step in files.steps] == [
        ("open", "a"),
        ("write", "a"),
        ("unlink", "a"),
        ("open", "b"),
        ("write", "b"),
        ("close", "b"),
    ]


@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab", "x+b", "w+", "xt", "r+", "r+b"])
def test_a_file_opened_in_the_block_is_like_any_other(tmp_path, mode):
    """`open` must return an object with the same type, mode, and behavior as without the block."""
    for name in ("plain", "seen"):
        if "r" in mode:
            (tmp_path / name).write_text("old content")
    with open(tmp_path / "plain", mode) as plain:
        plain.write("é\n" if "b" not in mode else b"\xe9\n")
        plain.seek(0)
        content = plain.read() if "+" in mode else None
    with FaultyFiles(tmp_path), open(tmp_path / "seen", mode) as seen:
        seen.write("é\n" if "b" not in mode else b"\xe9\n")
        seen.seek(0)
        assert (seen.read() if "+" in mode else None) == content
    assert (type(seen), seen.mode, seen.closed) == (type(plain), plain.mode, True)
    assert (tmp_path / "seen").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EROFS])
def test_chosen_step_fails_with_its_error(tmp_path, number):
    """The chosen step must raise the system's error and have no effect; the others must continue."""
    with FaultyFiles(tmp_path, fail_with(number), kind="rename") as files, pytest.raises(OSError) as caught:  # noqa: PT011
        _protocol(tmp_path)
    assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))
    assert caught.value.filename == str(tmp_path / "file")
    assert _kinds(files)[-1] == "rename"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_number_and_kind_choose_the_step(tmp_path):
    """`at` must count the steps of the kind, `lasting` must choose all from there, and without `at` all are chosen."""
    chosen = []

    def note(step, carry_out):
        chosen.append(step.number)
        return carry_out()

    for options in ({"at": 2}, {"at": 2, "lasting": True}, {}, {"kind": ("write", "open"), "at": 3}, {"at": 9}):
        with FaultyFiles(tmp_path, note, **{"kind": "write", **options}):
            for name in "abc":
                (tmp_path / name).write_bytes(b"1")
        chosen.append(None)
    assert chosen == [5, None, 5, 8, None, 2, 5, 8, None, 4, None, None]


def test_short_write_is_made_good_by_a_buffer_and_shown_by_a_raw_file(tmp_path):
    """Half of the bytes must be written and reported, as a system call may do."""
    with FaultyFiles(tmp_path, write_short, kind="write", at=1) as files:
        (tmp_path / "buffered").write_bytes(b"12345")
    assert (tmp_path / "buffered").read_bytes() == b"12345"
    assert [step.num_bytes for step in files.steps if step.kind == "write"] == [5, 2]
    with FaultyFiles(tmp_path, write_short, kind="write"):
        with open(tmp_path / "raw", "wb", buffering=0) as file:
            assert file.write(b"12345") == 3
        descriptor = os.open(tmp_path / "raw", os.O_WRONLY | os.O_APPEND)
        assert os.write(descriptor, b"45") == 1
        os.close(descriptor)
    assert (tmp_path / "raw").read_bytes() == b"1234"


def test_lost_step_is_reported_done_and_is_not(tmp_path):
    """A lost rename must leave both files as they were, and raise nothing."""
    (tmp_path / "file").write_bytes(b"old")
    with FaultyFiles(tmp_path, lose, kind="rename"):
        _protocol(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "new").exists()


@pytest.mark.parametrize(("fault", "is_renamed"), [(kill_before, False), (kill_after, True)])
def test_process_is_killed_at_the_step(tmp_path, fault, is_renamed):
    """The kill must come before the step, or after it, and be a SIGKILL."""

    def main() -> None:
        with FaultyFiles(tmp_path, fault, kind="rename"):
            _protocol(tmp_path)

    process = FORK.Process(target=main)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "file").exists() == is_renamed


@pytest.mark.parametrize("fault", [None, fail_with(errno.EIO), lose])
def test_everything_is_put_back(tmp_path, fault):
    """After the block, also one that raised, each function must be the same object as before."""
    before = _functions()
    for kind in ("unlink", "mkdir"):
        with pytest.raises(OSError), FaultyFiles(tmp_path, fault, kind=kind):  # noqa: PT011, PT012
            assert _functions() != before
            (tmp_path / "missing" / "a").mkdir()
            os.unlink(tmp_path / "missing" / "a")
    after = _functions()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_error_at_close_comes_out_and_the_file_is_closed(tmp_path):
    """A close that fails, as on NFS, must raise its error and still release the descriptor."""
    with FaultyFiles(tmp_path, fail_with(errno.EDQUOT), kind="close"):
        file = open(tmp_path / "a", "wb")  # noqa: SIM115
        descriptor = file.fileno()
        with pytest.raises(OSError, match="quota"):
            file.close()
    assert file.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
