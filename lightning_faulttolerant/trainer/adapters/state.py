"""State that Lightning's callbacks keep and don't save: one small adapter each, and the place in progress bars.

ModelCheckpoint forgets its best and last files if their directory has changed. ModelPruning does not save its masks and
first weights; a user's hook may prune, too. Lightning makes SpikeDetection save a state that it can't load again. A
progress bar shows the place of the run, and that it resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypedDict

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_faulttolerant.state.metrics import load_metrics, metrics_of, metrics_state
from lightning_faulttolerant.state.tensors import buffers_state, load_buffers
from lightning_faulttolerant.trainer.adapters.compat import (
    WEIGHT_AVERAGING,
    AveragingState,
    StageThroughput,
    TimerState,
    averaged_models,
    averaging_state,
    first_parameters,
    load_averaging,
    load_throughput,
    load_timer,
    pruned_parameters,
    removes_masks,
    swap_scheduler_again,
    throughput_state,
    timer_state,
)
from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.evaluation.compat import forget_loader_of_bar
from lightning_faulttolerant.trainer.position import VALIDATION_END, TrainerPosition, stage_of

_BEST = ("best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


def restore_best_models(trainer: Trainer, states: Mapping[str, Mapping[str, object]]) -> None:
    """Let each ModelCheckpoint know its best and last files again, even in another directory.

    The default logger takes a new version directory at each start. ModelCheckpoint drops what it knew if its
    ``dirpath`` has changed: it would take the first result after a resume for the best of all.

    Args:
        trainer: The trainer of the callbacks.
        states: The callbacks' states in the checkpoint, by state key.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state and state.get("dirpath") != callback.dirpath:
            for name in _BEST:
                if name in state:
                    setattr(callback, name, state[name])


@contextlib.contextmanager
def spikes_restored(trainer: Trainer) -> Iterator[None]:
    """Within the block, let each SpikeDetection load its saved state, on the device where it continues.

    Its ``load_state_dict`` looks for ``running``, but the name is ``running_mean``: every restore would fail.
    The values of that metric are not in this state; they continue with the callbacks' other metrics, after the block.
    """
    found = [callback for callback in callbacks(trainer) if isinstance(callback, SpikeDetection)]
    lacking = [callback for callback in found if not hasattr(callback, "running")]
    for callback in lacking:
        callback.running = callback.running_mean  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for callback in lacking:
            del callback.running  # type: ignore[attr-defined]
    for callback in found:  # it moves there itself only at the first batch of an epoch, which may be over
        callback.running_mean.to(trainer.strategy.root_device)


_MASK, _HIDDEN = "_mask", "_orig"  # torch's names for the tensors that replace a pruned parameter


class PrunedWeight(TypedDict):
    """A pruned weight: its mask, and the values under it."""

    mask: torch.Tensor
    hidden: torch.Tensor


class PruningState(TypedDict):
    """The state of a ModelPruning: its weights, and those from before the fit, by place among its parameters.

    The places in `shared` are those of weights that are still the ones from before the fit.
    """

    pruned: dict[str, PrunedWeight]
    first: dict[str, torch.Tensor]
    shared: list[int]


class Pruning:
    """The adapter for ModelPruning."""

    def state_dict(self, trainer: Trainer, callback: ModelPruning) -> PruningState:
        """Return the masks, the weights under them, and the weights from before the fit."""
        first = first_parameters(callback)
        pruned: dict[str, PrunedWeight] = {}
        shared = []
        for number, (module, name) in enumerate(pruned_parameters(callback)):
            weight = getattr(module, name + _HIDDEN, getattr(module, name))
            if number in first and first[number].data_ptr() == weight.data_ptr():
                shared.append(number)
            if hasattr(module, name + _MASK):
                pruned[str(number)] = {"mask": _copy(getattr(module, name + _MASK)), "hidden": _copy(weight)}
        kept = {str(number): _copy(weight) for number, weight in first.items() if number not in shared}
        return {"pruned": pruned, "first": kept, "shared": shared}

    def load_state_dict(self, trainer: Trainer, callback: ModelPruning, state: PruningState) -> None:
        """Prune the same weights with the same masks; the optimizers keep their parameters."""
        parameters, first = pruned_parameters(callback), first_parameters(callback)
        for place, values in state["pruned"].items():
            module, name = parameters[int(place)]
            mask = values["mask"].to(getattr(module, name).device)
            torch.nn.utils.prune.custom_from_mask(module, name, mask)  # type: ignore[no-untyped-call]
            getattr(module, name + _HIDDEN).data.copy_(values["hidden"])
        for number, weight in first.items():
            module, name = parameters[number]
            if number in state["shared"]:
                # On the CPU, Lightning goes back without a copy: from then on the first weights are trained too.
                weight.data = getattr(module, name + _HIDDEN, getattr(module, name)).data
            else:
                weight.data.copy_(state["first"][str(number)])


