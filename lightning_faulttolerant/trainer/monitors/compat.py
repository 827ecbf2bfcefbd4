"""The private names of Lightning's Timer that this package touches, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage

# Each with what breaks without it.
TIMER_SEAMS = {
    "_start_time": "max_time: the time that a resume takes would count",
    "_end_time": "Timer.time_elapsed of a validation run, behind a resume",
}


def timer_state(timer: Timer) -> dict[str, Any]:
    """Return how much time has passed in each stage that has begun, and which of them go on."""
    stages = {stage.value for stage in RunningStage if timer.start_time(stage) is not None}
    elapsed = {stage: timer.time_elapsed(stage) for stage in stages}
    return {"elapsed": elapsed, "ended": [stage for stage in stages if timer.end_time(stage) is not None]}


def load_timer(timer: Timer, state: Mapping[str, Any]) -> None:
    """Let the time go on from what `timer_state` gave, without what has passed since this process began to train."""
    now = time.monotonic()
    for name, elapsed in state["elapsed"].items():
        stage = RunningStage(name)
        if stage == RunningStage.TRAINING:
            # What has passed before it is in the Timer's own state, which Lightning has put back.
            if timer._start_time[stage] is not None:  # a fit that came to its end does not start again
                timer._start_time[stage] = now
        else:
            timer._start_time[stage] = now - elapsed
            timer._end_time[stage] = now if name in state["ended"] else None
