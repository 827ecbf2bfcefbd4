"""The parts that watch for the end of a fit are gone when the fit is over, however it ended."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.signals import StopSignals
from tests.faults import RaiseIn
from tests.runs import fit_net


class BreaksInTheEnd(CSVLogger):
    """Can't write its last line."""

    def finalize(self, status: str) -> None:
        raise OSError("no space left on device")


def test_nothing_is_left_where_lightning_does_not_tear_down(tmp_path: Path) -> None:
    """If a logger that raises after an exception prevents Lightning's teardown, everything is still given back."""
    ours = FaultTolerance(dirpath=tmp_path / "autosaves")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(OSError, match="no space left"):
        fit_net([ours, RaiseIn("on_after_backward", 3)], tmp_path, logger=BreaksInTheEnd(tmp_path))
    left = [signal.getsignal(signum) for signum in before]
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert not any(isinstance(getattr(handler, "__self__", None), StopSignals) for handler in left)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fault-tolerance")]
