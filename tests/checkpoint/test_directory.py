"""AtomicDirectory in one process: publishing, keeping, deleting, and recovering."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from lightning_faulttolerant import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, save_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, NoValidCheckpointError
from lightning_faulttolerant.processes import this_machine
from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with


def save(saver: AtomicDirectory, content: object, *, force_save: bool = False) -> str:
    """Save a checkpoint of one file."""
    directory = saver.prepare_checkpoint_directory(force_save=force_save)
    Path(directory, "content.txt").write_text(str(content))
    saver.symlink_latest(directory)
    return directory


def content_of(directory: str | Path | None) -> str:
    """Read the content that `save` has saved."""
    assert directory is not None
    return Path(directory, "content.txt").read_text()


def names_in(directory: Path) -> list[str]:
    """List a directory without the link and the file beside the link."""
    return sorted(name for name in os.listdir(directory) if ".latest_checkpoint" not in name)


def original_save(output: Path, number: int, *, name: str = "AtomicDirectory", linked: bool = True) -> Path:
    """Write a directory as cycling_utils does."""
    path = output / f"{name}_checkpoint_{number}"
    path.mkdir(parents=True)
    (path / "content.txt").write_text(f"original {number}")
    if linked:
        link = output / f"{name}.latest_checkpoint"
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return path


def recipe(output_directory: str, saver: AtomicDirectory) -> str | None:
    """Find the latest checkpoint as the documentation of cycling_utils says, word for word."""
    latest_sym = os.path.join(output_directory, saver.symlink_name)
    if os.path.exists(latest_sym):
        latest_path = os.readlink(latest_sym)
        return content_of(latest_path)
    return None


@pytest.mark.parametrize("is_relative", [False, True])
def test_documented_recipe_works(tmp_path, monkeypatch, is_relative):
    """The documented recipe must find each checkpoint, with an absolute or a relative output directory."""
    monkeypatch.chdir(tmp_path)
    output_directory = "out/put" if is_relative else str(tmp_path / "out/put")
    for epoch in range(3):
        saver = AtomicDirectory(output_directory)
        assert recipe(output_directory, saver) == (str(epoch - 1) if epoch else None)
        checkpoint_directory = saver.prepare_checkpoint_directory()
        assert os.path.basename(checkpoint_directory) == f"AtomicDirectory_checkpoint_{epoch}"
        Path(checkpoint_directory, "content.txt").write_text(str(epoch))
        saver.atomic_symlink(checkpoint_directory)
        assert recipe(output_directory, saver) == str(epoch)
        assert content_of(saver.latest()) == str(epoch)
    assert saver.is_master
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save(saver, 3)
    assert recipe(str(tmp_path / "out/put"), saver) == "3"


def test_names_are_those_of_the_original(tmp_path):
    """Names of directories and of the link must be the same as in cycling_utils."""
    saver = AtomicDirectory(tmp_path, name="model")
    assert (saver.name, saver.symlink_name) == ("model", "model.latest_checkpoint")
    first, forced = save(saver, 0), save(saver, 1, force_save=True)
    assert names_in(tmp_path) == ["model_checkpoint_0", "model_checkpoint_1_force"]
    assert saver.is_checkpoint_directory(first) == "0"
    assert saver.is_checkpoint_directory(forced) == "1_force"
    (tmp_path / "model_rank_0_checkpoint_7").mkdir()
    for other in ("model_rank_0_checkpoint_7", "model_checkpoint_9", "model.latest_checkpoint"):
        assert saver.is_checkpoint_directory(tmp_path / other) is None
    assert saver.history() == [first, forced]
    assert (tmp_path / "model.latest_checkpoint.txt").read_text() == "model_checkpoint_1_force\n"


def test_directory_is_verified_and_tells_its_metadata(tmp_path):
    """A committed checkpoint must verify as a whole and carry the given metadata."""
    saver = AtomicDirectory(tmp_path)
    directory = saver.prepare_checkpoint_directory()
    Path(directory, "content.txt").write_text("x")
    with pytest.raises(DamagedCheckpointError, match="never committed"):
        verify_path(directory)
    assert saver.latest() is None
    assert saver.history() == []
    saver.symlink_latest(directory, metadata={"step": 7})
    assert verify_path(directory).has_checksums
    assert verify_path(saver.latest()).num_files == 1
    assert read_manifest(directory).metadata == {"step": 7}


@pytest.mark.parametrize(("keep_last", "expected"), [(-1, range(6)), (0, range(6)), (1, [1, 5]), (3, [1, 3, 4, 5])])
def test_keep_last_counts_complete_ones_and_spares_the_forced(tmp_path, keep_last, expected):
    """The last k and the forced checkpoints must be kept, and all checkpoints if nothing is to be deleted."""
    saver = AtomicDirectory(tmp_path, keep_last=keep_last)
    for number in range(6):
        save(saver, number, force_save=number == 1)
    assert [int(content_of(path)) for path in saver.history()] == list(expected)


def test_keep_last_does_not_count_what_has_lost_a_file(tmp_path):
    """A checkpoint that has lost a file must not take the place of a whole one."""
    saver = AtomicDirectory(tmp_path, keep_last=2)
    save(saver, 0)
    (Path(save(saver, 1)) / "content.txt").unlink()
    save(saver, 2)
    assert "AtomicDirectory_checkpoint_0" in names_in(tmp_path)
    save(saver, 3)
    assert "AtomicDirectory_checkpoint_0" not in names_in(tmp_path)


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path, caplog, damage):
    """A new saver must fall back to the newest that verifies, report it, delete nothing, and repair the link."""
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    path = Path(save(saver, 1))
    if damage == "changed":
        (path / "content.txt").write_text("2")
    elif damage == "missing":
        (path / "content.txt").unlink()
    else:
        (path / MANIFEST_NAME).write_text("{}")
    restarted = AtomicDirectory(tmp_path)
    assert recipe(str(tmp_path), restarted) == "0"
    assert content_of(restarted.latest()) == "0"
    assert names_in(tmp_path) == ["AtomicDirectory_checkpoint_0", "AtomicDirectory_checkpoint_1.damaged"]
    assert "is damaged" in caplog.text
    assert Path(save(restarted, 2)).name == "AtomicDirectory_checkpoint_2"


def test_checkpoint_that_has_lost_its_manifest_is_not_preferred_to_one_that_verifies(tmp_path, caplog):
    """A copy with the link and only part of the newest directory must not be resumed from unverified."""
    saver = AtomicDirectory(tmp_path)
    for number in range(3):
        newest = save(saver, number)
    Path(newest, MANIFEST_NAME).unlink()
    restarted = AtomicDirectory(tmp_path)
    assert recipe(str(tmp_path), restarted) == content_of(restarted.latest()) == "1"
    assert "checkpoint_2 has no manifest, so it can't be verified. Used: " in caplog.text
    assert Path(save(restarted, 3)).name == "AtomicDirectory_checkpoint_3"
    assert Path(f"{newest}.uncommitted").is_dir()


def test_contents_are_not_read_where_that_is_switched_off(tmp_path):
    """verify=False must still detect a missing or cut file, and not read the rest."""
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    path = Path(save(saver, 1), "content.txt")
    path.write_text("2")
    assert content_of(AtomicDirectory(tmp_path, verify=False).latest()) == "2"
    path.write_text("")
    assert content_of(AtomicDirectory(tmp_path, verify=False).latest()) == "0"


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path):
    """Checkpoints that exist and can't be used must stop each start, with their names."""
    Path(save(AtomicDirectory(tmp_path), 0), "content.txt").write_text("changed")
    for _ in range(2):
        with pytest.raises(
            NoValidCheckpointError, match=r"none of them verifies: AtomicDirectory_checkpoint_0\.damaged"
        ):
            AtomicDirectory(tmp_path)


