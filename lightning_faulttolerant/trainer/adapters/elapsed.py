"""How much time has passed in a run: Timer, and with it ``Trainer(max_time=...)``, goes on from the state's instant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from lightning_faulttolerant.trainer.adapters.compat import load_timer, timer_state


class Elapsed:
    """Timer's own state holds the time, but what a resume takes behind ``on_train_start`` would count too."""

    def state_dict(self, trainer: Trainer, callback: Timer) -> dict[str, Any]:
        """Return the time that has passed in each stage."""
        return timer_state(callback)

    def load_state_dict(self, trainer: Trainer, callback: Timer, state: Mapping[str, Any]) -> None:
        """Let it go on from there."""
        load_timer(callback, state)
