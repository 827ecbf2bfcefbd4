"""A replay is not stopped by what stops a run."""

from __future__ import annotations

from lightning_faulttolerant import FaultTolerance, HangWatch
from lightning_faulttolerant.trainer.companions import with_companions
from lightning_faulttolerant.trainer.steps.replay import without_saves


def test_a_user_may_stay_in_the_debugger() -> None:
    """A script whose hangs are ended after its own limit is not watched in a replay."""
    options = with_companions(FaultTolerance()._options, [HangWatch("stop", timeout=60)])
    assert (options.action, options.timeout) == ("stop", 60)
    options = without_saves(options)
    assert (options.action, options.timeout) == ("off", None)
