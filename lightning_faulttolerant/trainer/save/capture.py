"""The state of a run that Lightning does not save: taken at one instant, and restored in the order that keeps it exact.

Random generators are read first and restored last: everything in between may draw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.metrics import load_metrics, metrics_state
from lightning_faulttolerant.state.objects.modules import users_variables
from lightning_faulttolerant.state.objects.object_state import LOST
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.state.tensors import (
    TensorMarks,
    buffers_state,
    extra_state,
    flags_state,
    gradients_state,
    kinds_of_buffers,
    load_buffers,
    load_flags,
    load_gradients,
    make_room,
)
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.pruning import load_shown, shown_state
from lightning_faulttolerant.trainer.adapters.state import averaged_tensors, callbacks_state, load_callbacks
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.logged.results import load_results, results_state
from lightning_faulttolerant.trainer.objects.objects import Objects
from lightning_faulttolerant.trainer.position import (
    EPOCH_END,
    EPOCH_START,
    EVALUATED,
    FINISHED,
    IN_EVALUATION,
    IN_VALIDATION,
    TrainerPosition,
)
from lightning_faulttolerant.trainer.process import OBJECTS, Registered
from lightning_faulttolerant.trainer.ranks.compat import saves_shards
from lightning_faulttolerant.trainer.ranks.sharded import reshard
from lightning_faulttolerant.trainer.resume.param_groups import held_by_groups
from lightning_faulttolerant.trainer.resume.report import OBJECTS as OBJECT_STATE
from lightning_faulttolerant.trainer.resume.report import ORDER
from lightning_faulttolerant.trainer.save.kept_gradients import keeps_gradients
from lightning_faulttolerant.trainer.settings.environment import is_manual
from lightning_faulttolerant.trainer.settings.options import Options

# Each part with its name in reports. If a checkpoint lacks a part, the run that wrote it left the part out.
PARTS = {
    "rng": "random generators",
    "held": "generators held by objects",
    "loaders": ORDER,
    "gradients": "gradients of an open accumulation window",
    "buffers": "buffers outside the state_dict",
    "metrics": "metrics",
    "results": "logged values",
    "flags": "training and frozen flags",
    "callbacks": "what callbacks keep and do not save",
    "trainer": "trainer attributes",
    OBJECTS: OBJECT_STATE,
}

VALIDATION_RUN = "validation"
"""What a checkpoint from inside a validation run has besides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The state of one instant. It can be saved later, as long as no parameter has moved."""

    position: TrainerPosition
    state: Mapping[str, Any]
    loops: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    schedulers: list[Any]
    param_groups: list[Any]
    held: list[list[list[int]]]
    precision: Mapping[str, Any]
    buffers: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    marks: TensorMarks

    def instead(self) -> dict[str, Any]:
        """Return the parts that replace those of Lightning's checkpoint, as plain values and tensors."""
        names = ("loops", "callbacks", "schedulers", "param_groups", "precision", "buffers", "extra")
        return {name: getattr(self, name) for name in names}

    def is_current(self, trainer: Trainer) -> bool:
        """Return whether parameters and optimizer states are still those of the capture."""
        if self.held != held_by_groups(trainer):
            return False  # a parameter was unfrozen
        return self.marks.unmoved(moving_tensors(trainer))


