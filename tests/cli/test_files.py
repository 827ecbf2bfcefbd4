"""``list``, ``verify``, ``prune``, and ``export``, on each kind of directory that runs, users, and accidents leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME, bases_in
from lightning_faulttolerant.checkpoint.directory import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.storage.local import LocalStore
from lightning_faulttolerant.storage.lock import RunLock
from tests.checkpoint.writers import write_manifest
from tests.cli.checkpoints import call, checkpoint, foreign, save, save_series, told
from tests.damage import change_a_weight

Capture = pytest.CaptureFixture[str]
SHARD = "__0_0.distcp"


def kept(directory: Path) -> AutosaveSeries:
    """Save three autosaves, the first and the last kept for good, of which the first was moved, and an incident."""
    series = AutosaveSeries(directory / "run" / "fit-1", keep_last=2)
    for step in (1, 2, 3):
        series.save(checkpoint(step=step, batch=step), epoch=0, batch=step, global_step=step, keep=step != 2)
    save(directory / "run" / "fit-1" / "incidents" / "incident-00000002.ckpt")
    return series


def several_fits(directory: Path) -> None:
    """Save several autosaves of three fits, one of which has finished, and checkpoints and files of others."""
    for name, number in (("run/fit-1", 3), ("run/fit-10", 1), ("run/fit-9", 2), ("mine", 2)):
        save_series(directory / name, number)
    position = {"where": "finished", "epoch": 1, "batch": 6, "global_step": 6, "hook": ""}
    series = AutosaveSeries(directory / "run" / "fit-9")
    series.save(checkpoint(step=6, position=position), epoch=1, batch=6, global_step=6)
    save(directory / "checkpoints" / "epoch=1.ckpt", foreign(step=7, epoch=1, batch=2))
    folder = directory / "run" / "fit-1"
    for name in ("last.ckpt", "autosave-1.ckpt", ".hidden/a.ckpt"):
        save(folder / name)
    (folder / "notes.txt").write_text("")
    (folder / "autosave-00000000-epoch=0-batch=0.ckpt").symlink_to(AutosaveSeries(folder).paths()[2])


def superseded(directory: Path) -> None:
    """Supersede two autosaves by two new ones, and before it others of which one is kept."""
    kept(directory).set_aside("discarded")
    save_series(directory / "run" / "fit-1", 2)
    AutosaveSeries(directory / "run" / "fit-1").set_aside("another-ckpt_path")
    save_series(directory / "run" / "fit-1", 2)


def damaged(directory: Path) -> None:
    """Flip a byte of the newest autosave, cut the one before it, and let the series set aside a third."""
    paths = save_series(directory / "run" / "fit-1", 5)
    change_a_weight(paths[4])
    AutosaveSeries(directory / "run" / "fit-1").load_newest()
    change_a_weight(paths[3])
    os.truncate(paths[2], os.path.getsize(paths[2]) // 2)


def without_checksums(directory: Path) -> None:
    """Write files without checksums, by option and in the old format, and one that is no checkpoint."""
    torch.save(foreign(), directory / "old.ckpt", _use_new_zipfile_serialization=False)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(foreign(), directory / "without.ckpt")
    torch.serialization.set_crc32_options(before)
    (directory / "text.ckpt").write_text("hello")


def with_manifests(directory: Path) -> None:
    """Commit directories of files: a sound one, one with another file, a damaged one; begin one, set one aside."""
    for name in ("sound", "more", "damaged"):
        save(directory / name / "inner" / "a.ckpt")
        (directory / name / "weights.bin").write_bytes(b"123")
        write_manifest(directory / name)
    (directory / "more" / "notes").write_text("hello")
    (directory / "damaged" / "weights.bin").write_bytes(b"124")
    saver = AtomicDirectory(directory / "atomic", is_master=True)
    for content in (b"123", b"456"):
        folder = Path(saver.prepare_checkpoint_directory())
        (folder / "weights.bin").write_bytes(content)
        saver.symlink_latest(folder)
    (folder / "weights.bin").write_bytes(b"457")
    AtomicDirectory(directory / "atomic", is_master=True).latest()
    foreign_folder = directory / "checkpoints" / "epoch=1.ckpt"
    foreign_folder.mkdir(parents=True)
    torch.save({"epoch": 1, "global_step": 7}, foreign_folder / METADATA_NAME)
    (foreign_folder / ".metadata").write_bytes(b"")


def strange(directory: Path) -> None:
    """Leave names that could speak to a terminal, a link to nothing, and values that are no numbers."""
    save(directory / "a\x1b[31m\n.ckpt")
    save(Path(os.fsdecode(os.fsencode(directory) + b"/b\xff.ckpt")))
    save(directory / "c.ckpt", {**checkpoint(), "lightning_faulttolerant": {"position": [], "world_size": "many"}})
    (directory / "last.ckpt").symlink_to(directory / "gone.ckpt")


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "several fits": several_fits,
    "kept": kept,
    "superseded": superseded,
    "damaged": damaged,
    "without checksums": without_checksums,
    "with manifests": with_manifests,
    "nothing": lambda directory: save(directory / ".hidden" / "a.ckpt"),
    "strange": strange,
}
STATUSES = {  # of list, verify, and prune
    "damaged": (0, 1, 0),
    "without checksums": (0, 1, 0),
    "with manifests": (0, 1, 0),
    "nothing": (1, 1, 0),
    "strange": (2, 2, 2),
}


def names(directory: Path) -> list[str]:
    """Return all files below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_commands_say_of_a_directory(
    layout: str, tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion
) -> None:
    """Each command gives its status and a text; with all its options, ``prune`` deletes what the dry run names."""
    LAYOUTS[layout](tmp_path)
    commands = [["list"], ["list", "--no-verify"], ["verify"], ["verify", "--quiet", "--strict"]]
    commands += [["prune", "--keep-last=1"], ["prune", "--keep-last=1", "--damaged", "--superseded"]]
    statuses, texts, before = [], [], names(tmp_path)
    for command in commands:
        dry = call(capsys, *command, "--dry-run", tmp_path) if command[0] == "prune" else None
        assert names(tmp_path) == before
        found = call(capsys, *command, tmp_path)
        statuses.append(found.status)
        assert all(character.isprintable() for line in found.lines for character in line)
        texts.append(f"$ {' '.join(command)}\n{told(found, DIR=tmp_path)}\n")
        if dry is not None:
            assert dry.out.replace("would delete", "deleted").replace("would be deleted", "deleted") == found.out
            texts += [f"gone: {name}" for name in before if name not in names(tmp_path)]
            before = names(tmp_path)
    assert (statuses[0], statuses[2], statuses[4]) == STATUSES.get(layout, (0, 0, 0))
    assert "\n".join(texts) == snapshot