def _of_callbacks(trainer: Trainer, kind: Callable[[ModelPruning], bool] = lambda one: True) -> set[tuple[int, str]]:
    """Return the modules and the names of the parameters that some ModelPruning prunes, of those of this kind."""
    pruning = (callback for callback in callbacks(trainer) if isinstance(callback, ModelPruning) and kind(callback))
    return {(id(module), name) for callback in pruning for module, name in pruned_parameters(callback)}


class OwnMasks:
    """The masks of weights that a user's hook pruned: the hook isn't called again. ModelPruning's masks are left out.

    Args:
        trainer: The trainer of the fit that continues.
        weights: The weights of the checkpoint.
    """

    def __init__(self, trainer: Trainer, weights: Mapping[str, Any]) -> None:
        modules = dict(trainer.lightning_module.named_modules())
        others = _of_callbacks(trainer)
        self._masks: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        for key in _pruned(weights):
            prefix, _, name = key.rpartition(".")
            module = modules.get(prefix)
            if module is not None and (id(module), name) not in others:
                self._masks.append((module, name, weights[key + _MASK]))

    def apply(self) -> None:
        """Prune with the masks, after the optimizers are loaded; these keep their parameters."""
        for module, name, mask in self._masks:
            if not hasattr(module, name + _MASK):
                torch.nn.utils.prune.custom_from_mask(module, name, mask.to(getattr(module, name).device))  # type: ignore[no-untyped-call]

    def load(self) -> None:
        """Restore the masks if a hook at the start has drawn others."""
        for module, name, mask in self._masks:
            if hasattr(module, name + _MASK):
                getattr(module, name + _MASK).copy_(mask)


