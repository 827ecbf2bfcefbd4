"""After a resume SpikeDetection finds the same spikes as in an uninterrupted run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import SpikeDetection
from torch import Tensor

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from tests.hook_saves import NAME, assert_continues_from, saver
from tests.processes import run
from tests.rank_runs import assert_ranks_continue, for_ranks
from tests.runs import FIRST_EPOCH, Cut, Net, assert_continues, each_short_cut, fit_eight, fit_net

pytestmark = for_ranks

SPIKE = 12
"""The batch with a spike in its loss: the fifth of the second epoch."""


class Spiky(Net):
    """Has one batch with a loss far from the previous ones."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return 1000 * loss if self.global_step == SPIKE else loss


class Shows(Callback):
    """Logs the values of a SpikeDetection: before a batch its last value, after it its mean."""

    def __init__(self, detection: SpikeDetection) -> None:
        self.detection = detection

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("last", self.detection.last_val, batch_size=4)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("mean of the last", self.detection.running_mean.compute(), batch_size=4, on_epoch=True)


def calm() -> list[Callback]:
    """Return a detection that finds nothing, and keeps a window."""
    detection = SpikeDetection(window=4, warmup=2, atol=1e6, rtol=None, exclude_batches_path="unused.json")
    return [detection, Shows(detection)]


@each_short_cut
def test_running_mean_continues(cut: Cut) -> None:
    """SpikeDetection's window, last value, and batches equal the uninterrupted run's."""
    assert_continues(cut, users=calm)


@pytest.mark.slow
def test_each_rank_has_its_own() -> None:
    """Each rank continues with the window and the last value of its own losses."""
    assert_ranks_continue(FIRST_EPOCH, users=calm)


def find_spike(directory: Path, *callbacks: Callback) -> None:
    """Fit a module with a spike; the result is in ``skip.json``."""
    skip = str(directory / "skip.json")
    detection = SpikeDetection(window=4, warmup=2, rtol=100.0, exclude_batches_path=skip)
    fit_eight([detection, *callbacks], directory, module=Spiky())


@pytest.mark.parametrize("kill", [SPIKE, SPIKE - 2, 3])
def test_spike_after_a_resume(kill: int, tmp_path: Path) -> None:
    """A spike is found at its batch, even at the first after the resume, though it depends on earlier losses."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    options: dict[str, Any] = {"every_n_train_steps": 1, "dirpath": tmp_path / "autosaves"}
    ended = run(lambda: find_spike(whole))
    first = run(lambda: find_spike(killed, FaultTolerance(**options), KillAt(kill)))
    assert first.exit_code == -signal.SIGKILL, first.output
    second = run(lambda: find_spike(killed, FaultTolerance(**options)), seed=9)
    assert "Resumed exactly" in second.output
    for output in (ended.output, second.output):
        assert "TrainingSpikeException: Training spike detected in batch 4" in output
    assert json.loads((killed / "skip.json").read_text()) == json.loads((whole / "skip.json").read_text()) == [3, 4]


def test_saved_in_a_hook() -> None:
    """A checkpoint that other code saves continues exactly, too."""
    assert_continues_from("on_validation_end", users=lambda: [saver("on_validation_end", 0), *calm()])


def test_checkpoint_that_needs_its_outcome_again_is_refused(tmp_path: Path) -> None:
    """A checkpoint saved before its batch-end hook can't resume exactly, and the error says so."""

    def main(path: Path | None) -> None:
        saving = [saver("on_train_batch_end", 2)] if path is None else []
        callbacks = [FaultTolerance(tmp_path / "autosaves"), *saving, *calm()]
        fit_net(callbacks, tmp_path, ckpt_path=path, max_epochs=1)

    saved = run(lambda: main(None))
    assert saved.exit_code == 0, saved.output
    ended = run(lambda: main(tmp_path / NAME))
    assert ended.exit_code == 1
    assert "SpikeDetection.on_train_batch_end comes after the hook that saved" in ended.output
