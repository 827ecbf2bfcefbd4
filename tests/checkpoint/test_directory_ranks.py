"""AtomicDirectory on two ranks over gloo: they share one series, and an error or a death on one is an error on both."""

from __future__ import annotations

import errno
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_faulttolerant import AtomicDirectory
from lightning_faulttolerant.checkpoint import directory
from lightning_faulttolerant.checkpoint.manifest import read_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with
from tests.ranks import on_ranks

TIMEOUT = timedelta(seconds=20)


def _save(saver: AtomicDirectory, rank: int, *, force_save: bool = False) -> str:
    path = saver.prepare_checkpoint_directory(force_save=force_save)
    Path(path, f"rank-{rank}.txt").write_text(str(rank))
    saver.symlink_latest(path, metadata={"written_by": rank})
    return path


def test_ranks_share_one_series(tmp_path):
    """Both ranks must get the same directories, see them complete, and find the files of both verified, over gloo."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", is_master=rank == 1, keep_last=2, timeout=TIMEOUT)
        paths = [_save(saver, rank) for _ in range(3)]
        assert saver.is_master == (rank == 1)
        found = os.readlink(tmp_path / "out" / saver.symlink_name)
        return [*paths, found, saver.latest()]

    first, second = on_ranks(main, tmp_path / "ranks")
    assert first == second
    assert [Path(path).name[-1] for path in first] == ["0", "1", "2", "2", "2"]
    assert verify_path(first[-1]).num_files == 2
    assert read_manifest(first[-1]).metadata == {"written_by": 1}
    assert sorted(path.name[-1] for path in (tmp_path / "out").glob("*_checkpoint_*")) == ["1", "2"]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("sync_any", ["", "_force", "_force"]), ("sync_all", ["", "", "_force"])]
)
def test_force_save_is_agreed(tmp_path, strategy, expected):
    """A checkpoint must be kept forever if any rank says so, or if all ranks do, depending on the strategy."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", strategy=strategy, timeout=TIMEOUT)
        wishes = [(False, False), (False, True), (True, True)]
        return [os.path.basename(_save(saver, rank, force_save=wish[rank])) for wish in wishes]

    names = [f"AtomicDirectory_checkpoint_{number}{suffix}" for number, suffix in enumerate(expected)]
    assert on_ranks(main, tmp_path / "ranks") == [names, names]


def test_async_ranks_have_series_of_their_own(tmp_path):
    """Under "async" each rank must save alone, as often as it likes, into directories with its number."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", strategy="async", keep_last=1, timeout=TIMEOUT)
        for _ in range(rank + 1):
            path = _save(saver, rank)
        return [os.path.basename(path), saver.symlink_name, saver.is_master]

    assert on_ranks(main, tmp_path / "ranks") == [
        [f"AtomicDirectory_rank_{rank}_checkpoint_{rank}", f"AtomicDirectory_rank_{rank}.latest_checkpoint", True]
        for rank in range(2)
    ]


def test_file_that_one_rank_does_not_see_yet_is_part_of_the_checkpoint(tmp_path, monkeypatch):
    """On a network file system a listing may be old: files that any rank sees must be in the manifest."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out")
        seen = directory.list_files
        if rank == 0:
            monkeypatch.setattr(directory, "list_files", lambda path: [n for n in seen(path) if n != "rank-1.txt"])
        return sorted(read_manifest(_save(saver, rank)).files)

    assert on_ranks(main, tmp_path) == [["rank-0.txt", "rank-1.txt"]] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_rank_reaches_both(tmp_path, failing):
    """A rank with a full disk during the completion of a checkpoint must stop both, and nothing may be published."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=TIMEOUT)
        _save(saver, rank)

        fault = fail_with(errno.ENOSPC) if rank == failing else None
        try:
            with FaultyFiles(tmp_path / "out", fault, kind="fsync"):
                return _save(saver, rank)
        except Exception as error:  # noqa: BLE001 - checked below
            return [f"{type(error).__name__}: {error}", saver.latest()]

    answers = on_ranks(main, tmp_path / "ranks")
    assert answers[failing][0].startswith("OSError: [Errno 28]")
    assert answers[1 - failing][0].startswith("CheckpointError: Another rank failed")
    assert f"rank {failing}: OSError" in answers[1 - failing][0]
    assert [Path(answer[1]).name for answer in answers] == ["AtomicDirectory_checkpoint_0"] * 2


def test_abort_on_one_rank_ends_the_checkpoint_on_both(tmp_path):
    """A rank that can't write its part gives up: the other must learn it immediately, and both save the next one."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=TIMEOUT)
        path = saver.prepare_checkpoint_directory()
        Path(path, f"{rank}.txt").write_text("x")
        answer = None
        if rank == 1:
            saver.abort(path)
        else:
            with pytest.raises(RuntimeError) as caught:
                saver.symlink_latest(path)
            answer = str(caught.value)
        return [answer, os.path.exists(path), os.path.basename(_save(saver, rank))]

    first, second = on_ranks(main, tmp_path / "ranks")
    assert "was aborted by rank 1 and deleted" in first[0]
    assert first[1:] == second[1:] == [False, "AtomicDirectory_checkpoint_0"]


