from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint.contents import write_manifest
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.cli import found as finding
from lightning_faulttolerant.records.runs import VARIABLE, Command, RegisteredRun, Registry
from tests.cli.checkpoints import call, checkpoint, flip, foreign, save, save_series

Capture = pytest.CaptureFixture[str]


def row(lines: list[str], name: str) -> list[str]:
    """Return the cells of the table's line of a file."""
    [line] = [line for line in lines if line.split()[:1] == [name]]
    return [cell for cell in line.split("  ") if cell.strip()]


def test_a_run_is_listed_with_what_each_autosave_holds(tmp_path: Path, capsys: Capture) -> None:
    """The table shows each autosave of each fit, in the order of saving, with its position and that it verifies."""
    save_series(tmp_path / "run" / "fit-1", 2)
    save_series(tmp_path / "run" / "fit-10", 1)
    save_series(tmp_path / "run" / "fit-9", 1)
    found = call(capsys, "list", tmp_path)
    assert (found.status, found.err) == (0, "")
    folders = [line for line in found.lines if line.startswith("/")]
    assert folders == [str(tmp_path / "run" / name) for name in ("fit-1", "fit-9", "fit-10")]
    name, step, epoch, batch, _saved, size, ranks, state = (
        cell.strip() for cell in row(found.lines, "autosave-00000002-epoch=0-batch=2.ckpt")
    )
    assert (step, epoch, batch, ranks, state) == ("2", "0", "2", "1", "verified")
    assert size.endswith(" kB")
    places = [found.out.index(f"autosave-0000000{number}") for number in (1, 2)]
    assert places == sorted(places), name


def test_kept_autosaves_are_listed_as_such(tmp_path: Path, capsys: Capture) -> None:
    """One that is kept for good says so, among the newest, after a run has moved it, and when it is superseded."""
    series = AutosaveSeries(tmp_path / "run" / "fit-1", keep_last=2)
    for step in (1, 2, 3):
        series.save(checkpoint(step=step, batch=step), epoch=0, batch=step, global_step=step, keep=step != 2)
    lines = call(capsys, "list", tmp_path).lines
    states = {step: row(lines, Path(path).name)[-1].strip() for step, path in enumerate(series.paths(), 2)}
    assert states == {2: "verified", 3: "kept, verified"}
    assert row(lines, "autosave-00000001-epoch=0-batch=1-kept.ckpt")[-1].strip() == "kept, verified"
    series.set_aside("discarded")
    lines = call(capsys, "list", tmp_path).lines
    found = [
        row(lines, f"autosave-0000000{step}-epoch=0-batch={step}{kept}.ckpt")[-1].strip()
        for step, kept in ((1, "-kept"), (2, ""), (3, "-kept"))
    ]
    assert found == ["kept, verified", "superseded, verified", "kept, verified"]


@pytest.mark.parametrize("below", ["", "run", "run/fit-1"])
def test_a_dirpath_a_run_or_a_fit_can_be_given(tmp_path: Path, capsys: Capture, below: str) -> None:
    """Each of the three directories leads to the same autosaves."""
    paths = save_series(tmp_path / "run" / "fit-1", 2)
    found = call(capsys, "list", tmp_path / below, "--json")
    assert [entry["path"] for entry in json.loads(found.out)["checkpoints"]] == paths


def test_files_of_model_checkpoint_are_listed(tmp_path: Path, capsys: Capture) -> None:
    """A checkpoint without our part is listed with Lightning's counters, and its number of ranks is unknown."""
    save(tmp_path / "checkpoints" / "epoch=1.ckpt", foreign(step=7, epoch=1, batch=2))
    found = call(capsys, "list", tmp_path)
    cells = [cell.strip() for cell in row(found.lines, "epoch=1.ckpt")]
    assert (cells[1:4], cells[-2:]) == (["7", "1", "2"], ["-", "verified"])


