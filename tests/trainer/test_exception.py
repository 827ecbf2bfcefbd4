"""A fit that an exception or a signal ends: the message where the next start continues, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance, TrainingStopped
from lightning_faulttolerant.trainer.signals import StopSignals
from tests.runs import fit_net


class StopInSanityCheck(Callback):
    """Requests a stop before anything is trained."""

    def on_sanity_check_start(self, trainer: Trainer, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Fails(Callback):
    """Raises after the first autosave is created."""

    def on_after_backward(self, *_: Any) -> None:
        raise ZeroDivisionError


def test_stop_before_anything_is_saved_names_what_the_start_continued_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop in the sanity check, the next start begins where this one did: here at a checkpoint."""
    given = tmp_path / "given.ckpt"
    fit_net([], tmp_path, max_epochs=1).save_checkpoint(given)
    with caplog.at_level("INFO"), pytest.raises(TrainingStopped):
        fit_net([FaultTolerance(tmp_path, run_id="run"), StopInSanityCheck()], tmp_path, ckpt_path=given)
    assert f"To continue from {given}, type: " in caplog.text


class BreaksInTheEnd(CSVLogger):
    """Can't write its last line."""

    def finalize(self, status: str) -> None:
        raise OSError("no space left on device")


def test_nothing_is_left_where_lightning_does_not_tear_down(tmp_path: Path) -> None:
    """If a logger that raises after an exception prevents Lightning's teardown, everything is still given back."""
    ours = FaultTolerance(dirpath=tmp_path / "autosaves")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(OSError, match="no space left"):
        fit_net([ours, Fails()], tmp_path, logger=BreaksInTheEnd(tmp_path))
    left = [signal.getsignal(signum) for signum in before]
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert not any(isinstance(getattr(handler, "__self__", None), StopSignals) for handler in left)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fault-tolerance")]
