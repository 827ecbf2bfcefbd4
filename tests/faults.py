"""A fault that tests share: an exception in a hook."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback


class RaiseIn(Callback):
    """Raises in a hook of the `batch`-th training batch of this process."""

    def __init__(self, hook: str, batch: int) -> None:
        self.place = hook, batch
        self.seen = -1

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen += 1
        self._strike("on_train_batch_start")

    def on_after_backward(self, *_: Any) -> None:
        self._strike("on_after_backward")

    def _strike(self, hook: str) -> None:
        if self.place == (hook, self.seen):
            raise ZeroDivisionError(f"in {hook}")
