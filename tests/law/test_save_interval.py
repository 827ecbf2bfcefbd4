"""With `overhead_budget` training waits for saves no longer than that share of its time, on any disk."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from tests.data_sets import NoisyDataset
from tests.processes import run
from tests.runs import Net, fit_net
from tests.scripts import tell, told

SHARE = 0.3
NUM_SAVES = 5
_fsync = os.fsync


class Timed(Net):
    """Takes 2 ms a batch, and records when each gap between two batches began, and how long it was."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0.0
        self.is_saving = False
        self.saves: list[tuple[float, float]] = []
        self.others: list[float] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.03)  # work that no thread can do in the background
        self.is_saving = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seconds = time.perf_counter() - self.left
        if batch_idx > 0:
            self.saves.append((self.left, seconds)) if self.is_saving else self.others.append(seconds)
        self.is_saving = False
        self.trainer.should_stop = len(self.saves) == NUM_SAVES

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.002)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left = time.perf_counter()


def slow_fsync(descriptor: int) -> None:
    """Wait as a slow disk would; a save waits for a file and for its directory."""
    time.sleep(0.03)
    _fsync(descriptor)


def saves_of_a_fit(directory: Path, *, async_save: bool) -> list[tuple[float, float]]:
    """Fit until enough saves are on a slow disk; return when training waited for each, and how long."""

    def main() -> None:
        os.fsync = slow_fsync
        module = Timed()
        train = DataLoader(NoisyDataset(10_000), batch_size=4)
        callback = FaultTolerance(overhead_budget=SHARE, async_save=async_save)
        fit_net([callback], directory, train=train, module=module, max_epochs=1, limit_val_batches=0)
        between = statistics.median(module.others)  # hooks, and the next batch
        tell(directory, "saves", [(began, seconds - between) for began, seconds in module.saves])

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    [saves] = told(directory, "saves")
    return saves


def period_of(saves: list[tuple[float, float]]) -> float:
    """Return the total seconds of all periods, each from the start of one save to the start of the next."""
    return saves[-1][0] - saves[0][0]


@pytest.mark.slow
def test_share_of_the_time_that_goes_into_saving(tmp_path: Path) -> None:
    """The share is kept and used; only training's waits count, so background saves come more often."""
    at_once, in_background = (saves_of_a_fit(tmp_path / str(mode), async_save=mode) for mode in (False, True))
    for saves in (at_once, in_background):
        assert len(saves) == NUM_SAVES
        assert SHARE / 4 < sum(seconds for _, seconds in saves[:-1]) / period_of(saves) < SHARE * 1.3
    assert period_of(at_once) > 1.3 * period_of(in_background)
    assert min(seconds for _, seconds in at_once) > 0.08
    assert min(seconds for _, seconds in in_background) < 0.08