def test_json_has_every_field(tmp_path: Path, capsys: Capture) -> None:
    """The JSON holds what the table shows, numbers as numbers and the time in UTC."""
    [path] = save_series(tmp_path / "run" / "fit-1", 1)
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


def test_what_is_named_is_judged_though_it_would_be_passed_over(
    tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion
) -> None:
    """Files set aside, one that is missing, texts, and begun directories are judged; superseded autosaves pruned."""
    damaged(tmp_path)
    begun = Path(AtomicDirectory(tmp_path / "atomic", is_master=True).prepare_checkpoint_directory())
    (begun / "weights.bin").write_bytes(b"123")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    [aside] = tmp_path.rglob("*.damaged")
    places = [aside, tmp_path / "gone.ckpt", tmp_path / "text", tmp_path / "empty", begun]
    found = [call(capsys, "verify", place) for place in places]
    assert [each.status for each in found] == [1] * 5
    assert "\n".join(told(each, DIR=tmp_path, BEGUN=begun.name) for each in found) == snapshot
    superseded(tmp_path / "more")
    folder = next((tmp_path / "more" / "run" / "fit-1").glob("superseded-*another*"))
    for place in (folder, next(folder.iterdir())):
        dry = call(capsys, "prune", place, "--keep-last", 1, "--superseded", "--dry-run")
        assert dry.lines[0] == f"{folder.parent}: 0 kept, 2 would delete"


