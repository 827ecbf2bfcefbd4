"""With `overhead_budget` training waits for saves no longer than that share of its time, however slow the disk is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from tests.law.test_which_run import tell, told
from tests.processes import run
from tests.runs import Net, NoisyDataset, fit_net

SHARE = 0.2
SECONDS = 2.0
_fsync = os.fsync


class Timed(Net):
    """Takes 2 ms a batch, and notes between which batches something was saved: when that began, when it was over."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.perf_counter()
        self.left = self.began
        self.is_saving = False
        self.saves: list[tuple[float, float]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.02)  # what no thread can do behind training
        self.is_saving = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_saving and batch_idx > 0:
            self.saves.append((self.left, time.perf_counter()))
        self.is_saving = False
        self.trainer.should_stop = time.perf_counter() - self.began > SECONDS

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.002)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left = time.perf_counter()


def slow_fsync(descriptor: int) -> None:
    """Wait for the disk as long as a slow one would need; a file and its directory are waited for."""
    time.sleep(0.03)
    _fsync(descriptor)


def saves_of_a_fit(directory: Path, *, async_save: bool) -> list[tuple[float, float]]:
    """Fit for some seconds on a slow disk; return when training waited for a save but the first, from when to when."""

    def main() -> None:
        os.fsync = slow_fsync
        module = Timed()
        train = DataLoader(NoisyDataset(10_000), batch_size=4)
        callback = FaultTolerance(overhead_budget=SHARE, async_save=async_save)
        fit_net([callback], directory, train=train, module=module, max_epochs=1, limit_val_batches=0)
        tell(directory, "saves", module.saves)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    [saves] = told(directory, "saves")
    return saves


def share_of(saves: list[tuple[float, float]]) -> float:
    """Return the share of waiting over whole periods, each from the beginning of a save to that of the next."""
    return sum(end - begin for begin, end in saves[:-1]) / (saves[-1][0] - saves[0][0])


def test_share_of_the_time_that_goes_into_saving(tmp_path: Path) -> None:
    """The share is kept and made use of; only what training waits for counts: saves behind it come more often."""
    at_once, behind = (saves_of_a_fit(tmp_path / str(mode), async_save=mode) for mode in (False, True))
    for saves in (at_once, behind):
        assert len(saves) >= 3
        # What stands between two batches besides the save is in these times, too: hooks, and a capture now and then.
        assert SHARE / 4 < share_of(saves) < SHARE * 1.25
    assert len(behind) > 1.5 * len(at_once)
    assert min(end - begin for begin, end in at_once) > 0.06
    assert min(end - begin for begin, end in behind) < 0.06
