"""Faults that tests share: an exception in a hook, a slow disk, and a kill after a write in the background."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from lightning.pytorch import Callback

# How often the runs with these faults are saved.
EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}


class RaiseIn(Callback):
    """Raises in a hook of the `batch`-th training batch of this process."""

    def __init__(self, hook: str, batch: int) -> None:
        self.hook = hook
        self.batch = batch
        self.seen = -1

    def strike(self, hook: str) -> None:
        if hook == self.hook and self.seen == self.batch:
            raise ZeroDivisionError(f"in {hook}")

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen += 1
        self.strike("on_train_batch_start")

    def on_before_backward(self, *_: Any) -> None:
        self.strike("on_before_backward")

    def on_after_backward(self, *_: Any) -> None:
        self.strike("on_after_backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.strike("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.strike("on_train_batch_end")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.strike("on_train_epoch_end")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.strike("on_validation_batch_end")


_fsync = os.fsync


def is_in_background() -> bool:
    """Return whether this is the background thread that writes."""
    return threading.current_thread().name == "autosave"


class Disk(Callback):
    """A disk that is slow, or worse, for background writes: `at` counts the calls of ``fsync`` in that thread."""

    def __init__(self, seconds: float = 0.0, *, at: int | None = None) -> None:
        self.seconds = seconds
        self.at = at
        self.num_calls = 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        os.fsync = self.fsync

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        os.fsync = _fsync

    def fsync(self, descriptor: int) -> None:
        if is_in_background():
            time.sleep(self.seconds)
            self.num_calls += 1
            if self.num_calls == self.at:
                self.strike()
        _fsync(descriptor)

    def strike(self) -> None:
        """Cause the fault of this disk."""


class KillWhenWritten(Disk):
    """Waits at the start of its batch `batch` for a finished background write, and then kills the process."""

    def __init__(self, batch: int) -> None:
        super().__init__(0.01)
        self.num_left = batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)
        self.num_left -= 1
        while self.num_left < 0:
            time.sleep(0.01)
            if self.num_calls >= 2:
                os.kill(os.getpid(), signal.SIGKILL)
