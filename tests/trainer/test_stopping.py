"""The parts that watch for the end of a fit are gone when the fit is over, however it ended."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer.signals import StopSignals, signal_reason
from lightning_faulttolerant.trainer.stopping import Stopping
from tests.faults import RaiseIn
from tests.runs import fit_net, make_trainer


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


class Told:
    """Rank 0 of two; the other rank reports a given value."""

    rank, num_ranks = 0, 2

    def __init__(self, other: Any) -> None:
        self._other = other

    def to_first(self, step: str, value: Any) -> list[Any]:
        """Return both ranks' values."""
        return [value, self._other]

    def from_first(self, step: str, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("left_elsewhere", "fits"), [(40.0, True), (5.0, False)])
def test_save_has_to_fit_on_each_rank(left_elsewhere: float, fits: bool, tmp_path: Path) -> None:
    """The rank with the least time left decides whether a save is begun."""
    stopping = Stopping(make_trainer([], tmp_path), FaultTolerance()._options)
    stopping.signals.grace.save_seconds = lambda: 10.0
    stopping.signals.note(signal_reason(signal.SIGTERM))
    stopping._ranks = Told(left_elsewhere)
    assert stopping.save_fits() == fits
    assert stopping.is_too_late != fits


def test_stop_after_the_end_of_a_fit_is_one_of_all_ranks(tmp_path: Path) -> None:
    """Whichever rank got the request, all ranks end there for the same reason, and none minds who is gone first."""
    stopping = Stopping(make_trainer([], tmp_path), FaultTolerance()._options)
    stopping._ranks = Told(None)
    stopping.stop_if_wanted("here")
    stopping._ranks = Told(signal_reason(signal.SIGTERM).to_text())
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM here"):
        stopping.stop_if_wanted("here")
    assert stopping.reason == stopping.signals.requested == signal_reason(signal.SIGTERM)
    assert stopping._watch.end_together
