"""The fault injector: each step is counted, fails as chosen, and after a power loss, what was synced exists."""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import shutil
from pathlib import Path

import fsspec
import pytest

from tests.faulty_files import FaultyFiles, FaultyURLs, PowerLoss, PowerLost, fail_with, lose, write_short


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _protocol(directory: Path) -> None:
    with open(directory / "new", "xb") as file:
        file.write(b"x" * 10)
        file.flush()
        os.fsync(file.fileno())
    os.replace(directory / "new", directory / "file")
    _sync(directory)


def _write_descriptor(directory: Path) -> None:
    descriptor = os.open(directory / "file", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"12")
    os.close(descriptor)


ACTIONS = [
    (_protocol, ["open", "write", "fsync", "close", "rename", "fsync_directory"]),
    (_write_descriptor, ["open", "write"]),
    (lambda d: os.makedirs(d / "sub" / "sub"), ["mkdir", "mkdir"]),
    (lambda d: (d / "file").unlink(), ["unlink"]),
    (lambda d: (d / "file").rename(d / "other"), ["rename"]),
    (lambda d: (d / "link").symlink_to("file"), ["link"]),
    (lambda d: os.link(d / "file", d / "link"), ["link"]),
    (lambda d: list(d.iterdir()), ["list"]),
    (lambda d: os.truncate(d / "file", 1), ["truncate"]),
    (lambda d: (d / "file").write_text("12"), ["open", "write", "close"]),
    (lambda d: shutil.rmtree(d / "tree"), ["list", "unlink", "rmdir"]),
    (lambda d: shutil.copyfile(d / "file", d / "copy"), ["open", "write", "write", "close"]),
    (lambda d: (d / "file").read_bytes(), []),
    (lambda d: (d.parent / "beside").write_bytes(b"12"), []),
]


@pytest.mark.parametrize(("action", "kinds"), ACTIONS)
def test_functions_of_the_standard_library_are_seen(tmp_path, action, kinds):
    """Every function that changes or lists files is counted once, also through a link; then each is put back."""

    def functions():
        return {(of.__name__, name): value for of in (os, io, builtins, pathlib) for name, value in vars(of).items()}

    before, root = functions(), tmp_path / "real"
    (root / "tree").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for name in ("file", "tree/leaf"):
        (root / name).write_bytes(b"content")
    with FaultyFiles(tmp_path / "link") as files:
        action(root)
    assert [step.kind for step in files.steps] == kinds
    assert all(value is functions()[name] for name, value in before.items())


def test_chosen_steps_fail(tmp_path):
    """`at` counts the steps of the kind, and `lasting` chooses all from there; an error has a number and the path."""
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
    with FaultyFiles(tmp_path, fail_with(errno.EIO), kind="rename"), pytest.raises(OSError, match=r"'.*/file'$"):
        _protocol(tmp_path)
    assert not (tmp_path / "file").exists()