def test_dead_rank_is_an_error_on_the_other(tmp_path):
    """If a rank is killed while it writes, the other must raise rather than wait forever, and publish nothing."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=timedelta(seconds=5))
        path = saver.prepare_checkpoint_directory()
        Path(path, f"{rank}.txt").write_text("x")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        saver.symlink_latest(path)

    dead, answer = on_ranks(main, tmp_path / "ranks")
    assert dead == "dead"
    assert answer.startswith("RanksLostError: The ranks could not agree on a checkpoint: rank 1 had no answer at 'end'")
    assert AtomicDirectory(tmp_path / "out").latest() is None


def test_silent_rank_is_an_error_within_the_timeout(tmp_path):
    """If a rank hangs, the other raises after the timeout, and the message says how long it waited."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=timedelta(seconds=1))
        if rank == 0:
            while not (tmp_path / "answered").exists():
                time.sleep(0.01)
            return None
        with pytest.raises(RuntimeError) as caught:
            saver.prepare_checkpoint_directory()
        (tmp_path / "answered").touch()
        return str(caught.value)

    assert "took longer than 0:00:01" in on_ranks(main, tmp_path / "ranks")[1]


def test_ranks_that_lose_each_other_are_reported(tmp_path):
    """If a rank continues to the next checkpoint while the other completes this one, both must raise an error."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=TIMEOUT)
        path = saver.prepare_checkpoint_directory()
        Path(path, f"{rank}.txt").write_text("x")
        return saver.symlink_latest(path) if rank else saver.prepare_checkpoint_directory()

    for answer in on_ranks(main, tmp_path / "ranks"):
        assert "rank 0 is at 'prepare', rank 1 is at 'end'" in answer


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([{"strategy": "sync_any"}, {"strategy": "sync_all"}], "The ranks disagree"),
        ([{"is_master": True}, {"is_master": True}], "is_master is True on rank 0, rank 1"),
    ],
)
def test_savers_that_do_not_fit_are_refused_on_both(tmp_path, arguments, reason):
    """Ranks that would wait for each other, or overwrite each other, must both raise when the saver is created."""

    def main(rank):
        AtomicDirectory(tmp_path / "out", timeout=TIMEOUT, **arguments[rank])

    for answer in on_ranks(main, tmp_path / "ranks"):
        assert answer.startswith("ValueError")
        assert reason in answer


def test_empty_checkpoint_and_different_paths_are_refused_on_both(tmp_path):
    """An error of one rank must stop both, and leave the prepared directory to be repaired and completed."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / "out", timeout=TIMEOUT)
        path = saver.prepare_checkpoint_directory()
        errors = []
        for wrong in (path, path if rank else str(tmp_path)):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                saver.symlink_latest(wrong)
            errors.append(str(caught.value))
        Path(path, f"{rank}.txt").write_text("x")
        saver.symlink_latest(path)
        return errors

    first, second = on_ranks(main, tmp_path / "ranks")
    assert "contains no file" in first[0]
    assert "contains no file" in second[0]
    assert "Pass the path that prepare_checkpoint_directory returned" in first[1]
    assert "rank 0: ValueError" in second[1]


def test_output_directory_that_is_not_shared_is_an_error_on_both(tmp_path):
    """Ranks on nodes without a common disk must get an error within the timeout, not wait for a directory forever."""

    def main(rank):
        saver = AtomicDirectory(tmp_path / f"disk-{rank}", timeout=TIMEOUT)
        if rank == 1:
            saver._timeout = timedelta(seconds=0.5)  # for the directory alone, however late the other rank comes
        saver.prepare_checkpoint_directory()

    answers = on_ranks(main, tmp_path / "ranks")
    assert "rank 1 does not see" in answers[1]
    assert "rank 1: CheckpointError" in answers[0]


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
    answers = on_ranks(main, tmp_path / "ranks-2")
    assert "NoValidCheckpointError" in answers[0]
    assert "NoValidCheckpointError" in answers[1]