class RunState:
    """Reads and restores the state of a run that Lightning's own checkpoint lacks.

    Args:
        trainer: The trainer of the run.
        loaders: The trainer's loaders.
        files: The files that the run has written besides its autosaves.
        registered: The functions given to `FaultTolerance.register`, by name.
        options: The callback's options.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        files: RunFiles,
        registered: Mapping[str, Registered],
        options: Options,
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self.validation = ValidationRun(trainer, loaders, may_be_resized=options.allows_other_ranks)
        self.files = files
        self.objects_not_restored: tuple[str, ...] = ()
        """After a resume, a line for each part of the object state that is not as it was."""
        callbacks = named_callbacks(compat.callbacks(trainer))
        self.objects = Objects(trainer, loaders, callbacks, registered, manual=is_manual())
        self._buffers = kinds_of_buffers(trainer.lightning_module)
        roots = {
            "module": trainer.lightning_module,
            "datamodule": compat.datamodule(trainer),
            "loaders": loaders.untracked,
            "callbacks": callbacks,
            "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        }
        self._held = HeldGenerators({**roots, **users_variables(roots)})

    def _refresh(self) -> None:
        """Find generators that objects have created since the last search."""
        self._held.refresh(whole=True)
        for tracker in self._loaders.trackers.values():
            tracker.held.refresh(whole=True)

    def state_dict(self, position: TrainerPosition) -> dict[str, Any]:
        """Return the state of this rank, each part under its name in `PARTS`."""
        trainer = self._trainer
        module = trainer.lightning_module
        self._refresh()
        rng = rng_state()
        is_validating = position.where == IN_VALIDATION  # a validation step may have computed gradients
        is_evaluating = position.where in IN_EVALUATION
        has_gradients = keeps_gradients(trainer) or compat.is_accumulating(trainer) or is_validating
        in_shards = saves_shards(trainer.strategy)
        if has_gradients:
            reshard(trainer)
        validated = self.validation.num_consumed() if is_validating or is_evaluating else {}
        loaders = self._loaders.state_dict(in_epoch=self._is_iterating(position), validated=validated)
        return {
            "rng": rng,
            "held": {"objects": self._held.state_dict(), "loaders": self._loaders.held_state()},
            "loaders": loaders,
            "gradients": gradients_state(module) if has_gradients else {},
            # If each rank has a buffer whole, the directory of a strategy that shards holds the copy of any one rank.
            "buffers": buffers_state(module, persistent=None if in_shards else False),
            "shown": shown_state(module),
            "metrics": metrics_state(module),
            "results": results_state(trainer),
            "flags": flags_state(module),
            "callbacks": callbacks_state(trainer, named_callbacks(compat.callbacks(trainer))),
            "trainer": _trainer_state(trainer),
            "objects": self.objects.state_dict(position.where, loaders["places"]),
            "files": self.files.state_dict(),
            "began": {"buffers": self._buffers},
            **({VALIDATION_RUN: self.validation.state_dict()} if is_validating or is_evaluating else {}),
        }

    def _is_iterating(self, position: TrainerPosition) -> bool:
        """Return whether the next batch comes from the iterators that the training loaders have here."""
        if position.where == EPOCH_START:
            return not compat.starts_over(self._trainer)
        return position.where not in (EPOCH_END, FINISHED, *IN_EVALUATION, *EVALUATED)

    def not_carried(self, taken: Mapping[str, Any] | None = None) -> frozenset[str]:
        """Return the paths of what training has changed or made that a checkpoint would lack.

        Args:
            taken: The `state_dict` of this instant, if it was taken just now.
        """
        objects = self.objects.state_dict(IN_VALIDATION, {}) if taken is None else taken[OBJECTS]
        return frozenset(objects.get(LOST, ())) | frozenset(self.objects.live)

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore everything but the loaders' positions, random generators last.

        Returns:
            A line for each thing that could not be restored.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        loads: dict[str, Callable[[Any], list[str] | None]] = {
            "callbacks": lambda part: load_callbacks(trainer, named_callbacks(compat.callbacks(trainer)), part),
            "trainer": lambda part: _load_trainer_state(trainer, part),
            "flags": lambda part: load_flags(module, part),
            "gradients": self._load_gradients,
            "buffers": lambda part: self._load_buffers(part, state.get("began", {}).get("buffers", {})),
            "shown": lambda part: load_shown(module, part),
            "metrics": lambda part: load_metrics(module, part),
            "results": lambda part: load_results(trainer, part),
            "files": lambda part: self.files.load_state_dict(part),
            "objects": self._load_objects,
            "held": self._load_held,
            "rng": lambda part: set_rng_state(part),
        }
        missing = []
        for name, load in loads.items():
            if name in state:
                missing += [f"{PARTS[name]}: nothing to restore {what!r} into" for what in load(state[name]) or ()]
        return missing

    def _load_gradients(self, state: Mapping[str, Any]) -> None:
        reshard(self._trainer)
        load_gradients(self._trainer.lightning_module, state)

    def _load_buffers(self, state: Mapping[str, Any], began: Mapping[str, str]) -> list[str]:
        module = self._trainer.lightning_module
        make_room(module, state, began=began, here=self._buffers)
        return load_buffers(module, state)

    def _load_objects(self, state: Mapping[str, Any]) -> None:
        self.objects_not_restored = tuple(self.objects.load_state_dict(state))

    def _load_held(self, state: Mapping[str, Any]) -> list[str]:
        return self._held.load_state_dict(state["objects"]) + self._loaders.load_held(state["loaders"])

    def capture(self, position: TrainerPosition) -> Capture:
        """Return the state of this instant that a later dump by Lightning would no longer have."""
        trainer = self._trainer
        states = {callback.state_key: callback.state_dict() for callback in compat.callbacks(trainer)}
        return Capture(
            position=position,
            state=self.state_dict(position),
            loops=copy.deepcopy(trainer.fit_loop.state_dict()),
            callbacks=copy.deepcopy({key: state for key, state in states.items() if state}),
            schedulers=[copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            param_groups=[_param_groups(optimizer) for optimizer in trainer.optimizers],
            held=held_by_groups(trainer),
            precision=copy.deepcopy(trainer.precision_plugin.state_dict()),
            buffers=buffers_state(trainer.lightning_module),
            extra=extra_state(trainer.lightning_module),
            marks=TensorMarks(moving_tensors(trainer)),
        )


def named_callbacks(callbacks: list[Callback]) -> dict[str, Callback]:
    """Return callbacks by class and number within the class: a callback of another class in front renames none."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        number = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{number}"] = callback
    return named


def moving_tensors(trainer: Trainer) -> list[Tensor]:
    """Return the tensors that a capture does not copy: parameters, optimizer states, averaged weights."""
    reshard(trainer)
    tensors: list[Tensor] = [*trainer.lightning_module.parameters(), *averaged_tensors(trainer)]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def _param_groups(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _trainer_state(trainer: Trainer) -> dict[str, Any]:
    return {
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "num_training_batches": trainer.num_training_batches,
        "val_check_batch": getattr(trainer, "val_check_batch", None),
        "validation_is_set_up": compat.validation_is_set_up(trainer),
        "reload_epochs": compat.reload_epochs(trainer),
        "seen_validation_batches": compat.seen_validation_batches(trainer),
        **{name: getattr(trainer.strategy.model, name) for name in _of_ddp(trainer)},
    }


def _load_trainer_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    if state["validation_is_set_up"]:
        compat.set_up_validation(trainer)
    compat.set_reload_epochs(trainer, state["reload_epochs"])
    compat.set_seen_validation_batches(trainer, state["seen_validation_batches"])
    for name in _of_ddp(trainer):
        if name in state:
            setattr(trainer.strategy.model, name, state[name])


def _of_ddp(trainer: Trainer) -> tuple[str, ...]:
    # The flag says whether the next forward takes rank 0's buffers. A new DDP does. After a forward that reduced no
    # gradients (validation, an open accumulation window, manual optimization) it doesn't: each rank keeps its own.
    is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    return ("require_forward_param_sync",) if is_ddp else ()
