"""If one of several ranks can't write for a while, all learn of it, none hangs, and all resume exactly afterwards."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_faulttolerant.errors import OPTIONS_VARIABLE
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.full_disks import FullDisk
from tests.rank_runs import SECONDS, for_ranks, rank_fit
from tests.sharded import ShardedNet, fsdp2

pytestmark = for_ranks


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"async_save": True}])
def test_first_rank_that_can_not_save(options: dict[str, Any]) -> None:
    """If rank 0, which writes for all, can't save for a while, the ranks resume exactly."""
    faults = [[FullDisk(2, 5, rank=0), KillAt(11, rank=1)]]
    options = {"every_n_train_steps": 1, **options}
    [cost] = assert_resumes_exactly(rank_fit(2), faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert cost.exit_code == -signal.SIGKILL


class Slow(Callback):
    """Is so slow that the ranks agree on a save every few batches."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.08)


@pytest.mark.slow
def test_first_rank_that_can_not_save_where_time_says_when() -> None:
    """If time decides, the first rank requests each try, and the others take part."""
    fit = rank_fit(2, users=lambda: [Slow()], max_epochs=4)
    faults = [[FullDisk(1, 16, rank=0), KillAt(30, rank=1)]]
    options = {"overhead_budget": 1.0}
    [cost] = assert_resumes_exactly(fit, faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert cost.exit_code == -signal.SIGKILL
    assert cost.epoch >= 2


@pytest.mark.slow
def test_first_rank_that_can_not_save_a_multiple_of_keep_every(monkeypatch: pytest.MonkeyPatch) -> None:
    """It requests another try soon after, though no save is due by steps, and the others take part."""
    fit = rank_fit(2, users=lambda: [Slow()], max_epochs=6)
    faults = [[FullDisk(19, 21, rank=0), KillAt(36, rank=1)]]
    monkeypatch.setenv(OPTIONS_VARIABLE, "FlightRecorder.rule=none, FlightRecorder.keep_every=20")
    options = {"every_n_train_steps": 20}
    [cost] = assert_resumes_exactly(fit, faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert cost.exit_code == -signal.SIGKILL
    assert cost.num_batches_twice < 36 - 20


@pytest.mark.slow
def test_shards_of_which_one_can_not_be_written() -> None:
    """If one rank can't write its shard, no rank has an autosave."""
    fit = rank_fit(2, module=ShardedNet, strategy=fsdp2())
    faults = [[FullDisk(2, 5, rank=1), KillAt(11, rank=0)]]
    options = {"every_n_train_steps": 1}
    [cost] = assert_resumes_exactly(fit, faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, 1, 3)


@pytest.mark.slow
def test_stop_that_ranks_can_not_save() -> None:
    """All ranks end with the exit code for a stop without a save, and resume from the last good autosave."""
    faults = [[FullDisk(3, rank=0), KillAt(6, rank=1, signum=signal.SIGTERM)]]
    options = {"every_n_train_steps": 1}
    [cost] = assert_resumes_exactly(rank_fit(2), faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert (cost.exit_code, cost.epoch, cost.batch) == (74, 0, 3)
