"""Timer, also as ``Trainer(max_time=...)``, and LearningRateMonitor continue after a resume as if uninterrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, Timer, timer
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant.trainer.adapters import compat as adapters
from tests.callbacks import Clock
from tests.kills import run_whole_and_killed
from tests.runs import FIRST_EPOCH, Cut, fit_net


class Watch(Callback):
    """Moves the clock, and records the elapsed time when a batch begins, and at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = timer.time = adapters.time = Clock()

    def on_train_start(self, *_: Any) -> None:
        self.clock.pass_seconds(100)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._write(trainer, trainer.current_epoch * 5 + batch_idx)
        self.clock.pass_seconds(1)

    def on_validation_batch_start(self, *_: Any) -> None:
        self.clock.pass_seconds(10)

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self._write(trainer, "end")

    def _write(self, trainer: Any, batch: Any) -> None:
        [found] = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
        with open(self.path, "a") as file:
            file.write(json.dumps([batch, found.time_elapsed(), found.time_elapsed("validate")]) + "\n")


@pytest.mark.parametrize(("max_time", "num_batches"), [(None, 10), (8, 6), (28, 8)])
@pytest.mark.parametrize(("kill", "every"), [(3, 1), (4, 3), (7, 3)])
def test_elapsed_time_continues(kill: int, every: int, max_time: int | None, num_batches: int, tmp_path: Path) -> None:
    """Each time equals the uninterrupted run's, and so does the end with ``max_time``; the resume does not count."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        timers = [Timer()] if max_time is None else []
        limit = None if max_time is None else timedelta(seconds=max_time)
        fit_net([*timers, Watch(directory / "watched.jsonl"), *callbacks], directory, max_time=limit)

    runs = run_whole_and_killed(main, tmp_path, [min(kill, num_batches - 1)], every_n_train_steps=every)
    whole, killed = (
        [json.loads(line) for line in (directory / "watched.jsonl").read_text().splitlines()]
        for directory in (runs.whole, runs.killed)
    )
    assert dict(_by_batch(killed)) == dict(_by_batch(whole))
    assert [batch for batch, *_ in whole][-1] == "end"
    assert len(whole) == num_batches + 1


def _by_batch(lines: list[list[Any]]) -> Iterator[tuple[Any, list[float]]]:
    return ((batch, seconds) for batch, *seconds in lines)


# Batch 7 runs twice; at batch 7 loggers get values, at batch 8 they don't.
LATER_EPOCH = Cut(kill=9, every=7, continues_at=(1, 2))


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
@pytest.mark.parametrize(
    "cut", [pytest.param(FIRST_EPOCH, id="first-epoch"), pytest.param(LATER_EPOCH, id="later-epoch")]
)
def test_learning_rate_monitor_continues(cut: Cut, interval: Any, tmp_path: Path) -> None:
    """LearningRateMonitor's logged values and attributes equal the uninterrupted run's."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        monitor = LearningRateMonitor(logging_interval=interval, log_momentum=True, log_weight_decay=True)
        fit_net([monitor, *callbacks], directory, logger=CSVLogger(directory), log_every_n_steps=2)
        kept = [monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values]
        (directory / "kept.json").write_text(json.dumps(kept))

    runs = run_whole_and_killed(main, tmp_path, [cut.kill], every_n_train_steps=cut.every)
    for name in ("kept.json", "lightning_logs/version_0/metrics.csv"):
        assert (runs.killed / name).read_bytes() == (runs.whole / name).read_bytes()
    assert "StepLR" in (runs.whole / "kept.json").read_text() or "lr-Adam" in (runs.whole / "kept.json").read_text()
