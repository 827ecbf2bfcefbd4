"""ThroughputMonitor continues to count after a resume, and its time and rates are those of training alone."""

from __future__ import annotations

import csv
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ThroughputMonitor, throughput_monitor
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.adapters import compat as adapters
from tests.hook_saves import NAME, assert_continues_from, saver
from tests.kills import run_whole_and_killed
from tests.processes import run
from tests.rank_runs import RankNet, assert_ranks_continue, for_ranks
from tests.runs import FIRST_EPOCH, Cut, Net, assert_continues, each_cut, eight_batches, fit_eight, fit_net

pytestmark = for_ranks


class Clock:
    """Replaces ``time``; two processes never have the same time at the same place."""

    def __init__(self) -> None:
        # The package does not look for state here: another process's time is not state.
        self.now = ContextVar("now", default=0.0)
        self.perf_counter = self.now.get

    def pass_seconds(self, seconds: float) -> None:
        self.now.set(self.now.get() + seconds)


class Moves(Callback):
    """Moves the clock: each batch takes another time, and the start of a training takes long."""

    def __init__(self) -> None:
        self.clock = throughput_monitor.time = Clock()
        adapters.perf_counter = self.clock.perf_counter

    def on_train_start(self, *_: Any) -> None:
        self.clock.pass_seconds(1000)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(1 + batch_idx / 8)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(0.25 + batch_idx / 16)


class Measured(Net):
    """Knows the cost of a batch."""

    flops_per_batch = 64


def monitor() -> ThroughputMonitor:
    """Return a monitor that also counts lengths; Lightning 2.5 requires more of them than of samples."""
    return ThroughputMonitor(len, length_fn=lambda batch: 100 * len(batch), window_size=3)


def rows(directory: Path) -> list[dict[str, str]]:
    """Return the logged values, row by row."""
    with open(directory / "lightning_logs/version_0/metrics.csv") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("in_front", [True, False], ids=["in front", "after"])
@each_cut
def test_counters_times_and_rates_continue(cut: Cut, in_front: bool, tmp_path: Path) -> None:
    """Each row equals the uninterrupted run's, including validation rows and the first row after the resume."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        ordered = [monitor(), *callbacks] if in_front else [*callbacks, monitor()]
        fit_eight([Moves(), *ordered], directory, module=Measured(), logger=CSVLogger(directory), val_check_interval=4)

    runs = run_whole_and_killed(main, tmp_path, [cut.kill], every_n_train_steps=cut.every)
    expected = rows(runs.whole)
    assert rows(runs.killed) == expected
    rates = [row for row in expected if "train/device/samples_per_sec" in row]
    assert len(rates) == 14  # of 16 batches the first two have no full window
    assert {"train/batches", "train/samples", "train/lengths", "train/time"} < rates[-1].keys()
    assert "validate/batches" in {name for row in expected for name in row}


def test_the_clock_is_no_difference() -> None:
    """The law does not compare the times in a monitor's state, which differ in every run."""
    assert_continues(FIRST_EPOCH, users=lambda: [monitor()], module=Measured, log_every_n_steps=100)


@pytest.mark.slow
def test_only_the_first_rank_counts() -> None:
    """With two ranks, one of which keeps no state, both continue."""
    module = type("MeasuredRank", (RankNet,), {"flops_per_batch": 64})
    assert_ranks_continue(FIRST_EPOCH, users=lambda: [monitor()], module=module, log_every_n_steps=100)


def test_times_that_a_mock_counts_are_all_the_monitors(tmp_path: Path) -> None:
    """A test that replaces ``time.perf_counter`` expects its own calls only. One call too many ended each epoch."""

    def main() -> None:
        logger = Mock(save_dir=tmp_path)
        times = [0.0, *(0.5 + step for step in range(1, 6))]
        with patch("time.perf_counter", side_effect=times):
            fit_net(
                [FaultTolerance(tmp_path), ThroughputMonitor(len, window_size=4)],
                tmp_path,
                logger=logger,
                max_epochs=1,
                module=Measured(),
                limit_val_batches=0,
            )
        print([call.kwargs["metrics"].get("train/time") for call in logger.log_metrics.mock_calls])

    ended = run(main)
    assert "[1.5, 2.5, 3.5, 4.5, 5.5]" in ended.output.replace(", None", ""), ended.output


def test_saved_in_front_of_its_hook() -> None:
    """A checkpoint saved at the end of a validation run, before the monitor's hook, still includes that time."""

    def users() -> list[Callback]:
        return [Moves(), saver("on_validation_end", 0), monitor()]

    assert_continues_from("on_validation_end", users=users, module=Measured, train=eight_batches, val_check_interval=4)


def test_checkpoint_that_needs_its_batch_again_is_refused(tmp_path: Path) -> None:
    """A checkpoint saved before its batch-end hook can't resume exactly, and the error says so."""

    def main(path: Path | None) -> None:
        saving = [saver("on_train_batch_end", 2)] if path is None else []
        callbacks = [FaultTolerance(tmp_path / "autosaves"), *saving, monitor()]
        fit_net(callbacks, tmp_path, module=Measured(), ckpt_path=path, max_epochs=1)

    saved = run(lambda: main(None))
    assert saved.exit_code == 0, saved.output
    ended = run(lambda: main(tmp_path / NAME))
    assert ended.exit_code == 1
    assert "ThroughputMonitor.on_train_batch_end comes after the hook that saved" in ended.output
