"""Lightning's callbacks that measure, or save at an exception."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    OnExceptionCheckpoint,
    SpikeDetection,
    ThroughputMonitor,
    throughput_monitor,
)

from lightning_faulttolerant import clock
from tests.laws.rows import Net, add


class Clock:
    """Replaces ``time``; it passes only when it is told to."""

    def __init__(self) -> None:
        # The package does not look for state here: another process's time is not state.
        self.now = ContextVar("now", default=0.0)
        self.perf_counter = self.now.get

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass."""
        self.now.set(self.now.get() + seconds)


class MovesClock(Callback):
    """Moves the clock: each batch takes another time, and the start of a training takes long."""

    def setup(self, *_: Any, **__: Any) -> None:
        self.clock = throughput_monitor.time = Clock()
        real = clock.perf_counter
        for module in list(sys.modules.values()):
            if "faulttolerant" in module.__name__ and vars(module).get("perf_counter") is real:
                module.perf_counter = self.clock.perf_counter

    def on_train_start(self, *_: Any) -> None:
        self.clock.pass_seconds(1000)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(1 + batch_idx / 8)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(0.25 + batch_idx / 16)


class Measured(Net):
    """Knows the cost of a batch."""

    flops_per_batch = 64


def measuring() -> list[Callback]:
    """Return a monitor that also counts lengths, and what moves its clock."""
    monitor = ThroughputMonitor(len, length_fn=lambda batch: 100 * len(batch), window_size=3)
    return [MovesClock(), monitor]


add("ThroughputMonitor", module=Measured, callbacks=measuring, takes=("clock", "layers"), ranks=False)
add(
    "OnExceptionCheckpoint",
    callbacks=lambda: OnExceptionCheckpoint("on_exception"),
    trainer={"enable_checkpointing": True},
    warns=(".*there is no last checkpoint available", ".*was called without a model"),
)
add(
    "SpikeDetection",
    callbacks=lambda: SpikeDetection(window=4, warmup=2, atol=1e6, rtol=None, exclude_batches_path="unused.json"),
    ranks=False,
)
