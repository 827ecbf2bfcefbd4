from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.contents import write_manifest
from lightning_faulttolerant.checkpoint.directory import AtomicDirectory
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from tests.cli.checkpoints import call, flip, foreign, save, save_series

Capture = pytest.CaptureFixture[str]


def test_sound_files_give_status_0_and_a_line_each(tmp_path: Path, capsys: Capture) -> None:
    """Files and whole runs are verified, one line for each file."""
    paths = save_series(tmp_path / "run" / "fit-1", 2)
    other = save(tmp_path / "other.ckpt")
    found = call(capsys, "verify", tmp_path / "run", other)
    assert (found.status, found.lines) == (0, [f"{path}: verified" for path in [*paths, other]])


@pytest.mark.parametrize("place", ["file", "run"])
def test_one_damaged_file_among_others_gives_status_1(tmp_path: Path, capsys: Capture, place: str) -> None:
    """A single flipped byte gives status 1 and a line with the reason, whether the file or the run was named."""
    first, second = save_series(tmp_path, 2)
    flip(first)
    found = call(capsys, "verify", *([tmp_path] if place == "run" else [first, second]))
    assert found.status == 1
    assert found.lines[0].startswith(f"{first}: damaged: record ")
    assert found.lines[1:] == [f"{second}: verified"]


def test_what_is_missing_gives_status_1(tmp_path: Path, capsys: Capture) -> None:
    """A missing file, and a directory without any checkpoint, are missing."""
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "gone.ckpt", tmp_path / "empty"):
        found = call(capsys, "verify", path)
        assert found.status == 1
        assert found.out.startswith(f"{path}: missing: ")


def test_no_checkpoint_at_all_is_damage(tmp_path: Path, capsys: Capture) -> None:
    """A file that torch.save has not written counts as damaged when it is named."""
    (tmp_path / "notes.txt").write_text("hello")
    found = call(capsys, "verify", tmp_path / "notes.txt")
    assert (found.status, "damaged" in found.out) == (1, True)


def test_quiet_prints_only_what_is_not_verified(tmp_path: Path, capsys: Capture) -> None:
    """With --quiet, sound files are silent, and damaged ones are not."""
    first, second = save_series(tmp_path, 2)
    found = call(capsys, "verify", "--quiet", tmp_path)
    assert (found.status, found.out) == (0, "")
    flip(second)
    found = call(capsys, "verify", "--quiet", tmp_path)
    assert (found.status, len(found.lines)) == (1, 1)
    assert found.out.startswith(second), first


def test_without_checksums_has_its_own_word_and_strict_refuses_it(tmp_path: Path, capsys: Capture) -> None:
    """A file without checksums gives 0 and is not called verified; with --strict it gives 1, and --quiet shows it."""
    path = tmp_path / "old.ckpt"
    torch.save(foreign(), path, _use_new_zipfile_serialization=False)
    found = call(capsys, "verify", path)
    assert found.status == 0
    assert found.out.startswith(f"{path}: no checksums: ")
    assert call(capsys, "verify", "--strict", path).status == 1
    assert call(capsys, "verify", "--quiet", path).out == found.out


def test_a_directory_is_verified_by_its_manifest(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committed directory is one line; a changed byte in it is damage, and an additional file is only mentioned."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"123")
    write_manifest(folder)
    assert call(capsys, "verify", folder).lines == [f"{folder}: verified"]
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "verify", "sharded").lines == ["sharded: verified"]
    monkeypatch.chdir(folder)
    assert call(capsys, "verify", ".").lines == [".: verified"]
    (folder / "notes").write_text("hello")
    found = call(capsys, "verify", folder)
    assert (found.status, found.lines) == (0, [f"{folder}: verified: 1 file in its directory not in its manifest"])
    (folder / "weights.bin").write_bytes(b"124")
    found = call(capsys, "verify", folder)
    assert found.status == 1
    assert "weights.bin has CRC32" in found.out


