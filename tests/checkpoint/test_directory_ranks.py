"""AtomicDirectory on ranks over gloo: they share one series, and an error or a death on one is an error on all."""

from __future__ import annotations

import errno
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_faulttolerant import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import read_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from tests.faulty_files import FaultyFiles, fail_with
from tests.messages import error_of
from tests.processes import wait_for
from tests.ranks import TIMEOUT, on_ranks


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