def test_damage_is_shown_with_its_reason(tmp_path: Path, capsys: Capture) -> None:
    """A flipped byte and a cut file are damaged, with the reason below the table; the name still gives the position."""
    flipped, cut, _ = save_series(tmp_path, 3)
    flip(flipped)
    os.truncate(cut, os.path.getsize(cut) // 2)
    found = call(capsys, "list", tmp_path)
    assert found.status == 0
    assert row(found.lines, Path(flipped).name)[-1].strip() == "damaged"
    assert [cell.strip() for cell in row(found.lines, Path(cut).name)][1:4] == ["-", "0", "2"]
    assert row(found.lines, Path(cut).name)[-1].strip() == "damaged"
    assert any(Path(flipped).name in line and "CRC32" in line for line in found.lines)


def test_what_was_set_aside_is_told_apart(tmp_path: Path, capsys: Capture) -> None:
    """Autosaves set aside as damaged, and superseded ones, are listed as such."""
    flip(save_series(tmp_path / "fit-1", 2)[1])
    series = AutosaveSeries(tmp_path / "fit-1")
    series.newest()
    aside = call(capsys, "list", tmp_path)
    assert row(aside.lines, "autosave-00000002-epoch=0-batch=2.ckpt.damaged")[-1].strip() == "damaged, set aside"
    series.set_aside("another-ckpt_path")
    found = call(capsys, "list", tmp_path, "--json")
    kinds = {entry["kind"]: entry["state"] for entry in json.loads(found.out)["checkpoints"]}
    assert kinds == {"superseded": "verified", "set aside": "damaged"}


def test_a_file_without_checksums_is_not_called_damaged(tmp_path: Path, capsys: Capture) -> None:
    """Files that were written without checksums, by option or in the old format, are listed as such."""
    torch.save(foreign(), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(foreign(), tmp_path / "without.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = call(capsys, "list", tmp_path)
    assert [row(found.lines, name)[-1].strip() for name in ("old.ckpt", "without.ckpt")] == ["no checksums"] * 2
    fast = call(capsys, "list", tmp_path, "--no-verify")
    assert [row(fast.lines, name)[-1].strip() for name in ("old.ckpt", "without.ckpt")] == ["not verified"] * 2


def test_without_verifying_the_tensors_are_not_read(tmp_path: Path, capsys: Capture) -> None:
    """With --no-verify a changed tensor is neither noticed nor called verified, but a file cut short is noticed."""
    flipped, cut = save_series(tmp_path, 2)
    flip(flipped)
    os.truncate(cut, os.path.getsize(cut) // 2)
    found = call(capsys, "list", tmp_path, "--no-verify", "--json")
    assert [entry["state"] for entry in json.loads(found.out)["checkpoints"]] == ["not verified", "damaged"]


def test_a_directory_with_a_manifest_is_one_checkpoint(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committed directory is one line, whatever files are in it, and is verified by its manifest."""
    save(tmp_path / "sharded" / "a.ckpt")
    save(tmp_path / "sharded" / "b.ckpt")
    save(tmp_path / "sharded" / "inner" / "c.ckpt")
    write_manifest(tmp_path / "sharded")
    found = call(capsys, "list", tmp_path, "--json")
    [entry] = json.loads(found.out)["checkpoints"]
    assert (entry["path"], entry["kind"], entry["state"]) == (str(tmp_path / "sharded"), "directory", "verified")
    monkeypatch.chdir(tmp_path / "sharded")
    [itself] = json.loads(call(capsys, "list", ".", "--json").out)["checkpoints"]
    assert itself == entry
    (tmp_path / "sharded" / "b.ckpt").unlink()
    [entry] = json.loads(call(capsys, "list", tmp_path, "--json").out)["checkpoints"]
    assert entry["state"] == "damaged"


def test_json_has_every_field(tmp_path: Path, capsys: Capture) -> None:
    """The JSON holds what the table shows, numbers as numbers and the time in UTC."""
    [path] = save_series(tmp_path, 1)
    os.utime(path, (0, 86400))
    [entry] = json.loads(call(capsys, "list", tmp_path, "--json").out)["checkpoints"]
    assert entry == {
        "path": path,
        "kind": "autosave",
        "step": 1,
        "epoch": 0,
        "batch": 1,
        "saved_at": "1970-01-02T00:00:00+00:00",
        "num_bytes": os.path.getsize(path),
        "world_size": 1,
        "is_finished": False,
        "state": "verified",
        "reason": "",
    }


def test_a_finished_fit_is_listed_as_finished(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The autosave of a finished fit, and a run whose newest autosave it is, say so instead of a place in an epoch."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registry"))
    run = tmp_path / "run"
    command = Command(script="train.py", words=("python", "train.py"), directory=str(tmp_path))
    Registry(tmp_path / "registry").add(RegisteredRun(run_id="run", directory=str(run), command=command, began=0.0))
    series = AutosaveSeries(run / "fit-1", keep_last=2)
    for step, where in ((3, "boundary"), (6, "finished")):
        position = {"where": where, "epoch": 1, "batch": step, "global_step": step, "hook": ""}
        series.save(checkpoint(step=step, position=position), epoch=1, batch=step, global_step=step)
        lines = call(capsys, "list").lines
        [saved] = [line for line in lines if line.startswith("  saved")]
        assert saved.endswith({3: ", epoch 1, batch 3", 6: ", fit-1 is finished"}[step])
        [entry] = json.loads(call(capsys, "list", "--json").out)["runs"]
        assert entry["is_finished"] is (step == 6)
    lines = call(capsys, "list", run).lines
    names = [Path(path).name for path in series.paths()]
    assert [row(lines, name)[-1].strip() for name in names] == ["verified", "finished, verified"]


def test_nothing_found_is_said_and_has_its_own_status(tmp_path: Path, capsys: Capture) -> None:
    """A directory without checkpoints gives status 1 and says so; other files and hidden folders don't count."""
    (tmp_path / "notes.txt").write_text("")
    save(tmp_path / ".hidden" / "a.ckpt")
    found = call(capsys, "list", tmp_path)
    assert (found.status, found.out) == (1, "")
    assert f"No checkpoints were found below {tmp_path}" in found.err


def test_what_does_not_exist_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    """A missing directory gives status 2 and a message that names it."""
    found = call(capsys, "list", tmp_path / "missing")
    assert (found.status, found.out) == (2, "")
    assert f'{tmp_path}/missing: No such file or directory, and no run has this name; "list" shows' in found.err


def test_a_dangling_link_is_reported_and_the_rest_listed(tmp_path: Path, capsys: Capture) -> None:
    """A link to nothing is a problem with status 2, but the table still shows the other files."""
    save(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "gone.ckpt")
    found = call(capsys, "list", tmp_path)
    assert found.status == 2
    assert "last.ckpt" in found.err
    assert row(found.lines, "a.ckpt")[-1].strip() == "verified"


@pytest.mark.parametrize("arguments", [["list"], ["list", "--no-verify"], ["verify"]], ids=" ".join)
def test_a_file_that_is_deleted_meanwhile_is_no_error(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """An autosave that a running training deletes between finding and reading is left out."""
    first, second = save_series(tmp_path, 2)
    find = finding.find_checkpoints

    def find_and_delete(directory: str) -> finding.Found:
        what = find(directory)
        Path(first).unlink()
        return what

    monkeypatch.setattr(finding, "find_checkpoints", find_and_delete)
    result = call(capsys, *arguments, tmp_path)
    assert (result.status, result.err) == (0, "")
    assert Path(second).name in result.out
    assert Path(first).name not in result.out


def test_names_can_not_speak_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Control characters in a name, and bytes that are not text, are shown as escapes."""
    save(tmp_path / "a\x1b[31m\n.ckpt")
    save(Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.ckpt")))
    found = call(capsys, "list", tmp_path)
    assert found.status == 0
    assert "a\\x1b[31m\\n.ckpt" in found.out
    assert "b\\udcff.ckpt" in found.out
    assert "\x1b" not in found.out


def test_strange_values_in_our_part_count_as_unknown(tmp_path: Path, capsys: Capture) -> None:
    """A part with other values in place of numbers is listed with the values known from elsewhere."""
    save(tmp_path / "a.ckpt", {**checkpoint(), "lightning_faulttolerant": {"position": [], "world_size": "many"}})
    cells = [cell.strip() for cell in row(call(capsys, "list", tmp_path).lines, "a.ckpt")]
    assert (cells[1:4], cells[-2]) == (["3", "0", "3"], "-")


def test_on_a_narrow_terminal_long_names_are_shortened(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than it; into a pipe, names are complete, as in all other tests here."""
    save_series(tmp_path, 1)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr("lightning_faulttolerant.cli.text.sys.stdout.isatty", lambda: True)
    lines = call(capsys, "list", tmp_path).lines
    assert any("..." in line and line.strip().startswith("autosave-") for line in lines)
    assert max(map(len, lines[1:])) <= 90


@pytest.mark.parametrize("command", ["list", "verify"])
def test_what_is_deleted_while_the_directory_is_looked_through_is_no_problem(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A file, a directory with a manifest, and a folder that vanish during the search are left out, with status 0."""
    save_series(tmp_path / "run/fit-1", 2)
    (tmp_path / "sharded").mkdir()
    walk = os.walk

    def walked(top: str, **options: Any) -> Any:
        for folder, folders, files in walk(top, **options):
            if folder == str(tmp_path):
                folders.append("gone")
                files.append("gone.ckpt")
            if folder == str(tmp_path / "sharded"):
                files.append(MANIFEST_NAME)
            yield folder, folders, files

    monkeypatch.setattr(os, "walk", walked)
    found = call(capsys, command, tmp_path)
    assert (found.status, found.err) == (0, "")
    assert "autosave-00000002" in found.out
    assert "gone" not in found.out