def test_a_directory_that_was_never_committed_is_no_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    """A directory that AtomicDirectory has begun is skipped below a directory, and bad if named, but not damaged."""
    saver = AtomicDirectory(tmp_path, is_master=True)
    begun = Path(saver.prepare_checkpoint_directory())
    (begun / "weights.bin").write_bytes(b"123")
    save(tmp_path / "a.ckpt")
    found = call(capsys, "verify", tmp_path)
    assert (found.status, found.lines) == (0, [f"{tmp_path}/a.ckpt: verified"])
    found = call(capsys, "verify", begun)
    assert found.status == 1
    assert found.out.startswith(f"{begun}: not committed: process {os.getpid()} on ")
    assert "not committed" in call(capsys, "list", tmp_path).out
    saver.symlink_latest(begun)
    assert call(capsys, "verify", begun).lines == [f"{begun}: verified"]


def test_a_directory_that_was_set_aside_is_passed_over(tmp_path: Path, capsys: Capture) -> None:
    """A committed directory that AtomicDirectory has renamed as damaged is listed as set aside, and never pruned."""
    saver = AtomicDirectory(tmp_path, is_master=True)
    for content in (b"123", b"456"):
        folder = Path(saver.prepare_checkpoint_directory())
        (folder / "weights.bin").write_bytes(content)
        saver.symlink_latest(folder)
    (folder / "weights.bin").write_bytes(b"457")
    AtomicDirectory(tmp_path, is_master=True).latest()
    [aside] = tmp_path.glob("*.damaged")
    assert call(capsys, "verify", tmp_path).status == 0
    assert "damaged, set aside" in call(capsys, "list", tmp_path).out
    save_series(tmp_path, 2)
    found = call(capsys, "prune", tmp_path, "--keep-last", 1, "--damaged")
    assert (found.status, found.lines[-1].partition(",")[0]) == (0, "1 autosave deleted")
    assert aside.is_dir()


def test_what_was_set_aside_is_passed_over_unless_it_is_named(tmp_path: Path, capsys: Capture) -> None:
    """Autosaves set aside as damaged don't make a run bad forever; if they are named, they are damaged."""
    flip(save_series(tmp_path, 2)[1])
    AutosaveSeries(tmp_path).newest()
    [aside] = tmp_path.glob("*.damaged")
    assert call(capsys, "verify", tmp_path).status == 0
    assert call(capsys, "verify", aside).status == 1


def test_an_unreadable_file_gives_status_2_unless_one_is_damaged(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable file gives status 2, but 1 if there is also a damaged file, since that is certain."""
    sound, refused, damaged = save_series(tmp_path, 3)
    flip(damaged)
    from lightning_faulttolerant.cli import verification

    opened = verification.open_checkpoint

    def refuse(path: str, **options: bool) -> object:
        if str(path) == refused:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, **options)

    monkeypatch.setattr(verification, "open_checkpoint", refuse)
    found = call(capsys, "verify", sound, refused)
    assert found.status == 2
    assert found.lines[1] == f"{refused}: unreadable: {refused}: Permission denied"
    assert call(capsys, "verify", sound, refused, damaged).status == 1


def test_progress_is_shown_on_a_terminal_only_and_wiped(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal a line shows the progress of a large file and is wiped at the end; elsewhere stderr stays empty."""
    path = save(tmp_path / "a.ckpt", {"weights": torch.zeros(3_000_000)})
    monkeypatch.setattr("lightning_faulttolerant.cli.verification._SHOWN_FROM_BYTES", 1000)
    monkeypatch.setattr("lightning_faulttolerant.cli.verification._SHOWN_EVERY_SECONDS", 0.0)
    assert call(capsys, "verify", path).err == ""
    monkeypatch.setattr("lightning_faulttolerant.cli.verification.sys.stderr.isatty", lambda: True)
    found = call(capsys, "verify", path)
    assert "% of 12 MB read: a.ckpt" in found.err
    assert found.err.endswith("\r\x1b[K")
    assert found.out == f"{path}: verified\n"
