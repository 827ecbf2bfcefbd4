"""State that Lightning's callbacks keep and don't save: one small adapter each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from torch import Tensor

from lightning_faulttolerant.state.metrics import load_metrics, metrics_of, metrics_state
from lightning_faulttolerant.state.tensors import buffers_state, load_buffers
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.callbacks import Pruning
from lightning_faulttolerant.trainer.adapters.compat import (
    WEIGHT_AVERAGING,
    averaged_models,
    averaging_state,
    load_averaging,
    load_throughput,
    load_timer,
    removes_masks,
    swap_scheduler_again,
    throughput_state,
    timer_state,
)


class Adapter(Protocol):
    """Reads and restores what one kind of callback keeps besides its ``state_dict``."""

    def state_dict(self, trainer: Trainer, callback: Any) -> dict[str, Any]:
        """Return a copy of the state as plain values."""

    def load_state_dict(self, trainer: Trainer, callback: Any, state: Mapping[str, Any]) -> list[str] | None:
        """Restore the state, in the middle of an epoch or after the end of the fit; return parts without a target."""


class _LearningRates:
    """LearningRateMonitor's history, which each start creates."""

    def state_dict(self, trainer: Trainer, callback: LearningRateMonitor) -> dict[str, Any]:
        return {
            "lrs": {name: _packed(values) for name, values in callback.lrs.items()},
            "momentum": dict(callback.last_momentum_values),
            "weight_decay": dict(callback.last_weight_decay_values),
        }

    def load_state_dict(self, trainer: Trainer, callback: LearningRateMonitor, state: Mapping[str, Any]) -> None:
        callback.lrs = {name: _unpacked(values) for name, values in state["lrs"].items()}
        callback.last_momentum_values = dict(state["momentum"])
        callback.last_weight_decay_values = dict(state["weight_decay"])


class _Times:
    """Timer, and with it ``Trainer(max_time=...)``.

    Its own state has the time, but the time that a resume takes after ``on_train_start`` would count too.
    """

    def state_dict(self, trainer: Trainer, callback: Timer) -> dict[str, Any]:
        return timer_state(callback)

    def load_state_dict(self, trainer: Trainer, callback: Timer, state: Mapping[str, Any]) -> None:
        load_timer(callback, state)


class _Throughputs:
    """ThroughputMonitor: its counters, time, and windows are new at each start.

    They continue together, without the time between two processes, so its rates remain those of training.
    """

    def state_dict(self, trainer: Trainer, callback: ThroughputMonitor) -> dict[str, Any]:
        stages = throughput_state(callback)  # empty on all ranks except rank 0: only rank 0 counts
        return {"stages": stages, "counts_lengths": callback.length_fn is not None} if stages else {}

    def load_state_dict(self, trainer: Trainer, callback: ThroughputMonitor, state: Mapping[str, Any]) -> list[str]:
        if state["counts_lengths"] != (callback.length_fn is not None):
            return ["lengths"]  # it needs as many lengths as samples: none of its state can continue
        return load_throughput(callback, state["stages"])


class _Averaging:
    """StochasticWeightAveraging: its work at the start of an epoch, which a resume inside the epoch skips.

    It replaces the scheduler with its own, and turns the epoch after the last into one that trains nothing and only
    updates batch norm. The callback repeats both in its own hook; state that this changes is restored.
    """

    def state_dict(self, trainer: Trainer, callback: StochasticWeightAveraging) -> dict[str, Any]:
        return averaging_state(trainer, callback)

    def load_state_dict(self, trainer: Trainer, callback: StochasticWeightAveraging, state: Mapping[str, Any]) -> None:
        module, [optimizer] = trainer.lightning_module, trainer.optimizers
        buffers, groups = buffers_state(module), [dict(group) for group in optimizer.param_groups]
        if state["initialized"]:
            swap_scheduler_again(trainer, callback)
        if state["updates_batch_norm"]:
            callback.on_train_epoch_start(trainer, module)
        for group, restored in zip(optimizer.param_groups, groups, strict=True):
            group.update(restored)
        load_buffers(module, buffers)
        load_averaging(trainer, callback, state)


