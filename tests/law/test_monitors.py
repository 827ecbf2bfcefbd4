"""Timer, with it ``Trainer(max_time=...)``, and LearningRateMonitor go on behind a resume as if it were none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, Timer
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.kills import run_whole_and_killed
from tests.processes import run
from tests.runs import Cut, each_cut, fit_net

_SECONDS = 0.05  # that a batch takes at least


class Watch(Callback):
    """Takes its time at the start of the training and in each batch; writes down the time that has passed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, *_: Any) -> None:
        time.sleep(0.8)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        [timer] = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
        seconds = timer.time_elapsed(), timer.time_elapsed("validate")
        with open(self.path, "a") as file:
            file.write(json.dumps([trainer.current_epoch * 8 + batch_idx, *seconds]) + "\n")
        time.sleep(_SECONDS)


def _watched(path: Path) -> Iterator[tuple[int, float, float]]:
    return (json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(("kill", "every"), [(3, 1), (13, 12)])
def test_elapsed_time_goes_on(kill: int, every: int, tmp_path: Path) -> None:
    """Behind a resume the time is that of the state; neither the time between nor that of the resume itself counts."""

    def main(name: str, *callbacks: Callback) -> None:
        fit_net([Timer(), *callbacks, Watch(tmp_path / name)], tmp_path)

    run(lambda: main("before", FaultTolerance(every_n_train_steps=every), KillAt(kill)))
    time.sleep(1)
    ended = run(lambda: main("behind", FaultTolerance(every_n_train_steps=every)), seed=99)
    assert "Resumed exactly" in ended.output, ended.output
    before = {batch: seconds for batch, *seconds in _watched(tmp_path / "before")}
    behind = {batch: seconds for batch, *seconds in _watched(tmp_path / "behind")}
    first = kill - kill % every
    training, validation = behind[first]
    # Half a second for what a busy machine takes between the state and the batch.
    assert before[first - 1][0] + _SECONDS <= training <= before.get(first, before[first - 1])[0] + 0.5
    assert validation == pytest.approx(before[first - 1][1])
    assert all(behind[batch + 1][0] >= behind[batch][0] + _SECONDS for batch in range(first, 15))


class WatchToTheEnd(Watch):
    """And when all is over."""

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        [timer] = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
        self.path.with_suffix(".end").write_text(str(timer.time_elapsed()))


def test_max_time_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """A run of which half the time was gone trains for the other half, to the first batch that ends behind it."""
    limit = 20 * _SECONDS

    def main(*callbacks: Callback) -> None:
        arguments = {"max_epochs": 9, "max_time": timedelta(seconds=limit)}
        fit_net([*callbacks, WatchToTheEnd(tmp_path / "watched")], tmp_path, **arguments)

    run(lambda: main(FaultTolerance(every_n_train_steps=1), KillAt(7)))
    time.sleep(limit)
    ended = run(lambda: main(FaultTolerance(every_n_train_steps=1)), seed=99)
    assert ended.exit_code == 0, ended.output
    batches, seconds, _ = zip(*_watched(tmp_path / "watched"), strict=True)
    assert batches == tuple(range(len(batches)))
    assert 7 < len(batches) <= 20
    assert all(behind >= before + _SECONDS for before, behind in pairwise(seconds))
    assert seconds[-2] < limit <= float((tmp_path / "watched.end").read_text())
    assert "Time limit reached" in ended.output


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
@each_cut
def test_learning_rate_monitor_goes_on(cut: Cut, interval: Any, tmp_path: Path) -> None:
    """What it logs and what it keeps are the uninterrupted run's."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        monitor = LearningRateMonitor(logging_interval=interval, log_momentum=True, log_weight_decay=True)
        fit_net([monitor, *callbacks], directory, logger=CSVLogger(directory), log_every_n_steps=2)
        kept = [monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values]
        (directory / "kept.json").write_text(json.dumps(kept))

    runs = run_whole_and_killed(main, tmp_path, [cut.kill], every_n_train_steps=cut.every)
    for name in ("kept.json", "lightning_logs/version_0/metrics.csv"):
        assert (runs.killed / name).read_bytes() == (runs.whole / name).read_bytes()
    assert "StepLR" in (runs.whole / "kept.json").read_text() or "lr-Adam" in (runs.whole / "kept.json").read_text()
