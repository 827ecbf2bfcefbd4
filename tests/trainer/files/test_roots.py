"""The paths that have changed since the first start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.files.roots import Moves, roots_of
from tests.runs import make_trainer


def test_roots_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots are absolute; the working directory counts only if it is below one of them."""
    monkeypatch.chdir(tmp_path)
    assert roots_of(make_trainer([], Path("runs"))) == {"default_root_dir": f"{tmp_path}/runs"}
    assert roots_of(make_trainer([], tmp_path)) == {
        "default_root_dir": f"{tmp_path}",
        "working directory": f"{tmp_path}",
    }


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose directory was removed has no working directory, which is not an error."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    trainer = make_trainer([], tmp_path)
    (tmp_path / "gone").rmdir()
    assert roots_of(trainer) == {"default_root_dir": f"{tmp_path}"}


def moves(tmp_path: Path, saved: str = "one", now: str = "two", **arguments: str) -> Moves:
    """Return the moves from one directory to another; the directory of the first start exists."""
    (tmp_path / saved).mkdir(parents=True, exist_ok=True)
    return Moves({"root": f"{tmp_path}/{saved}"}, {"root": f"{tmp_path}/{now}"}, **arguments)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("two", "one"), ("two/", "one"), ("two/a/b", "one/a/b"), ("two-more/a", None), ("three", None), ("", None)],
)
def test_path_below_a_changed_root(path: str, expected: str | None, tmp_path: Path) -> None:
    """A path becomes the same path below the root of the first start; no other path changes."""
    assert moves(tmp_path).first(f"{tmp_path}/{path}") == (expected and f"{tmp_path}/{expected}")


def test_innermost_root_counts(tmp_path: Path) -> None:
    """With two changed roots, a path belongs to the innermost; an unchanged root is not listed."""
    for name in ("a/x", "b"):
        (tmp_path / name).mkdir(parents=True)
    saved = {"outer": f"{tmp_path}/a", "inner": f"{tmp_path}/b", "same": f"{tmp_path}/c/y"}
    now = {"outer": f"{tmp_path}/c", "inner": f"{tmp_path}/c/x", "same": f"{tmp_path}/c/y"}
    found = Moves(saved, now)
    assert found.roots == {"outer": f"{tmp_path}/a", "inner": f"{tmp_path}/b"}
    assert found.first(f"{tmp_path}/c/x/file") == f"{tmp_path}/b/file"
    assert found.first(f"{tmp_path}/c/file") == f"{tmp_path}/a/file"


def test_links_are_followed(tmp_path: Path) -> None:
    """Lightning follows links in the directory of a ModelCheckpoint, but not in that of the Trainer."""
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "link")
    (tmp_path / "disk/two").mkdir()
    found = moves(tmp_path, "link/one", "link/two")
    assert found.first(f"{tmp_path}/link/two/a") == f"{tmp_path}/link/one/a"
    assert found.first(f"{tmp_path}/disk/two/a") == f"{tmp_path}/disk/one/a"


def test_roots_that_are_not_gone_back_to(tmp_path: Path) -> None:
    """A root is ignored if it is gone, was copied or moved with its autosaves, or is absent from an old checkpoint."""
    assert moves(tmp_path).roots
    assert moves(tmp_path, autosave=f"{tmp_path}/one/fault_tolerance/a.ckpt").roots
    assert not moves(tmp_path, autosave=f"{tmp_path}/two/fault_tolerance/a.ckpt").roots
    assert not Moves({"root": f"{tmp_path}/gone"}, {"root": f"{tmp_path}/two"}).roots
    assert not Moves({}, {"root": f"{tmp_path}/two"}).roots
    assert not Moves(None, {"root": f"{tmp_path}/two"}).roots


def test_urls(tmp_path: Path) -> None:
    """A root can be in an object store."""
    import fsspec

    fsspec.filesystem("memory").pipe_file("/runs/one/file", b"1")
    found = Moves({"root": "memory://runs/one"}, {"root": "memory://runs/two"})
    assert found.first("memory://runs/two/logs") == "memory://runs/one/logs"
    assert found.first(f"{tmp_path}/runs/two") is None
