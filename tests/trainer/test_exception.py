"""The message about a fit that an exception or a signal ends: where the next start continues."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant import FaultTolerance, TrainingStopped
from lightning_faulttolerant.trainer import boundary
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.save.run_state import Capture, RunState
from tests.processes import in_child
from tests.runs import fit_net


class StopInSanityCheck(Callback):
    """Requests a stop before anything is trained."""

    def on_sanity_check_start(self, trainer: Trainer, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class FailsToSave(Callback):
    """Raises while the first autosave is created."""

    def on_save_checkpoint(self, *_: Any) -> None:
        raise ZeroDivisionError("in the first save")


def ours(directory: Path) -> FaultTolerance:
    """Return a callback whose run has the same name in each process."""
    return FaultTolerance(directory, run_id="run")


def test_exception_before_anything_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If no autosave exists, none is named."""
    with caplog.at_level("INFO"), pytest.raises(ZeroDivisionError):
        fit_net([ours(tmp_path), FailsToSave()], tmp_path)
    assert "ZeroDivisionError: this start has saved nothing yet." in caplog.text


def test_stop_before_anything_is_saved_names_what_the_start_continued_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop in the sanity check, the next start begins where this one did: at the beginning or a checkpoint."""
    with caplog.at_level("INFO"), pytest.raises(TrainingStopped):
        fit_net([ours(tmp_path), StopInSanityCheck()], tmp_path)
    assert "Run the same command again to continue from the beginning." in caplog.text
    from_checkpoint = tmp_path / "given.ckpt"
    fit_net([], tmp_path, max_epochs=1).save_checkpoint(from_checkpoint)
    caplog.clear()
    with caplog.at_level("INFO"), pytest.raises(TrainingStopped):
        fit_net([ours(tmp_path), StopInSanityCheck()], tmp_path, ckpt_path=from_checkpoint)
    assert f"Run the same command again to continue from {from_checkpoint}." in caplog.text


def test_a_resume_does_not_capture_the_state_that_it_has_loaded(tmp_path: Path) -> None:
    """A capture compares all weights, and this one would never be saved. The next boundary has one."""
    assert in_child(partial(_fit_and_note_captures, tmp_path, "first", fails_at=3)) == 0
    assert in_child(partial(_fit_and_note_captures, tmp_path, "second", fails_at=5)) == 0
    assert (tmp_path / "first").read_text().split() == ["0", "1", "2", "3"]
    assert (tmp_path / "second").read_text().split() == ["4", "5"]


def _fit_and_note_captures(directory: Path, name: str, *, fails_at: int) -> None:
    """Fit until a batch fails, and write down before which batches there were captures. Each boundary saves."""
    captured = []
    take = boundary.take_capture

    def noted(run: RunState, position: TrainerPosition) -> Capture:
        captured.append(str(run.trainer.global_step))
        return take(run, position)

    boundary.take_capture = noted  # the process ends with this fit
    ours = FaultTolerance(directory, run_id="run", every_n_train_steps=1, overhead_budget=1.0)
    with pytest.raises(ZeroDivisionError):
        fit_net([ours, FailsAt(fails_at)], directory, limit_val_batches=0)
    (directory / name).write_text(" ".join(captured))


class FailsAt(Callback):
    """Raises at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise ZeroDivisionError
