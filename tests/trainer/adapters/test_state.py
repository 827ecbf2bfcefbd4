"""State that callbacks keep but don't save is read from single callbacks and restored in fresh ones."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from torchmetrics import MaxMetric, MeanMetric

from lightning_faulttolerant.trainer.adapters.state import callbacks_state, load_callbacks, why_ended


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


class HoldingMore(Callback):
    """Holds metrics in a list and in a dict."""

    def __init__(self) -> None:
        self.means = [MeanMetric(), None]
        self.by_name = {"max": MaxMetric()}


def test_metrics_in_lists_and_dicts_of_a_callback_come_back(trainer: Trainer) -> None:
    """A metric in a list or in a dict continues too."""
    saved, fresh = HoldingMore(), HoldingMore()
    saved.means[0].update(2.0)
    saved.by_name["max"].update(3.0)
    assert load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved})) == []
    assert (fresh.means[0].compute().item(), fresh.by_name["max"].compute().item()) == (2.0, 3.0)


def test_what_has_nothing_to_go_to_is_named(trainer: Trainer) -> None:
    """A callback that no longer exists, and a metric that a callback no longer has, are each named."""
    state = callbacks_state(trainer, {"a": Holding(), "b": Holding()})
    assert load_callbacks(trainer, {"b": Without()}, state) == ["a", "b.mean"]


def test_callbacks_that_keep_nothing_leave_nothing(trainer: Trainer) -> None:
    """A callback with nothing to keep adds nothing to a checkpoint, so that it can be removed."""
    assert callbacks_state(trainer, {"a": Without()}) == {}


@pytest.mark.parametrize("values", [[0.1, 0.2], [], [1, 2.0]])
def test_history_of_rates_comes_back(trainer: Trainer, values: list[float]) -> None:
    """The history is equal in values and types."""
    saved, fresh = LearningRateMonitor(), LearningRateMonitor()
    saved.lrs, saved.last_momentum_values, saved.last_weight_decay_values = {"lr": values}, {"m": 0.9}, {}
    load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved}))
    assert fresh.lrs == {"lr": values}
    assert [type(value) for value in fresh.lrs["lr"]] == [type(value) for value in values]
    assert fresh.last_momentum_values == {"m": 0.9}


def test_fit_that_ended_as_it_was_trained_can_be_trained_further(trainer: Trainer) -> None:
    """Without a callback that changes the weights at the end, nothing is refused."""
    assert why_ended(trainer) is None


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


@pytest.mark.parametrize("window_size", [2, 4, 6])
@pytest.mark.parametrize("arguments", [{}, {"length_fn": len}], ids=["samples", "lengths"])
def test_throughput_comes_back(trainer: Trainer, arguments: dict[str, Any], window_size: int) -> None:
    """The counts come back from a file that is loaded safely, into a window of any size, and counting continues."""
    saved, fresh = counting(5, **arguments), counting(0, window_size=window_size, **arguments)
    file = io.BytesIO()
    torch.save(callbacks_state(trainer, {"a": saved}), file)
    file.seek(0)
    assert load_callbacks(trainer, {"a": fresh}, torch.load(file, weights_only=True)) == []
    stage = RunningStage.TRAINING
    assert fresh._lengths[stage] == (50 if arguments else 0)
    throughput = fresh._throughputs[stage]
    found = throughput.compute()
    assert {name: found[name] for name in ("time", "batches", "samples")} == {"time": 5, "batches": 5, "samples": 10}
    assert ("device/batches_per_sec" in found) == (window_size < 6)
    now = time.perf_counter() - fresh._t0s[stage]
    assert now >= 10
    throughput.update(time=now, batches=6, samples=12, lengths=60 if arguments else None)


@pytest.mark.parametrize("had", [True, False])
def test_lengths_that_only_one_of_two_runs_counts_are_named(trainer: Trainer, had: bool) -> None:
    """A monitor that starts or stops counting lengths would end the run; it restores nothing, and this is reported."""
    lengths = {"length_fn": len}
    saved, fresh = counting(5, **(lengths if had else {})), counting(0, **({} if had else lengths))
    assert load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved})) == ["a.lengths"]
    assert not fresh._throughputs[RunningStage.TRAINING]._time


def test_stage_that_a_monitor_does_not_watch_is_named(trainer: Trainer) -> None:
    """Counters of a stage that the new monitor does not watch are named."""
    state = callbacks_state(trainer, {"a": counting(5)})
    assert load_callbacks(trainer, {"a": ThroughputMonitor(len)}, state) == ["a.train"]