def test_lost_link_loses_nothing(tmp_path):
    """Copies lose links: a new saver must find the newest checkpoint, restore the link, and keep all the others."""
    saver = AtomicDirectory(tmp_path)
    for number in range(3):
        save(saver, number, force_save=number == 1)
    os.unlink(tmp_path / saver.symlink_name)
    save(saver, 3)
    os.unlink(tmp_path / saver.symlink_name)
    os.unlink(tmp_path / f"{saver.symlink_name}.txt")
    restarted = AtomicDirectory(tmp_path)
    assert recipe(str(tmp_path), restarted) == "3"
    assert [content_of(path) for path in restarted.history()] == ["0", "1", "2", "3"]


def test_link_that_leads_nowhere_or_elsewhere_is_mended(tmp_path):
    """Checkpoints that were moved or copied must be found in the new place, not in the old one."""
    saver = AtomicDirectory(tmp_path / "old")
    save(saver, "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/AtomicDirectory_checkpoint_0/README").write_text("a copy")
    copied = AtomicDirectory(tmp_path / "copy")
    assert os.readlink(tmp_path / "copy" / copied.symlink_name).startswith(str(tmp_path / "copy"))
    os.rename(tmp_path / "old", tmp_path / "new")
    assert recipe(str(tmp_path / "new"), AtomicDirectory(tmp_path / "new")) == "old"


