"""After a power loss, the synced data exist, and of the rest what the chosen kind of file system keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faulty_files import PowerLoss, PowerLost


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _state(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(directory.rglob("*"))
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
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").write_text("other")
    with PowerLoss(tmp_path, keeps=keeps) as loss:
        _replace(tmp_path, **options)
    assert _state(tmp_path) == expected
    assert not loss.has_lost


def test_power_is_lost_before_the_chosen_step(tmp_path):
    """Nothing may happen from the chosen step on, even in a program that catches everything and cleans up."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").write_text("other")
    for at in range(1, 8):
        with PowerLoss(tmp_path, at=at, keeps="names") as loss:
            try:
                _replace(tmp_path)
            except BaseException:
                with pytest.raises(PowerLost):
                    (tmp_path / "file").unlink()
                raise
        assert loss.has_lost
        assert len(loss.steps) == at
    assert _state(tmp_path) == {"file": "new", "other": "other"}


def test_directories_links_and_renamed_directories_are_kept(tmp_path):
    """A tree must survive as far as each of its directories was synced, under its new name once the parent was."""
    with PowerLoss(tmp_path):
        (tmp_path / "temporary").mkdir()
        (tmp_path / "temporary" / "synced").write_text("1")
        (tmp_path / "temporary" / "link").symlink_to("synced")
        _sync(tmp_path / "temporary" / "synced")
        _sync(tmp_path / "temporary")
        (tmp_path / "temporary" / "late").write_text("2")
        os.rename(tmp_path / "temporary", tmp_path / "final")
        _sync(tmp_path)
        (tmp_path / "lost").mkdir()
    assert _state(tmp_path) == {"final/link": "synced", "final/synced": "1"}
    assert not (tmp_path / "lost").exists()


def test_content_is_that_of_the_last_fsync(tmp_path):
    """Content written over a synced file must be lost, and an untouched file must stay as it is."""
    (tmp_path / "untouched").write_text("0")
    with PowerLoss(tmp_path):
        for content in ("1", "2", "3"):
            (tmp_path / "file").write_text(content)
            if content == "2":
                _sync(tmp_path / "file")
                _sync(tmp_path)
    assert _state(tmp_path) == {"file": "2", "untouched": "0"}


def test_a_new_file_with_the_number_of_a_deleted_one_is_another_file(tmp_path):
    """File systems reuse inode numbers, so the deleted file's synced content must not become the new one's."""
    (tmp_path / "old").write_text("old")
    with PowerLoss(tmp_path):
        for _ in range(5):
            (tmp_path / "old").unlink()
            (tmp_path / "old").write_text("new, not synced")
        _sync(tmp_path)
    assert _state(tmp_path) == {"old": ""}


def test_failed_removal_changes_nothing(tmp_path):
    """A step that raised must not count as done."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("1")
    with PowerLoss(tmp_path, keeps="removals"):
        with pytest.raises(OSError, match="not empty"):
            (tmp_path / "folder").rmdir()
        _sync(tmp_path)
    assert _state(tmp_path) == {"folder/file": "1"}