def test_on_a_narrow_terminal_long_names_are_shortened(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than it; into a pipe, names are complete, as in all other tests here."""
    save_series(tmp_path, 1)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = call(capsys, "list", tmp_path).lines
    assert any("..." in line and line.strip().startswith("autosave-") for line in lines)
    assert max(map(len, lines[1:])) <= 90


def test_an_unreadable_file_gives_status_2_unless_one_is_damaged(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable file gives status 2, but 1 if there is also a damaged file, since that is certain."""
    sound, refused, flipped = save_series(tmp_path, 3)
    change_a_weight(flipped)
    opened = open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == refused:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    found = call(capsys, "verify", sound, refused)
    assert found.status == 2
    assert found.lines[1] == f"{refused}: unreadable: {refused}: Permission denied"
    assert call(capsys, "verify", sound, refused, flipped).status == 1


@pytest.mark.parametrize("command", [["list"], ["list", "--no-verify"], ["verify"]], ids=" ".join)
def test_what_is_deleted_meanwhile_is_no_problem(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """What vanishes during the search, or between finding and reading, is left out, with status 0."""
    first, _ = save_series(tmp_path / "run" / "fit-1", 2)
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
        Path(first).unlink(missing_ok=True)

    monkeypatch.setattr(os, "walk", walked)
    found = call(capsys, *command, tmp_path)
    assert (found.status, found.err) == (0, "")
    assert "autosave-00000002" in found.out
    assert "gone" not in found.out
    assert "autosave-00000001" not in found.out


# What prune must not touch.


HOLD = """
import sys; from pathlib import Path; from lightning_faulttolerant.storage.lock import RunLock
with RunLock(Path(sys.argv[1])): print("held", flush=True); sys.stdin.read()
"""


def test_a_run_in_use_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    """While a process trains, its run is not pruned: status 1 with host and process. The others are.

    If the lock of a run can't be taken, the status is 2.
    """
    for name in "abc":
        save_series(tmp_path / name / "fit-1", 3)
    words = [sys.executable, "-c", HOLD, str(tmp_path / "b")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for directory in (tmp_path, tmp_path / "b", tmp_path / "b" / "fit-1"):
            found = call(capsys, "prune", directory, "--keep-last", 1)
            assert (found.status, f"in use by process {other.pid} on " in found.err) == (1, True)
        other.kill()
    assert [name[0] for name in names(tmp_path) if name.endswith(".ckpt")] == ["a", *"bbb", "c"]
    (tmp_path / "b/run.lock").unlink()
    (tmp_path / "b/run.lock").mkdir()
    found = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert (found.status, f"{tmp_path / 'b'}: pruning ended early: " in found.err) == (2, True)


def test_the_lock_is_held_while_files_are_deleted(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts while its directory is pruned is refused; what it saved before the lock was taken counts."""
    folder = tmp_path / "run" / "fit-1"
    save_series(folder, 2)
    delete, refused, acquire = LocalStore.delete, [], RunLock.acquire

    def delete_while_somebody_starts(store: LocalStore, name: str) -> None:
        with pytest.raises(RunInUseError):
            acquire(RunLock(tmp_path / "run"))
        refused.append(name)
        delete(store, name)

    def acquire_late(lock: RunLock) -> None:
        save_series(folder, 1)
        acquire(lock)

    monkeypatch.setattr(LocalStore, "delete", delete_while_somebody_starts)
    monkeypatch.setattr(RunLock, "acquire", acquire_late)
    assert call(capsys, "prune", tmp_path, "--keep-last", 1).status == 0
    assert len(refused) == 2
    assert [path.name for path in folder.iterdir()] == ["autosave-00000003-epoch=0-batch=1.ckpt"]


NO_ORDERS = [["DIR"], *(["DIR", f"--keep-last={n}"] for n in ("0", "-1", "two")), ["", "--keep-last=1"]]


@pytest.mark.parametrize("arguments", [*NO_ORDERS, ["file://", "--keep-last=1"]], ids=" ".join)
def test_what_is_no_order_to_delete(
    arguments: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of at least 1, or with `prune "$RUN"` where RUN has no value, nothing is deleted."""
    save_series(tmp_path / "run/fit-1", 3)
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "prune", *(word.replace("DIR", str(tmp_path)) for word in arguments)).status == 2
    assert len(names(tmp_path)) == 3


# Incremental autosaves, and plain files of them.


def incremental(folder: Any, *steps: int) -> tuple[list[str], list[str]]:
    """Save incremental autosaves of these steps; return their paths, and the names of their bases."""
    series = AutosaveSeries(folder, keep_last=100, incremental=True)
    for step in steps:
        content = checkpoint(step=step, batch=step)
        content["state_dict"]["frozen"] = torch.arange(3000)
        series.save(content, epoch=0, batch=step, global_step=step)
    return series.paths(), sorted(bases_in(os.listdir(folder)))


def test_what_is_exported_is_plain(tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """It loads without a base, with everything in it; a plain autosave is copied byte by byte; both may be URLs.

    An output that exists is never replaced; a missing autosave and a directory are named.
    """
    paths, _ = incremental(tmp_path / "fit-1", 1, 2)
    output = tmp_path / "out" / "plain.ckpt"
    found = [call(capsys, "export", paths[1], output)]
    assert f"{os.path.getsize(output) / 1000:.3g} kB" in found[0].out
    content = torch.load(output, weights_only=True)
    assert content["global_step"] == 2
    assert torch.equal(content["state_dict"]["frozen"], torch.arange(3000))
    assert call(capsys, "verify", output).out == f"{output}: verified\n"
    assert os.listdir(output.parent) == ["plain.ckpt"]
    [path] = save_series(tmp_path / "fit-2", 1)
    url = f"memory://export-{tmp_path.name}/plain.ckpt"
    assert call(capsys, "export", path, url).status == 0
    assert call(capsys, "export", url, tmp_path / "copy.ckpt").status == 0
    assert (tmp_path / "copy.ckpt").read_bytes() == Path(path).read_bytes()
    before = output.read_bytes()
    pairs = [(path, output), (path, path), (path, tmp_path / "fit-1"), (path, f"{tmp_path}/new/")]
    pairs += [(tmp_path / "none.ckpt", tmp_path / "no.ckpt"), (tmp_path, tmp_path / "no.ckpt")]
    found += [call(capsys, "export", *pair) for pair in pairs]
    assert [each.status for each in found] == [0, *[2] * len(pairs)]
    assert "\n".join(told(each, DIR=tmp_path) for each in found) == snapshot
    assert output.read_bytes() == before


@pytest.mark.parametrize("what", ["base", "autosave", "no base"])
def test_damage_is_not_exported(tmp_path: Path, capsys: Capture, what: str) -> None:
    """The status says so, and there is no output."""
    [path], [name] = incremental(tmp_path / "fit-1", 1)
    base = tmp_path / "fit-1" / name
    if what == "no base":
        base.unlink()
    else:
        change_a_weight(base if what == "base" else path)
    found = call(capsys, "export", path, tmp_path / "plain.ckpt")
    assert (found.status, found.out, name in found.err or what == "autosave") == (1, "", True)
    assert not (tmp_path / "plain.ckpt").exists()
    assert call(capsys, "verify", path).status == 1


def test_a_base_is_shown_and_deleted_with_its_last_autosave(tmp_path: Path, capsys: Capture) -> None:
    """And only then; a dry run tells it, and deletes nothing."""
    folder = tmp_path / "run" / "fit-1"
    [path], [base] = incremental(folder, 1)
    assert f"base             {base}, with 1 of its tensors, 24 kB" in call(capsys, "inspect", path).out
    shown = json.loads(call(capsys, "inspect", path, "--json").out)
    assert shown["base"] == {"name": base, "num_tensors": 1, "num_bytes": 24000}
    _, old = incremental(folder, 2, 3, 4)
    before = names(tmp_path)
    dry, found = (call(capsys, "prune", tmp_path, "--keep-last", 1, *more) for more in (("--dry-run",), ()))
    freed = [name.rpartition("/")[2] for name in before if name not in names(tmp_path)]
    assert set(freed) & set(old)
    assert all(f"would delete {name}" in dry.out and f"deleted {name}" in found.out for name in freed)
    [autosave] = folder.glob("autosave-*")
    assert call(capsys, "verify", autosave).status == 0