def test_link_without_directories_is_a_fresh_start(tmp_path, caplog):
    """A user who has deleted all checkpoints must be able to start again, with a message about the link."""
    saver = AtomicDirectory(tmp_path)
    shutil.rmtree(save(saver, 0))
    restarted = AtomicDirectory(tmp_path)
    assert "no checkpoint exists" in caplog.text
    assert recipe(str(tmp_path), restarted) is None
    assert Path(save(restarted, 1)).name == "AtomicDirectory_checkpoint_1", "a number that was used is used again"
    assert recipe(str(tmp_path), restarted) == "1"


def test_deletion_that_fails_leaves_no_half_checkpoint(tmp_path):
    """A directory that can be deleted only in part must not look like a checkpoint, of ours or of cycling_utils."""
    saver = AtomicDirectory(tmp_path, keep_last=1)
    directory = saver.prepare_checkpoint_directory()
    for name in ("content.txt", "shards/0.txt"):
        Path(directory, name).parent.mkdir(exist_ok=True)
        Path(directory, name).write_text("0")
    saver.symlink_latest(directory)
    second = saver.prepare_checkpoint_directory()
    Path(second, "content.txt").write_text("1")
    marked = FaultyFiles(directory, fail_with(errno.EIO), kind="list", lasting=True, at=3)
    with marked, pytest.raises(OSError, match="Input/output error"):
        saver.symlink_latest(second)
    assert saver.history() == [second]
    assert content_of(saver.latest()) == "1"
    save(saver, 2)
    assert names_in(tmp_path) == ["AtomicDirectory_checkpoint_2"]


def test_empty_directory_is_not_published(tmp_path):
    """An empty checkpoint must be refused, the previous one must stay the latest, and the empty one can be filled."""
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    directory = saver.prepare_checkpoint_directory()
    os.mkdir(os.path.join(directory, "shards"))
    with pytest.raises(ValueError, match="contains no file"):
        saver.symlink_latest(directory)
    assert recipe(str(tmp_path), saver) == "0"
    Path(directory, "shards", "content.txt").write_text("1")
    saver.symlink_latest(directory)
    assert saver.latest() == directory


def test_bad_arguments_are_refused_with_what_is_possible(tmp_path):
    """Each wrong argument must raise ValueError or TypeError when the saver is created, and create nothing."""
    output = tmp_path / "out"
    with pytest.raises(ValueError, match=r"strategy is 'sync'.*sync_any, sync_all, async, mono"):
        AtomicDirectory(output, strategy="sync")
    with pytest.raises(ValueError, match="must be a local directory"):
        AtomicDirectory("s3://bucket/run")
    for name in ("", "a/b", "x" * 81):
        with pytest.raises(ValueError, match="begins the names of directories"):
            AtomicDirectory(output, name=name)
    with pytest.raises(TypeError, match="keep_last"):
        AtomicDirectory(output, keep_last=1.5)
    with pytest.raises(ValueError, match="process group"):
        AtomicDirectory(output, group=object())
    assert not output.exists()


def test_several_processes_without_a_group_are_refused(tmp_path, monkeypatch):
    """Under torchrun without a group, ranks would overwrite each other's files; async and mono need no group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but no process group exists"):
        AtomicDirectory(tmp_path)
    assert AtomicDirectory(tmp_path, strategy="async").name == "AtomicDirectory_rank_1"
    assert AtomicDirectory(tmp_path, strategy="mono").name == "AtomicDirectory"


def test_abort_deletes_the_directory_and_nothing_else(tmp_path):
    """An aborted checkpoint must vanish, the next one must take its number, and a complete one must be refused."""
    saver = AtomicDirectory(tmp_path)
    complete = save(saver, 0)
    directory = saver.prepare_checkpoint_directory()
    Path(directory, "part.bin").write_bytes(b"x")
    saver.abort(directory)
    assert names_in(tmp_path) == ["AtomicDirectory_checkpoint_0"]
    for path in (complete, directory, tmp_path, tmp_path / "AtomicDirectory_checkpoint_7"):
        for end in (saver.abort, saver.symlink_latest):
            with pytest.raises(ValueError, match="Pass the path that prepare_checkpoint_directory returned"):
                end(path)
    assert Path(save(saver, 1)).name == "AtomicDirectory_checkpoint_1"


def test_directory_that_was_never_ended_is_replaced(tmp_path):
    """After an error between prepare and commit, the next prepare must start afresh."""
    saver = AtomicDirectory(tmp_path)
    Path(saver.prepare_checkpoint_directory(), "content.txt").write_text("half")
    directory = saver.prepare_checkpoint_directory()
    assert os.listdir(directory) == [MANIFEST_NAME]
    assert names_in(tmp_path) == ["AtomicDirectory_checkpoint_0"]


def test_user_who_empties_the_directory_can_still_commit(tmp_path):
    """Libraries that create their checkpoint directory again must not lose the checkpoint."""
    saver = AtomicDirectory(tmp_path)
    directory = saver.prepare_checkpoint_directory()
    shutil.rmtree(directory)
    os.mkdir(directory)
    Path(directory, "content.txt").write_text("0")
    saver.symlink_latest(directory)
    assert content_of(AtomicDirectory(tmp_path).latest()) == "0"


def test_output_directory_may_be_a_link(tmp_path):
    """Another path to the prepared directory must be accepted, as the user may have resolved it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    saver = AtomicDirectory(tmp_path / "out")
    directory = saver.prepare_checkpoint_directory()
    Path(directory, "content.txt").write_text("0")
    saver.symlink_latest(os.path.realpath(directory) + "/")
    assert saver.latest() == directory


def test_tilde_in_the_output_directory_is_the_home_directory(tmp_path, monkeypatch):
    """A checkpoint must go where `FaultTolerance` and Lightning would put it, not to a directory named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert AtomicDirectory("~/out").output_directory == str(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def _begin(path: Path, *, hostname: str, process_id: int, machine: str | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "content.txt").write_text("half")
    machine = this_machine() if machine is None else machine
    save_manifest(path, Manifest(owner={"hostname": hostname, "machine": machine, "process_id": process_id}))
    return path


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    """A killed process's directories must go at the next prepare; directories that another process writes must stay."""
    here, process_id = socket.gethostname(), os.fork()
    if not process_id:
        os._exit(0)
    os.waitpid(process_id, 0)
    dead = _begin(tmp_path / "AtomicDirectory_checkpoint_3", hostname=here, process_id=process_id)
    own_id_of_old = _begin(tmp_path / "AtomicDirectory_checkpoint_4", hostname=here, process_id=os.getpid())
    living = _begin(tmp_path / "AtomicDirectory_checkpoint_5", hostname=here, process_id=os.getppid())
    elsewhere = _begin(tmp_path / "AtomicDirectory_checkpoint_6", hostname="node7", process_id=1)
    container = _begin(tmp_path / "AtomicDirectory_checkpoint_7", hostname=here, process_id=process_id, machine="other")
    long_still = _begin(tmp_path / "AtomicDirectory_checkpoint_2", hostname="node7", process_id=1)
    past = time.time() - 7200
    for path in (*long_still.iterdir(), long_still):
        os.utime(path, (past, past))
    saver = AtomicDirectory(tmp_path)
    assert saver.latest() is None
    directory = saver.prepare_checkpoint_directory()
    assert not any(path.exists() for path in (dead, own_id_of_old, long_still))
    assert living.exists()
    assert elsewhere.exists()
    assert container.exists()
    assert Path(directory).name == "AtomicDirectory_checkpoint_8"


def test_two_savers_do_not_touch_each_other(tmp_path):
    """Two savers with different names in one directory must not count or delete each other's checkpoints."""
    first, second = AtomicDirectory(tmp_path, keep_last=1), AtomicDirectory(tmp_path, name="Other", keep_last=1)
    begun = first.prepare_checkpoint_directory()
    for number in range(3):
        save(second, number)
    assert names_in(tmp_path) == ["AtomicDirectory_checkpoint_0", "Other_checkpoint_2"]
    again = AtomicDirectory(tmp_path)  # in the same process: the first one is still at work
    save(again, "again")
    Path(begun, "content.txt").write_text("begun")
    first.symlink_latest(begun)


def test_directories_of_the_original_are_read_by_its_rule(tmp_path, caplog):
    """Without manifests, directories up to the link are complete; they are used with a warning, and never deleted."""
    for number in range(2):
        original_save(tmp_path, number)
    original_save(tmp_path, 2, linked=False)
    saver = AtomicDirectory(tmp_path)
    assert recipe(str(tmp_path), saver) == "original 1"
    assert "unverified" in caplog.text
    assert [content_of(path) for path in saver.history()] == ["original 0", "original 1"]
    save(saver, "ours")
    assert recipe(str(tmp_path), saver) == "ours"
    assert names_in(tmp_path) == [
        "AtomicDirectory_checkpoint_0",
        "AtomicDirectory_checkpoint_1",
        "AtomicDirectory_checkpoint_2.uncommitted",
        "AtomicDirectory_checkpoint_3",
    ]
    Path(saver.latest(), "content.txt").write_text("damaged")
    assert content_of(AtomicDirectory(tmp_path).latest()) == "original 1"


def test_directories_of_the_original_go_by_the_documented_rule_only(tmp_path):
    """They must not count among the last k, as they can't be verified, and must go when k newer ones are complete."""
    original_save(tmp_path, 0)
    saver = AtomicDirectory(tmp_path, keep_last=2)
    save(saver, 1)
    assert len(saver.history()) == 2
    save(saver, 2)
    assert [content_of(path) for path in saver.history()] == ["1", "2"]


def test_original_with_a_relative_link_is_mended(tmp_path, monkeypatch):
    """The original's link for a relative output directory leads nowhere; the directory that it names must be found."""
    monkeypatch.chdir(tmp_path)
    path = original_save(tmp_path / "out", 0)
    (tmp_path / "out/AtomicDirectory.latest_checkpoint").unlink()
    (tmp_path / "out/AtomicDirectory.latest_checkpoint").symlink_to(path.relative_to(tmp_path))
    assert recipe("out", AtomicDirectory("out")) == "original 0"


def test_original_without_its_link_is_an_error_and_loses_nothing(tmp_path):
    """Without the link it is unknown which of its directories is complete: the start must stop, and all must stay."""
    original_save(tmp_path, 0)
    original_save(tmp_path, 1)
    os.unlink(tmp_path / "AtomicDirectory.latest_checkpoint")
    with pytest.raises(NoValidCheckpointError, match="points to the complete one, is gone"):
        AtomicDirectory(tmp_path)
    assert len(names_in(tmp_path)) == 2


def test_link_that_has_become_a_directory_is_an_error_with_the_remedy(tmp_path):
    """A copy that has replaced the link must be detected before hours of training."""
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    os.unlink(tmp_path / saver.symlink_name)
    shutil.copytree(tmp_path / "AtomicDirectory_checkpoint_0", tmp_path / saver.symlink_name)
    with pytest.raises(CheckpointError, match="is a directory, not a link"):
        AtomicDirectory(tmp_path)


def test_file_system_without_links_has_the_file_beside(tmp_path, monkeypatch, caplog):
    """Without links, saving must work, and a new saver and the file must show the latest checkpoint."""

    def refuse(*args, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    save(saver, 1)
    assert "This file system has no links" in caplog.text
    assert (tmp_path / f"{saver.symlink_name}.txt").read_text() == "AtomicDirectory_checkpoint_1\n"
    assert content_of(AtomicDirectory(tmp_path).latest()) == "1"


def test_reader_needs_no_right_to_write(tmp_path, monkeypatch):
    """A process that only looks for the latest checkpoint must change nothing if nothing is wrong."""
    save(AtomicDirectory(tmp_path), 0)
    original_save(tmp_path, 0, name="Original")

    def refuse(*args, **options):
        raise AssertionError("changes something")

    for name in ("replace", "rename", "unlink", "mkdir", "rmdir", "symlink"):
        monkeypatch.setattr(os, name, refuse)
    assert content_of(AtomicDirectory(tmp_path).latest()) == "0"
    assert content_of(AtomicDirectory(tmp_path, name="Original").latest()) == "original 0"


def test_output_directory_is_made_with_the_saver(tmp_path):
    """Scripts that put files there once the saver exists must find it; a look must not fail if it is gone."""
    saver = AtomicDirectory(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()
    shutil.rmtree(tmp_path / "a")
    assert saver.history() == []
    save(saver, 0)
    assert content_of(saver.latest()) == "0"
