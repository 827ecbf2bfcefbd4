"""The paths that have changed since the first start."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.files.roots import Moves


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


def test_urls(tmp_path: Path) -> None:
    """A root can be in an object store."""
    import fsspec

    fsspec.filesystem("memory").pipe_file("/runs/one/file", b"1")
    found = Moves({"root": "memory://runs/one"}, {"root": "memory://runs/two"})
    assert found.first("memory://runs/two/logs") == "memory://runs/one/logs"
    assert found.first(f"{tmp_path}/runs/two") is None
