"""A replay is not stopped by what stops a run."""

from __future__ import annotations

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.steps.replay import without_saves


def test_a_user_may_stay_in_the_debugger() -> None:
    """A script whose hangs are ended after its own limit is not watched in a replay."""
    options = without_saves(FaultTolerance(hang="stop", hang_timeout=60)._options)
    assert (options.hang, options.hang_timeout) == ("off", None)
