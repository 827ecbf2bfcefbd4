"""A capture: the state of one instant, which can still be saved when the run is a little further on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.checkpoint.schema import Instead
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.state.tensors import TensorMarks, buffers_state, extra_state, shard_of
from lightning_faulttolerant.trainer.adapters.state import averaged_tensors
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.sharded import reshard
from lightning_faulttolerant.trainer.resume.parameters import copied_groups, held_by_groups
from lightning_faulttolerant.trainer.save.lightnings import lightnings, weights_in
from lightning_faulttolerant.trainer.save.run_state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The state of one instant. It can be saved later, as long as no parameter has moved.

    Args:
        position: Where it was taken.
        state: The state of this rank.
        instead: The parts that replace those of a later dump of Lightning's.
        held: The parameters of each group of each optimizer.
        marks: The tensors that it does not copy.
        taken_at: When it was taken.
    """

    position: TrainerPosition
    state: Mapping[str, Any]
    instead: Instead
    held: list[list[list[int]]]
    marks: TensorMarks
    taken_at: float

    def is_current(self, trainer: Trainer) -> bool:
        """Return whether parameters and optimizer states are still those of the capture."""
        if self.held != held_by_groups(trainer):
            return False  # a parameter was unfrozen
        return self.marks.unmoved(moving_tensors(trainer))


def take_capture(run: RunState, position: TrainerPosition) -> Capture:
    """Return the state of this instant that a later dump by Lightning would no longer have."""
    trainer = run.trainer
    parts = [part for part in lightnings(trainer, run.schedulers) if part.is_captured]
    held = {id(one): one for one in (trainer, trainer.lightning_module)}  # a callback may return its `log`
    instead: Any = {part.name: copy.deepcopy(part.read(), {**held}) for part in parts}
    instead["param_groups"] = [copied_groups(optimizer) for optimizer in trainer.optimizers]
    instead["buffers"] = buffers_state(trainer.lightning_module)
    instead["extra"] = extra_state(trainer.lightning_module)
    return Capture(
        position=position,
        state=run.state_dict(position),
        instead=instead,
        held=held_by_groups(trainer),
        marks=TensorMarks(moving_tensors(trainer)),
        taken_at=perf_counter(),
    )


def put_instead(checkpoint: dict[str, Any], instead: Instead, position: TrainerPosition, trainer: Trainer) -> None:
    """Replace parts of a later dump of Lightning's by those of a capture, `Capture.instead`."""
    checkpoint["epoch"], checkpoint["global_step"] = position.epoch, position.global_step
    for part in lightnings(trainer):
        if part.is_captured:
            part.put(checkpoint, instead)
    weights = weights_in(checkpoint)
    whole = {name: value for name, value in weights.items() if shard_of(value) is value}
    weights.update({name: buffer for name, buffer in instead["buffers"].items() if name in whole})
    if weights:  # if a strategy gathers them, only rank 0 has them
        for name in extra_state(trainer.lightning_module).keys() - instead["extra"].keys():
            weights.pop(name, None)  # a metric that was created since
        weights.update(instead["extra"])
    states = [state for state in checkpoint.get("optimizer_states", ()) if state]
    for state, groups in zip(states, instead["param_groups"], strict=bool(states)):
        pairs = zip(state["param_groups"], groups, strict=True)
        state["param_groups"] = [{**group, **kept} for group, kept in pairs]


def moving_tensors(trainer: Trainer) -> list[Tensor]:
    """Return the tensors that a capture does not copy: parameters, optimizer states, averaged weights."""
    reshard(trainer)
    tensors = [*trainer.lightning_module.parameters(), *averaged_tensors(trainer)]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors
