"""AtomicDirectory in one process: publishing, keeping, deleting, and recovering.

On ranks over gloo: they share one series, and an error or a death on one is an error on all.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_faulttolerant import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, save_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, NoValidCheckpointError
from lightning_faulttolerant.processes import this_machine
from tests.faulty_files import FaultyFiles, fail_with
from tests.messages import error_of, plain
from tests.processes import dead_process_id, wait_for
from tests.ranks import TIMEOUT, on_ranks

LINK = "AtomicDirectory.latest_checkpoint"


def save(saver, content, *, force_save=False):
    """Save a checkpoint of one file."""
    directory = saver.prepare_checkpoint_directory(force_save=force_save)
    Path(directory, "content.txt").write_text(str(content))
    saver.symlink_latest(directory)
    return directory


def content_of(directory):
    """Read the content that `save` has saved."""
    return directory and Path(directory, "content.txt").read_text()


def names_in(directory):
    """List a directory without the link and the file beside the link; our own names are short."""
    names = sorted(name for name in os.listdir(directory) if ".latest_checkpoint" not in name)
    return [name.removeprefix("AtomicDirectory_checkpoint_") for name in names]


def recipe(output_directory, saver):
    """Find the latest checkpoint as the documentation of cycling_utils says, word for word."""
    latest_sym = os.path.join(output_directory, saver.symlink_name)
    if os.path.exists(latest_sym):
        latest_path = os.readlink(latest_sym)
        return content_of(latest_path)
    return None


def original_save(output, number, *, name="AtomicDirectory", linked=True):
    """Write a directory as cycling_utils does."""
    path = output / f"{name}_checkpoint_{number}"
    path.mkdir(parents=True)
    (path / "content.txt").write_text(f"original {number}")
    if linked:
        link = output / f"{name}.latest_checkpoint"
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return path


def test_documented_recipe_works(tmp_path, monkeypatch):
    """The documented recipe must find each checkpoint, also with a relative output directory; names are cycling_utils'.

    A reader changes nothing.
    """
    monkeypatch.chdir(tmp_path)
    output_directory = "out/put"
    for epoch in range(3):
        saver = AtomicDirectory(output_directory)
        assert os.path.isdir(output_directory)
        assert recipe(output_directory, saver) == (str(epoch - 1) if epoch else None)
        checkpoint_directory = saver.prepare_checkpoint_directory()
        assert os.path.basename(checkpoint_directory) == f"AtomicDirectory_checkpoint_{epoch}"
        Path(checkpoint_directory, "content.txt").write_text(str(epoch))
        saver.symlink_latest(checkpoint_directory)
        assert recipe(output_directory, saver) == content_of(saver.latest()) == str(epoch)
    assert saver.is_master
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save(saver, 3, force_save=True)
    original_save(tmp_path / "out/put", 0, name="Original")
    with FaultyFiles(tmp_path) as files:
        assert recipe(str(tmp_path / "out/put"), AtomicDirectory(tmp_path / "out/put")) == "3"
        assert content_of(AtomicDirectory(tmp_path / "out/put", name="Original").latest()) == "original 0"
    assert {step.kind for step in files.steps} <= {"list"}
    (tmp_path / "out/put/AtomicDirectory_rank_0_checkpoint_7").mkdir()
    assert [saver.is_checkpoint_directory(path) for path in saver.history()] == ["0", "1", "2", "3_force"]
    for name in ("AtomicDirectory_rank_0_checkpoint_7", "AtomicDirectory_checkpoint_9", saver.symlink_name):
        assert saver.is_checkpoint_directory(tmp_path / "out/put" / name) is None
    shutil.rmtree(tmp_path / "out")
    assert saver.history() == []
    assert content_of(save(saver, 4)) == "4"


def test_directory_is_verified_and_tells_its_metadata(tmp_path, monkeypatch):
    """A committed checkpoint must verify as a whole and carry the given metadata, whatever it was made by."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    saver = AtomicDirectory("~/out")
    assert saver.output_directory == str(tmp_path / "out")
    directory = saver.prepare_checkpoint_directory()
    Path(directory, "content.txt").write_text("x")
    with pytest.raises(DamagedCheckpointError, match="never committed"):
        verify_path(directory)
    assert (saver.latest(), saver.history()) == (None, [])
    assert saver.prepare_checkpoint_directory() == directory  # as after an error: it starts afresh
    assert os.listdir(directory) == [MANIFEST_NAME]
    shutil.rmtree(directory)  # as libraries do that create their directory again
    os.mkdir(directory)
    Path(directory, "content.txt").write_text("x")
    saver.symlink_latest(os.path.realpath(directory) + "/", metadata={"step": 7})
    assert saver.latest() == directory
    assert (verify_path(directory).has_checksums, verify_path(directory).num_files) == (True, 1)
    assert read_manifest(directory).metadata == {"step": 7}


@pytest.mark.parametrize(("keep_last", "expected"), [(-1, range(6)), (0, range(6)), (1, [1, 5]), (3, [1, 3, 4, 5])])
def test_keep_last_counts_complete_ones_and_spares_the_forced(tmp_path, keep_last, expected):
    """The last k and the forced checkpoints must be kept; one that has lost a file must not take a place."""
    saver = AtomicDirectory(tmp_path, keep_last=keep_last)
    for number in range(6):
        save(saver, number, force_save=number == 1)
    assert [int(content_of(path)) for path in saver.history()] == list(expected)
    if keep_last == 3:
        Path(saver.latest(), "content.txt").unlink()
        save(saver, 6)
        assert names_in(tmp_path) == ["1_force", "3", "4", "5", "6"]
        save(saver, 7)
        assert "3" not in names_in(tmp_path)


def _delete_all(out, newest):
    for path in out.glob("*_checkpoint_*"):
        shutil.rmtree(path)


def _lose_the_links(out, newest):
    for name in (LINK, f"{LINK}.txt"):
        (out / name).unlink()


# What happens to three checkpoints, the content of the one that is used then, a word of the warning, and the names.
RECOVERIES = {
    "changed": (lambda out, newest: (newest / "content.txt").write_text("3"), "1", "is damaged", "2.damaged"),
    "manifest lost": (
        lambda out, newest: (newest / MANIFEST_NAME).unlink(),
        "1",
        "checkpoint_2 has no manifest, so it can't be verified. Used: ",
        "2.uncommitted",
    ),
    "link and text lost": (_lose_the_links, "2", "", "2"),
    "all deleted": (_delete_all, None, "no checkpoint exists", None),
}


@pytest.mark.parametrize(("change", "expected", "said", "name"), RECOVERIES.values(), ids=RECOVERIES)
def test_new_saver_uses_the_newest_that_verifies(tmp_path, caplog, change, expected, said, name):
    """It must report what is damaged, delete nothing, repair the link, and use no number twice."""
    saver = AtomicDirectory(tmp_path)
    for number in range(3):
        save(saver, number, force_save=number == 1)
    change(tmp_path, Path(saver.latest()))
    restarted = AtomicDirectory(tmp_path)
    assert recipe(str(tmp_path), restarted) == content_of(restarted.latest()) == expected
    assert said in caplog.text
    assert names_in(tmp_path)[:2] == (["0", "1_force"] if name else [])
    save(restarted, "next")
    assert names_in(tmp_path) == (["0", "1_force", name, "3"] if name else ["3"])
    assert recipe(str(tmp_path), restarted) == "next"


def test_contents_are_not_read_where_that_is_switched_off(tmp_path):
    """verify=False must still detect a missing or cut file, and not read the rest."""
    saver = AtomicDirectory(tmp_path)
    save(saver, 0)
    path = Path(save(saver, 1), "content.txt")
    path.write_text("2")
    assert content_of(AtomicDirectory(tmp_path, verify=False).latest()) == "2"
    path.write_text("")
    assert content_of(AtomicDirectory(tmp_path, verify=False).latest()) == "0"


def test_link_that_leads_nowhere_or_elsewhere_is_mended(tmp_path, monkeypatch):
    """Checkpoints that were moved or copied must be found in the new place, not in the old one."""
    save(AtomicDirectory(tmp_path / "old"), "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/AtomicDirectory_checkpoint_0/README").write_text("a copy")
    AtomicDirectory(tmp_path / "copy")
    assert os.readlink(tmp_path / "copy" / LINK).startswith(str(tmp_path / "copy"))
    os.rename(tmp_path / "old", tmp_path / "new")
    assert recipe(str(tmp_path / "new"), AtomicDirectory(tmp_path / "new")) == "old"
    monkeypatch.chdir(tmp_path)  # the original links to a relative directory, wrongly
    path = original_save(tmp_path / "out", 0, linked=False)
    (tmp_path / "out" / LINK).symlink_to(path.relative_to(tmp_path))
    assert recipe("out", AtomicDirectory("out")) == "original 0"


def test_refusals(tmp_path, monkeypatch, snapshot):
    """Wrong arguments and paths, and starts without a usable checkpoint, must be errors that say what to do."""
    out, kinds = tmp_path / "out", (TypeError, ValueError, CheckpointError)
    wrong = [
        {"strategy": "sync"},
        {"keep_last": 1.5},
        {"group": 1},
        *({"name": name} for name in ("", "a/b", "x" * 81)),
    ]
    said = [error_of(kinds, lambda options=options: AtomicDirectory(out, **options)) for options in wrong]
    said.append(error_of(kinds, lambda: AtomicDirectory("s3://bucket/run")))
    with monkeypatch.context() as patch:  # under torchrun, without a group
        patch.setenv("WORLD_SIZE", "2")
        said.append(error_of(kinds, lambda: AtomicDirectory(out)))
    saver = AtomicDirectory(out)
    complete = save(saver, 0)
    directory = saver.prepare_checkpoint_directory()
    Path(directory, "shards").mkdir()
    said.append(error_of(kinds, lambda: saver.symlink_latest(directory)))
    assert recipe(str(out), saver) == "0"
    Path(directory, "shards", "part.bin").write_text("1")
    saver.symlink_latest(directory)
    aborted = saver.prepare_checkpoint_directory()
    saver.abort(aborted)
    assert names_in(out) == ["0", "1"]
    ended = {
        error_of(kinds, lambda path=path, end=end: end(path)).replace(str(path), "PATH")
        for path in (complete, aborted, str(tmp_path), str(out / "AtomicDirectory_checkpoint_7"))
        for end in (saver.abort, saver.symlink_latest)
    }
    assert Path(save(saver, 2)).name == "AtomicDirectory_checkpoint_2"
    for path in (out / "AtomicDirectory_checkpoint_1/shards/part.bin", *out.glob("*/content.txt")):
        path.write_text("changed")
    said += sorted(ended) + [error_of(NoValidCheckpointError, lambda: AtomicDirectory(out)) for _ in range(2)]
    original_save(tmp_path / "original", 0, linked=False)  # so that nobody knows which is complete
    said.append(error_of(NoValidCheckpointError, lambda: AtomicDirectory(tmp_path / "original")))
    copied = save(AtomicDirectory(tmp_path / "copied"), 0)
    os.unlink(tmp_path / "copied" / LINK)
    shutil.copytree(copied, tmp_path / "copied" / LINK)
    said.append(error_of(CheckpointError, lambda: AtomicDirectory(tmp_path / "copied")))
    assert plain("\n".join(said), DIR=tmp_path) == snapshot


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    """A killed process's directories must go at the next prepare; directories that another process writes must stay."""
    here, past = {"hostname": socket.gethostname(), "machine": this_machine()}, time.time() - 7200
    owners = {
        2: {**here, "hostname": "node7", "process_id": 1},  # where nothing has changed for an hour
        3: {**here, "process_id": dead_process_id()},
        4: {**here, "process_id": os.getpid()},  # an old process had our id
        5: {**here, "process_id": os.getppid()},
        6: {**here, "hostname": "node7", "process_id": 1},
        7: {**here, "process_id": dead_process_id(), "machine": "a container"},
    }
    for number, owner in owners.items():
        path = original_save(tmp_path, number, linked=False)
        save_manifest(path, Manifest(owner=owner))
        for each in [*path.iterdir(), path] if number == 2 else []:
            os.utime(each, (past, past))
    saver = AtomicDirectory(tmp_path)
    assert saver.latest() is None
    saver.prepare_checkpoint_directory()
    assert names_in(tmp_path) == ["5", "6", "7", "8"]


def test_directories_of_the_original_are_read_by_its_rule(tmp_path, caplog):
    """Without manifests, directories up to the link are complete; they are used with a warning, but not counted."""
    for number in range(2):
        original_save(tmp_path, number)
    original_save(tmp_path, 2, linked=False)
    saver = AtomicDirectory(tmp_path, keep_last=2)
    assert recipe(str(tmp_path), saver) == "original 1"
    assert "unverified" in caplog.text
    assert [content_of(path) for path in saver.history()] == ["original 0", "original 1"]
    save(saver, "ours")
    assert recipe(str(tmp_path), saver) == "ours"
    assert names_in(tmp_path) == ["0", "1", "2.uncommitted", "3"]
    Path(saver.latest(), "content.txt").write_text("damaged")
    saver = AtomicDirectory(tmp_path, keep_last=2)
    assert content_of(saver.latest()) == "original 1"
    for number in range(2):  # they go when as many newer ones are complete as are kept
        save(saver, number)
    assert [content_of(path) for path in saver.history()] == ["0", "1"]


def test_file_system_without_links_has_the_file_beside(tmp_path, caplog):
    """Without links, saving must work, and a new saver and the file must show the latest checkpoint."""
    with FaultyFiles(tmp_path, fail_with(errno.EPERM), kind="link"):
        saver = AtomicDirectory(tmp_path)
        save(saver, 0)
        save(saver, 1)
        assert "This file system has no links" in caplog.text
        assert (tmp_path / f"{LINK}.txt").read_text() == "AtomicDirectory_checkpoint_1\n"
        assert content_of(AtomicDirectory(tmp_path).latest()) == "1"


# Ranks


def _prepared(saver: AtomicDirectory, rank: int, *, force_save: bool = False) -> str:
    path = saver.prepare_checkpoint_directory(force_save=force_save)
    Path(path, f"rank-{rank}.txt").write_text(str(rank))
    return path


def _save(saver: AtomicDirectory, rank: int, *, force_save: bool = False) -> str:
    path = _prepared(saver, rank, force_save=force_save)
    saver.symlink_latest(path, metadata={"written_by": rank})
    return path


def test_ranks_share_one_series(tmp_path):
    """Both ranks must get the same directories, and see them complete."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", is_master=rank == 1, keep_last=2, timeout=TIMEOUT)
        assert saver.is_master == (rank == 1)
        paths = [_save(saver, rank) for _ in range(3)]
        return [*paths, os.readlink(tmp_path / "out" / saver.symlink_name), saver.latest()]

    first, second = on_ranks(main, tmp_path / "ranks")
    assert first == second
    assert [Path(path).name[-1] for path in first] == ["0", "1", "2", "2", "2"]
    assert verify_path(first[-1]).num_files == 2
    assert read_manifest(first[-1]).metadata == {"written_by": 1}
    assert sorted(path.name[-1] for path in (tmp_path / "out").glob("*_checkpoint_*")) == ["1", "2"]


STRATEGIES = {
    "sync_any": [["0", "1_force", "2_force"]] * 2,
    "sync_all": [["0", "1", "2_force"]] * 2,
    "async": [["rank_0_0", "rank_0_1", "rank_0_2_force"], ["rank_1_0", "rank_1_1_force", "rank_1_2_force"]],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_force_save_is_agreed(tmp_path, strategy):
    """A checkpoint must be kept forever if any rank says so, or if all ranks do; async ranks have their own series."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", strategy=strategy, timeout=TIMEOUT)
        wishes = [(False, False), (False, True), (True, True)]
        names = [os.path.basename(_save(saver, rank, force_save=wish[rank])) for wish in wishes]
        return [name.removeprefix("AtomicDirectory_").replace("checkpoint_", "") for name in names]

    assert on_ranks(main, tmp_path / "ranks") == STRATEGIES[strategy]


def _full(rank, out):
    saver = AtomicDirectory(out, timeout=TIMEOUT)
    with FaultyFiles(out, fail_with(errno.ENOSPC) if rank == 0 else None, kind="fsync"):
        _save(saver, rank)


def _die(rank, out):
    saver = AtomicDirectory(out, timeout=timedelta(seconds=5))
    path = _prepared(saver, rank)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    saver.symlink_latest(path)


def _hang(rank, out):
    saver = AtomicDirectory(out, timeout=timedelta(seconds=1))
    wait_for(lambda: rank or (out / "answered").exists())
    try:
        return rank and saver.prepare_checkpoint_directory()
    finally:
        (out / "answered").touch()


def _part(rank, out):
    saver = AtomicDirectory(out, timeout=TIMEOUT)
    path = _prepared(saver, rank)
    return saver.symlink_latest(path) if rank else saver.prepare_checkpoint_directory()


def _not_shared(rank, out):
    AtomicDirectory(out / f"disk-{rank}", timeout=timedelta(seconds=1)).prepare_checkpoint_directory()


def _arguments(*of_ranks):
    return lambda rank, out: AtomicDirectory(out, timeout=TIMEOUT, **of_ranks[rank])


LOST = "RanksLostError: The ranks could not agree on a checkpoint: rank 1 had no answer at 'end'"
APART = "rank 0 is at 'prepare', rank 1 is at 'end'"
# What each rank is told.
FAILURES = {
    "rank 0 has a full disk": (_full, ["OSError: [Errno 28]", "rank 0: OSError: [Errno 28]"]),
    "a rank is killed": (_die, ["dead", LOST]),
    "a rank hangs": (_hang, ["0", "took longer than 0:00:01"]),
    "a rank is at the next checkpoint": (_part, [APART, APART]),
    "two strategies": (_arguments({"strategy": "sync_any"}, {"strategy": "sync_all"}), ["The ranks disagree"] * 2),
    "no shared disk": (_not_shared, ["Error", "rank 1 does not see"]),
}


@pytest.mark.parametrize(("main", "expected"), FAILURES.values(), ids=FAILURES)
def test_failure_of_one_rank_stops_both(tmp_path, main, expected):
    """Within the timeout, both must raise an error that says what happened, and nothing may be published."""
    out = tmp_path / "out"
    answers = on_ranks(lambda rank: main(rank, out), tmp_path / "ranks")
    for answer, part in zip(answers, expected, strict=True):
        assert part in str(answer)
    assert AtomicDirectory(out).latest() is None


def test_what_is_refused_or_aborted_on_one_rank_ends_on_both(tmp_path):
    """Both must be told why; the directory can be repaired, and after an abort by a rank, both save the next one."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=TIMEOUT)
        path = _prepared(saver, rank)
        errors = [error_of((RuntimeError, ValueError), lambda: saver.symlink_latest(path if rank else str(tmp_path)))]
        saver.symlink_latest(path)
        path = _prepared(saver, rank)
        if rank == 1:
            saver.abort(path)
            return [*errors, ""]
        errors.append(error_of(RuntimeError, lambda: saver.symlink_latest(path)))
        assert not os.path.exists(path)
        return errors

    first, second = on_ranks(main, tmp_path / "ranks")
    assert "Pass the path that prepare_checkpoint_directory returned" in first[0]
    assert "rank 0: ValueError" in second[0]
    assert "was aborted by rank 1 and deleted" in first[1]
    saver = AtomicDirectory(tmp_path / "out")
    assert [Path(_save(saver, 0)).name, len(saver.history())] == ["AtomicDirectory_checkpoint_1", 2]


def test_group_of_some_ranks_leaves_the_others_out(tmp_path):
    """A saver of a group of ranks must contact no other rank, and number the ranks as the job does."""

    def main(rank):
        group = dist.new_group([1, 2], backend="gloo")
        if rank == 0:
            with pytest.raises(ValueError, match="not in the process group"):
                AtomicDirectory(tmp_path / "out", group=group, timeout=TIMEOUT)
            return None
        saver = AtomicDirectory(tmp_path / "out", group=group, timeout=TIMEOUT)
        return [saver.is_master, os.path.basename(_save(saver, rank))]

    answers = on_ranks(main, tmp_path / "ranks", num_ranks=3)
    assert answers == [None, [True, "AtomicDirectory_checkpoint_0"], [False, "AtomicDirectory_checkpoint_0"]]


def test_damaged_checkpoint_is_left_by_all_ranks_alike(tmp_path):
    """All ranks must use the same older checkpoint if the newest is damaged, and all must stop if none is left."""
    saver = AtomicDirectory(tmp_path / "out")
    first, second = _save(saver, 0), _save(saver, 0)

    def main(rank):
        return AtomicDirectory(tmp_path / "out", timeout=TIMEOUT).latest()

    Path(second, "rank-0.txt").write_text("damaged")
    assert on_ranks(main, tmp_path / "ranks-1") == [first, first]
    Path(first, "rank-0.txt").write_text("damaged")
    assert all("NoValidCheckpointError" in answer for answer in on_ranks(main, tmp_path / "ranks-2"))