class _Metrics:
    """Metrics in attributes of any callback, or in lists and dicts there: they continue like those of the module."""

    def state_dict(self, trainer: Trainer, callback: Callback) -> dict[str, Any]:
        return {name: metrics_state(metric) for name, metric in metrics_of(callback).items()}

    def load_state_dict(self, trainer: Trainer, callback: Callback, state: Mapping[str, Any]) -> list[str]:
        held = metrics_of(callback)
        missing = sorted(state.keys() - held.keys())
        for name in state.keys() & held.keys():
            missing += [f"{name}.{value}" for value in load_metrics(held[name], state[name])]
        return missing


_ADAPTERS: list[tuple[type[Callback], Adapter]] = [
    (Callback, _Metrics()),
    (Timer, _Times()),
    (LearningRateMonitor, _LearningRates()),
    (ThroughputMonitor, _Throughputs()),
    (StochasticWeightAveraging, _Averaging()),
    (ModelPruning, Pruning()),
]


def callbacks_state(trainer: Trainer, callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return a copy of what `callbacks` keep and don't save, by their names and the kinds of callback they are."""
    found = {
        name: {kind.__name__: adapter.state_dict(trainer, callback) for kind, adapter in _adapters(callback)}
        for name, callback in callbacks.items()
    }
    kept = {name: {kind: state for kind, state in states.items() if state} for name, states in found.items()}
    return {name: states for name, states in kept.items() if states}


def load_callbacks(trainer: Trainer, callbacks: Mapping[str, Callback], state: Mapping[str, Any]) -> list[str]:
    """Restore that state; return the names of parts that have no target."""
    missing = sorted(state.keys() - callbacks.keys())
    for name, callback in callbacks.items():
        for kind, adapter in _adapters(callback):
            if kind.__name__ in state.get(name, {}):
                lost = adapter.load_state_dict(trainer, callback, state[name][kind.__name__])
                missing += [f"{name}.{what}" for what in lost or ()]
    return missing


def _adapters(callback: Callback) -> list[tuple[type[Callback], Adapter]]:
    return [(kind, adapter) for kind, adapter in _ADAPTERS if isinstance(callback, kind)]


def averaged_tensors(trainer: Trainer) -> list[Tensor]:
    """Return the tensors that callbacks write into a checkpoint as they are at the time of the write."""
    models = averaged_models(trainer)
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def why_ended(trainer: Trainer) -> str | None:
    """Return what a callback does at the end of a fit if the fit can't be trained further then; else ``None``."""
    kinds: tuple[type[Any], ...] = (StochasticWeightAveraging, *WEIGHT_AVERAGING)
    for callback in compat.callbacks(trainer):
        if isinstance(callback, kinds):
            return "ended with averaged weights in place of the trained ones"
        if isinstance(callback, ModelPruning) and removes_masks(callback):
            return "ended with the masks of its pruned weights removed"
    return None


def swaps_in_its_own_way(trainer: Trainer) -> bool:
    """Return whether a subclass of WeightAveraging may swap the weights for a validation run in another way."""
    hooks = ("on_validation_epoch_start", "on_validation_epoch_end")
    pairs = [(kind, type(callback)) for kind, callback in _swapping(trainer)]
    return any(getattr(own, hook) is not getattr(kind, hook) for kind, own in pairs for hook in hooks)


def swap_for_validation(trainer: Trainer) -> None:
    """Swap the weights as WeightAveraging does at the start of a validation run."""
    for kind, callback in _swapping(trainer):
        kind.on_validation_epoch_start(callback, trainer, trainer.lightning_module)


@contextmanager
def swap_of_validation_undone(trainer: Trainer) -> Iterator[None]:
    """Within the block, undo the swap of weights that WeightAveraging makes for a validation run."""
    for kind, callback in _swapping(trainer):
        kind.on_validation_epoch_end(callback, trainer, trainer.lightning_module)
    try:
        yield
    finally:
        swap_for_validation(trainer)


def _swapping(trainer: Trainer) -> list[tuple[type[Any], Any]]:
    # Lightning's own methods are called, not a subclass's: they swap, and do nothing else.
    return [(k, c) for k in WEIGHT_AVERAGING for c in compat.callbacks(trainer) if isinstance(c, k)]


def _packed(values: list[Any]) -> Any:
    # A value for each step of a long run: a tensor takes an eighth of the size, and is read and written in no time.
    is_plain = all(type(value) is float for value in values)
    return torch.tensor(values, dtype=torch.float64) if is_plain else list(values)


def _unpacked(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
