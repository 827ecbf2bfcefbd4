"""Private names of Lightning's callbacks and logged values that this package uses, checked on 2.5.6 to 2.6.6.

`SEAMS` and `RESULT_SEAMS` list them for the contract tests, with what breaks without each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer, callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, ThroughputMonitor, Timer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage

from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.state.tensors import plain_copy, with_tensors
from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.position import FIT, function_of, loop_of

SEAMS = {
    "WeightAveraging._average_model": "captures: they would be saved with averages of another moment",
    "StochasticWeightAveraging._initialized": "the scheduler that it swaps in",
    "StochasticWeightAveraging._latest_update_epoch": "weights that are averaged once an epoch",
    "StochasticWeightAveraging._max_epochs": "the number of its epochs",
    "StochasticWeightAveraging._accumulate_grad_batches": "accumulation after the epoch that updates batch norm",
    "ModelPruning._parameters_to_prune": "masks of pruned weights",
    "ModelPruning._original_layers": "the first weights, to which pruning goes back",
    "ModelPruning._make_pruning_permanent": "the refusal to train a pruned run further",
    "Timer._start_time": "max_time: the time that a resume takes would count",
    "Timer._end_time": "Timer.time_elapsed of a validation run, after a resume",
    "ThroughputMonitor._throughputs": "the windows over which its rates are taken",
    "ThroughputMonitor._t0s": "the time that it logs",
    "ThroughputMonitor._lengths": "the lengths that it has counted",
    "Throughput._time": "the windows over which its rates are taken",
    "Throughput._batches": "the windows over which its rates are taken",
    "Throughput._samples": "the windows over which its rates are taken",
    "Throughput._lengths": "the windows over which its rates are taken",
    "Throughput._flops": "the windows over which its rates are taken",
    "trainer.fit_loop._skip_backward": "the epoch that updates batch norm, which trains nothing",
}

# Empty in Lightning 2.5, which does not have it.
WEIGHT_AVERAGING: tuple[type[Any], ...] = tuple(filter(None, [getattr(lightning_callbacks, "WeightAveraging", None)]))


def averaged_models(trainer: Trainer) -> list[torch.nn.Module]:
    """Return the models that WeightAveraging writes into a checkpoint as they are at the time of the write."""
    averaging = (c for c in callbacks(trainer) if isinstance(c, WEIGHT_AVERAGING))
    return [c._average_model for c in averaging if c._average_model is not None]


class AveragingState(TypedDict):
    """What a StochasticWeightAveraging sets up at the start of an epoch."""

    initialized: bool
    updates_batch_norm: bool
    accumulate_grad_batches: int | None
    num_added_epochs: int


def averaging_state(trainer: Trainer, callback: StochasticWeightAveraging) -> AveragingState:
    """Return what a StochasticWeightAveraging sets up at the start of an epoch."""
    max_epochs = trainer.fit_loop.max_epochs
    return {
        "initialized": callback._initialized,
        "updates_batch_norm": trainer.fit_loop._skip_backward,
        "accumulate_grad_batches": getattr(callback, "_accumulate_grad_batches", None),
        "num_added_epochs": 0 if max_epochs is None else max_epochs - callback._max_epochs,
    }


def load_averaging(trainer: Trainer, callback: StochasticWeightAveraging, state: AveragingState) -> None:
    """Restore the parts of `averaging_state` that no hook of the callback sets up again."""
    if state["accumulate_grad_batches"] is not None:
        callback._accumulate_grad_batches = state["accumulate_grad_batches"]
    trainer.fit_loop.max_epochs = callback._max_epochs + state["num_added_epochs"]


def swap_scheduler_again(trainer: Trainer, callback: StochasticWeightAveraging) -> None:
    """Let a StochasticWeightAveraging swap the scheduler as in its first epoch, and do nothing else."""
    epoch, latest, end = trainer.current_epoch, callback._latest_update_epoch, callback._max_epochs
    callback._latest_update_epoch = epoch
    callback._max_epochs = end if end == -1 else max(end, epoch + 1)
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    callback._latest_update_epoch, callback._max_epochs = latest, end


def pruned_parameters(callback: ModelPruning) -> list[tuple[torch.nn.Module, str]]:
    """Return the parameters that a ModelPruning prunes, each as its module and its name there."""
    return list(callback._parameters_to_prune)


def first_parameters(callback: ModelPruning) -> dict[int, torch.nn.Parameter]:
    """Return the weights that a ModelPruning goes back to, by place in `pruned_parameters`; it may keep none."""
    layers = (callback._original_layers or {}).values()
    return {number: getattr(layer["data"], name) for layer in layers for number, name in layer["names"]}


def removes_masks(callback: ModelPruning) -> bool:
    """Return whether a ModelPruning leaves no masks after the fit."""
    return callback._make_pruning_permanent


class TimerState(TypedDict):
    """The time of a Timer, in seconds by stage, and the stages that have ended."""

    elapsed: dict[str, float]
    ended: list[str]


def timer_state(timer: Timer) -> TimerState:
    """Return the time that has passed in each stage that has begun, and which stages have ended."""
    stages = [stage.value for stage in RunningStage if timer.start_time(stage) is not None]
    elapsed = {stage: timer.time_elapsed(stage) for stage in stages}
    return {"elapsed": elapsed, "ended": [stage for stage in stages if timer.end_time(stage) is not None]}


def load_timer(timer: Timer, state: TimerState) -> None:
    """Continue the time from a result of `timer_state`, without the time since this process began to train."""
    now = time.monotonic()
    for name, elapsed in state["elapsed"].items():
        stage = RunningStage(name)
        if stage == RunningStage.TRAINING:
            # The time before it is in the Timer's own state, which Lightning has restored.
            if timer._start_time[stage] is not None:  # a finished fit does not start again
                timer._start_time[stage] = now
        else:
            timer._start_time[stage] = now - elapsed
            timer._end_time[stage] = now if name in state["ended"] else None


class StageThroughput(TypedDict):
    """What a ThroughputMonitor keeps of a stage: the elapsed seconds, and the values in each window."""

    elapsed: float
    windows: dict[str, list[Any]]


def throughput_state(monitor: ThroughputMonitor) -> dict[str, StageThroughput]:
    """Return what a ThroughputMonitor has counted in each stage of a fit that has begun, and the elapsed time.

    The last value of each window is the count so far.
    """
    now = perf_counter()
    return {
        stage.value: {
            "elapsed": now - monitor._t0s[stage],
            "windows": {name: _as_plain(window) for name, window in _windows(monitor._throughputs[stage]).items()},
        }
        for stage in (RunningStage.TRAINING, RunningStage.VALIDATING)
        if stage in monitor._t0s and stage in monitor._throughputs
    }


def load_throughput(monitor: ThroughputMonitor, state: Mapping[str, StageThroughput]) -> list[str]:
    """Let it continue from a result of `throughput_state`; return the stages that it does not watch.

    Its windows refuse a time or a count that is not above the previous one, so these and the counters continue
    together.
    """
    now = perf_counter()
    # Lightning 2.5 has only the lengths, and takes the other two from the loops.
    counters = {"lengths": monitor._lengths}
    counters |= {"batches": monitor._batches, "samples": monitor._samples} if hasattr(monitor, "_batches") else {}
    watched = [name for name in state if RunningStage(name) in monitor._throughputs]
    for name in watched:
        stage, saved = RunningStage(name), state[name]["windows"]
        monitor._t0s[stage] = now - state[name]["elapsed"]
        for kind, counts in counters.items():
            counts[stage] = saved[kind][-1] if saved[kind] else 0
        for kind, window in _windows(monitor._throughputs[stage]).items():
            window.clear()
            for value in saved[kind]:  # one by one: a window that is shorter now keeps the last values
                window.append(value)
    return sorted(state.keys() - set(watched))


def _windows(throughput: Throughput) -> dict[str, Any]:
    return {
        "time": throughput._time,
        "batches": throughput._batches,
        "samples": throughput._samples,
        "lengths": throughput._lengths,
        "flops": throughput._flops,
    }


def _as_plain(window: Iterable[object]) -> list[object]:
    # A NumPy or torch number becomes a Python number: a checkpoint must load with weights_only=True.
    return [value.item() if hasattr(value, "item") else value for value in window]


RESULT_SEAMS = {
    "trainer.fit_loop.epoch_loop._results": "means and sums logged over an epoch",
    "trainer._logger_connector._first_loop_iter": "means logged over an epoch, right after a resume",
    "trainer._logger_connector._current_fx": "means logged over an epoch, right after a resume",
    "trainer._logger_connector._callback_metrics": "EarlyStopping and ModelCheckpoint, right after a resume",
    "trainer._logger_connector._logged_metrics": "trainer.logged_metrics, right after a resume",
    "trainer._logger_connector._progress_bar_metrics": "the progress bar, right after a resume",
}

_CONNECTOR = {"callback": "_callback_metrics", "logged": "_logged_metrics", "progress_bar": "_progress_bar_metrics"}


class LoggerConnectorState(TypedDict):
    """What the logger connector keeps between batches: its metrics by kind, and where it is in a batch."""

    metrics: dict[str, Any]
    first_loop_iter: bool | None
    current_fx: str | None


def logger_connector_state(trainer: Trainer) -> LoggerConnectorState:
    """Return what the logger connector keeps between batches."""
    connector = trainer._logger_connector
    metrics = {name: copied(getattr(connector, attribute)) for name, attribute in _CONNECTOR.items()}
    return {"metrics": metrics, "first_loop_iter": connector._first_loop_iter, "current_fx": connector._current_fx}


def load_logger_connector(trainer: Trainer, state: LoggerConnectorState) -> None:
    """Restore a result of `logger_connector_state`."""
    connector = trainer._logger_connector
    for name, attribute in _CONNECTOR.items():
        setattr(connector, attribute, copied(state["metrics"][name]))
    connector._first_loop_iter = state["first_loop_iter"]
    connector._current_fx = state["current_fx"]


def copied(values: object) -> object:
    """Return a copy of logged values: tensors, plain values, and mappings and lists of these."""
    return with_tensors(values, plain_copy)


def result_collections(trainer: Trainer) -> dict[str, _ResultCollection]:
    """Return the collections of logged values of training and validation, or of the evaluation that runs."""
    function = function_of(trainer)
    if function == "predict":
        return {}
    if function != FIT:
        return {"validation": loop_of(trainer)._results}
    epoch_loop = trainer.fit_loop.epoch_loop
    return {"train": epoch_loop._results, "validation": epoch_loop.val_loop._results}


def metadata_state(item: _ResultMetric) -> dict[str, object]:
    """Return the arguments that a value was logged with, as plain values."""
    fields = (f.name for f in dataclasses.fields(item.meta) if f.name not in ("reduce_fx", "_sync"))
    sync = item.meta.sync
    return {
        "fields": {name: getattr(item.meta, name) for name in fields},
        "reduce_fx": item.meta.reduce_fx.__name__,
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only, "adopts": _adopts(item.meta)},
        "is_tensor": item.is_tensor,
    }


class _AdoptingMetadata(_Metadata):
    """Arguments of a value that a different number of ranks logged: the way to sync it comes from its next ``log``.

    Lightning does not record whether a single rank's value was to be synced, and treats a difference as an error.
    """

    def __ne__(self, other: object) -> bool:
        if not isinstance(other, _Metadata):
            return True
        self.sync = other.sync
        self.has_adopted = True
        fields = (f.name for f in dataclasses.fields(_Metadata))
        return any(getattr(self, name) != getattr(other, name) for name in fields)

    __eq__ = _Metadata.__eq__
    __hash__ = None  # type: ignore[assignment]  # as for a dataclass that can be changed


def _adopts(meta: _Metadata) -> bool:
    return isinstance(meta, _AdoptingMetadata) and not getattr(meta, "has_adopted", False)


def make_result(trainer: Trainer, state: Mapping[str, Any]) -> _ResultMetric:
    """Return a logged value with the arguments of `metadata_state`, and no value yet."""
    kind = _AdoptingMetadata if state["sync"].get("adopts") else _Metadata
    meta = kind(**state["fields"], reduce_fx=getattr(torch, state["reduce_fx"]))
    sync = state["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"])
    return _ResultMetric(meta, state["is_tensor"])


def reset_to_kind_of(item: _ResultMetric, name: str, value: torch.Tensor) -> None:
    """Let a reset give the data type of `value`: it may have been logged while another default was set."""
    default = item._defaults[name]
    if isinstance(default, torch.Tensor) and default.dtype != value.dtype:
        item._defaults[name] = default.to(value.dtype)


class ResultCache(TypedDict):
    """What a logged value keeps besides its sums: the last step's value, and how it was reset."""

    forward: torch.Tensor | None
    has_reset: bool
    update_count: int


def result_cache(item: _ResultMetric) -> ResultCache:
    """Return what a logged value keeps besides its sums: the last step's value, and how it was reset."""
    cache = item._forward_cache
    return {
        "forward": plain_copy(cache) if isinstance(cache, torch.Tensor) else None,
        "has_reset": item.has_reset,
        "update_count": item.update_count,
    }


def load_result_cache(item: _ResultMetric, state: ResultCache) -> None:
    """Restore a result of `result_cache`."""
    item._forward_cache = state["forward"]
    item.has_reset = state["has_reset"]
    item._update_count = state["update_count"]
    item._computed = None