def as_saved(trainer: Trainer, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights`, with pruned ones also under their own names: a ModelPruning may save masked values of them."""
    modules, masked = dict(trainer.lightning_module.named_modules()), _of_callbacks(trainer, removes_masks)
    found = {}
    for key in _pruned(weights):
        prefix, _, name = key.rpartition(".")
        is_masked = (id(modules.get(prefix)), name) in masked
        found[key] = weights[key + _HIDDEN] * weights[key + _MASK] if is_masked else weights[key + _HIDDEN]
    return {**weights, **found}


def without_masks(weights: Mapping[str, object], *, module: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return `weights` under the names that they have before any pruning.

    Args:
        weights: The weights by name.
        module: A module: parameters that are pruned there keep their names, also those that its ``state_dict`` gives.
    """
    pruned = _pruned(weights)
    if pruned and module is not None:
        pruned -= _pruned({**dict(module.named_buffers()), **dict(module.named_parameters()), **module.state_dict()})
    masks, hidden = {name + _MASK for name in pruned}, {name + _HIDDEN: name for name in pruned}
    return {hidden.get(name, name): value for name, value in weights.items() if name not in masks}


def _pruned(weights: Mapping[str, object]) -> set[str]:
    pruned = {name.removesuffix(_MASK) for name in weights if name.endswith(_MASK)}
    return {name for name in pruned if name + _HIDDEN in weights}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


class Adapter(Protocol):
    """Reads and restores what one kind of callback keeps besides its ``state_dict``."""

    def state_dict(self, trainer: Trainer, callback: Any) -> Mapping[str, object]:
        """Return a copy of the state as plain values."""

    def load_state_dict(self, trainer: Trainer, callback: Any, state: Any) -> list[str] | None:
        """Restore the state, in the middle of an epoch or after the end of the fit; return parts without a target."""


class _Rates(TypedDict):
    lrs: dict[str, object]
    momentum: dict[str, list[float] | None]
    weight_decay: dict[str, list[float] | None]


class _LearningRates:
    """LearningRateMonitor's history, which each start creates."""

    def state_dict(self, trainer: Trainer, callback: LearningRateMonitor) -> _Rates:
        return {
            "lrs": {name: _packed(values) for name, values in callback.lrs.items()},
            "momentum": dict(callback.last_momentum_values),
            "weight_decay": dict(callback.last_weight_decay_values),
        }

    def load_state_dict(self, trainer: Trainer, callback: LearningRateMonitor, state: _Rates) -> None:
        callback.lrs = {name: _unpacked(values) for name, values in state["lrs"].items()}
        callback.last_momentum_values = dict(state["momentum"])
        callback.last_weight_decay_values = dict(state["weight_decay"])


class _Times:
    """Timer, and with it ``Trainer(max_time=...)``.

    Its own state has the time, but the time that a resume takes after ``on_train_start`` would count too.
    """

    def state_dict(self, trainer: Trainer, callback: Timer) -> TimerState:
        return timer_state(callback)

    def load_state_dict(self, trainer: Trainer, callback: Timer, state: TimerState) -> None:
        load_timer(callback, state)


class _StagesThroughput(TypedDict, total=False):
    stages: dict[str, StageThroughput]
    counts_lengths: bool


class _Throughputs:
    """ThroughputMonitor: its counters, time, and windows are new at each start.

    They continue together, without the time between two processes, so its rates remain those of training.
    """

    def state_dict(self, trainer: Trainer, callback: ThroughputMonitor) -> _StagesThroughput:
        stages = throughput_state(callback)  # empty on all ranks except rank 0: only rank 0 counts
        return {"stages": stages, "counts_lengths": callback.length_fn is not None} if stages else {}

    def load_state_dict(self, trainer: Trainer, callback: ThroughputMonitor, state: _StagesThroughput) -> list[str]:
        if state["counts_lengths"] != (callback.length_fn is not None):
            return ["lengths"]  # it needs as many lengths as samples: none of its state can continue
        return load_throughput(callback, state["stages"])


class _Averaging:
    """StochasticWeightAveraging: its work at the start of an epoch, which a resume inside the epoch skips.

    It replaces the scheduler with its own, and turns the epoch after the last into one that trains nothing and only
    updates batch norm. The callback repeats both in its own hook; state that this changes is restored.
    """

    def state_dict(self, trainer: Trainer, callback: StochasticWeightAveraging) -> AveragingState:
        return averaging_state(trainer, callback)

    def load_state_dict(self, trainer: Trainer, callback: StochasticWeightAveraging, state: AveragingState) -> None:
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

    def state_dict(self, trainer: Trainer, callback: Callback) -> dict[str, object]:
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


def callbacks_state(trainer: Trainer, callbacks: Mapping[str, Callback]) -> dict[str, object]:
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


def averaged_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Return the tensors that callbacks write into a checkpoint as they are at the time of the write."""
    models = averaged_models(trainer)
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def why_ended(trainer: Trainer) -> str | None:
    """Return what a callback does at the end of a fit if the fit can't be trained further then; else ``None``."""
    kinds: tuple[type[object], ...] = (StochasticWeightAveraging, *WEIGHT_AVERAGING)
    for callback in callbacks(trainer):
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


@contextlib.contextmanager
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
    return [(k, c) for k in WEIGHT_AVERAGING for c in callbacks(trainer) if isinstance(c, k)]


def _packed(values: list[Any]) -> object:
    # A value for each step of a long run: a tensor takes an eighth of the size, and is read and written in no time.
    is_plain = all(type(value) is float for value in values)
    return torch.tensor(values, dtype=torch.float64) if is_plain else list(values)


def _unpacked(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def continue_bar_at(trainer: Trainer, position: TrainerPosition) -> None:
    """Start the trainer's bar in the middle of an epoch, at `position`.

    Lightning sets up a bar in ``on_train_epoch_start``, which is not called for an epoch that has already begun.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    batch = position.batch
    told = f"resumed at {batch}"
    if isinstance(bar, TQDMProgressBar):
        # Call the method of this class: a user's subclass already ran its own when the epoch began.
        TQDMProgressBar.on_train_epoch_start(bar, trainer, module)
        tqdm = bar.train_progress_bar
        tqdm.n = tqdm.initial = batch
        if position.where == VALIDATION_END:  # this process did not begin that run, but will close its bar
            bar.val_progress_bar = Tqdm(disable=True)
        tqdm.set_description(f"{tqdm.desc.removesuffix(': ')} ({told})")
    elif isinstance(bar, RichProgressBar):
        RichProgressBar.on_train_epoch_start(bar, trainer, module)
        if bar.progress is None or bar.train_progress_bar_id is None:
            return
        task = bar.train_progress_bar
        # Not `update`: it would count the earlier batches as this process's, and the speed would be wrong.
        bar.progress.reset(
            bar.train_progress_bar_id,
            total=task.total,
            completed=batch,
            description=f"{task.description.rstrip()} ({told})",
        )
        bar.refresh()


def begin_next_bar(trainer: Trainer) -> None:
    """Start the bar of the epoch after the resumed one at 0. Otherwise tqdm would show a negative first rate."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = 0


def begin_evaluation_bar(trainer: Trainer) -> None:
    """Start the bar of an evaluation that continues. Its hook at the start of the run is not called again."""
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    kind = next((kind for kind in (TQDMProgressBar, RichProgressBar) if isinstance(bar, kind)), None)
    if kind is not None:
        getattr(kind, f"on_{stage_of(trainer)}_start")(bar, trainer, module)
        forget_loader_of_bar(bar)