def test_steps_that_are_done_in_part_or_not_at_all(tmp_path):
    """Half of the bytes are written and reported, as a system call may do; a lost rename is not done."""
    with FaultyFiles(tmp_path, write_short, kind="write"):
        (tmp_path / "buffered").write_bytes(b"12345")
        with open(tmp_path / "raw", "wb", buffering=0) as file:
            assert file.write(b"12345") == 3
        _write_descriptor(tmp_path)
    assert (tmp_path / "buffered").read_bytes() == b"12345"
    assert (tmp_path / "raw").read_bytes() == b"123"
    with FaultyFiles(tmp_path, lose, kind="rename"):
        _protocol(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"1"


def _state(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def _replace(directory: Path, *, syncs_file: bool = True, syncs_directory: bool = True) -> None:
    (directory / "new").write_text("new")
    if syncs_file:
        _sync(directory / "new")
    os.replace(directory / "new", directory / "file")
    if syncs_directory:
        _sync(directory)
    (directory / "other").unlink()


@pytest.mark.parametrize(
    ("keeps", "options", "expected"),
    [
        ("synced", {}, {"file": "new", "other": "other"}),
        ("names", {}, {"file": "new"}),
        ("removals", {}, {"file": "new"}),
        ("synced", {"syncs_file": False}, {"file": "", "other": "other"}),
        ("names", {"syncs_file": False}, {"file": ""}),
        ("synced", {"syncs_directory": False}, {"file": "old", "other": "other"}),
        ("names", {"syncs_directory": False}, {"file": "new"}),
        ("removals", {"syncs_directory": False}, {"file": "old"}),
    ],
)
def test_what_is_left_follows_from_what_was_synced(tmp_path, keeps, options, expected):
    """A missing fsync must show as a lost or an empty file, with the kind of file system that reveals it."""
    for name in ("other", "file"):
        (tmp_path / name).write_text("old" if name == "file" else name)
    with PowerLoss(tmp_path, keeps=keeps) as loss:
        _replace(tmp_path, **options)
    assert _state(tmp_path) == expected
    assert not loss.has_lost


def test_power_is_lost_before_the_chosen_step(tmp_path):
    """Nothing may happen from the chosen step on, even in a program that catches everything and cleans up."""
    for name in ("file", "other"):
        (tmp_path / name).write_text("old")
    for at in range(1, 8):
        with PowerLoss(tmp_path, at=at, keeps="names") as loss:
            try:
                _replace(tmp_path)
            except BaseException:
                with pytest.raises(PowerLost):
                    (tmp_path / "file").unlink()
                raise
        assert loss.has_lost
    assert _state(tmp_path) == {"file": "new", "other": "old"}


def test_trees_are_kept_as_of_their_last_sync(tmp_path):
    """A tree survives under its new name once the parent was synced, and a new file never gets a deleted one's content.

    File systems reuse inode numbers. A step that raised does not count as done.
    """
    (tmp_path / "old").write_text("old")
    with PowerLoss(tmp_path, keeps="removals"):
        (tmp_path / "temporary").mkdir()
        (tmp_path / "temporary" / "synced").write_text("1")
        (tmp_path / "temporary" / "link").symlink_to("synced")
        _sync(tmp_path / "temporary" / "synced")
        _sync(tmp_path / "temporary")
        (tmp_path / "temporary" / "synced").write_text("over it")
        (tmp_path / "temporary" / "late").write_text("2")
        os.rename(tmp_path / "temporary", tmp_path / "final")
        for _ in range(5):
            (tmp_path / "old").unlink()
            (tmp_path / "old").write_text("new, not synced")
        _sync(tmp_path)
        (tmp_path / "lost").mkdir()
        with pytest.raises(OSError, match="not empty"):
            (tmp_path / "final").rmdir()
    assert _state(tmp_path) == {"final/link": "synced", "final/synced": "1", "old": ""}
    assert not (tmp_path / "lost").exists()


def test_steps_of_a_store(tmp_path):
    """Each step is seen in its block; an upload can fail in its middle and at its end, with a part visible."""
    fs, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    with FaultyURLs() as files:
        fs.pipe_file(f"{root}/c", b"345")
        with fsspec.open(f"memory:/{root}/a", "wb") as file:
            file.write(b"12")
        fs.mv(f"{root}/a", f"{root}/b")
        fs.ls(root)
        fs.rm_file(f"{root}/b")
    assert [step.kind for step in files.steps] == ["write", "open", "write", "close", "rename", "list", "unlink"]
    assert str(files.steps[4].path) == f"{root}/b"
    with FaultyURLs(fail_with(errno.EIO), kind="close"), pytest.raises(OSError, match="Input/output error"):
        fs.open(f"{root}/a", "wb").close()
    with FaultyURLs(write_short, kind="write"), fs.open(f"{root}/b", "wb") as file:
        assert file.write(b"12345") == 3
    assert [fs.cat_file(f"{root}/{name}") for name in "abc"] == [b"", b"123", b"345"]
