"""State that callbacks keep but don't save is read from single callbacks and restored in fresh ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from torchmetrics import MeanMetric

from lightning_faulttolerant.trainer.adapters.state import callbacks_state, load_callbacks


@pytest.fixture
def trainer() -> Trainer:
    """Return a trainer that has not trained."""
    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


class Holding(Callback):
    """Holds a metric, and an attribute that is not a metric."""

    def __init__(self) -> None:
        self.mean = MeanMetric()
        self.number = 3


class Without(Callback):
    """Holds no metric."""


def test_metrics_of_a_callback_come_back(trainer: Trainer) -> None:
    """A metric in an attribute continues; other attributes are the user's own."""
    saved, fresh = Holding(), Holding()
    saved.mean.update(2.0)
    saved.number = 4
    assert load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved})) == []
    assert (fresh.mean.compute().item(), fresh.number) == (2.0, 3)


def test_what_has_nothing_to_go_to_is_named(trainer: Trainer) -> None:
    """A callback that no longer exists, and a metric that a callback no longer has, are each named."""
    state = callbacks_state(trainer, {"a": Holding(), "b": Holding()})
    assert load_callbacks(trainer, {"b": Without()}, state) == ["a", "b.mean"]


@pytest.mark.parametrize("values", [[0.1, 0.2], [], [1, 2.0]])
def test_history_of_rates_comes_back(trainer: Trainer, values: list[float]) -> None:
    """The history is equal in values and types."""
    saved, fresh = LearningRateMonitor(), LearningRateMonitor()
    saved.lrs, saved.last_momentum_values, saved.last_weight_decay_values = {"lr": values}, {"m": 0.9}, {}
    load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved}))
    assert fresh.lrs == {"lr": values}
    assert [type(value) for value in fresh.lrs["lr"]] == [type(value) for value in values]
    assert fresh.last_momentum_values == {"m": 0.9}


def counting(num_batches: int, *, window_size: int = 4, **arguments: Any) -> ThroughputMonitor:
    """Return a monitor whose training has seen `num_batches` batches of two samples, counted with NumPy numbers."""
    monitor = ThroughputMonitor(len, **arguments)
    throughput = monitor._throughputs[RunningStage.TRAINING] = Throughput(window_size=window_size)
    monitor._t0s[RunningStage.TRAINING] = time.perf_counter() - 2 * num_batches
    monitor._lengths[RunningStage.TRAINING] = 0
    for number in range(1, num_batches + 1):
        lengths = None if monitor.length_fn is None else np.int64(10 * number)
        throughput.update(time=float(number), batches=number, samples=np.int64(2 * number), lengths=lengths, flops=7)
    return monitor


def test_stage_that_a_monitor_does_not_watch_is_named(trainer: Trainer) -> None:
    """Counters of a stage that the new monitor does not watch are named."""
    state = callbacks_state(trainer, {"a": counting(5)})
    assert load_callbacks(trainer, {"a": ThroughputMonitor(len)}, state) == ["a.train"]
