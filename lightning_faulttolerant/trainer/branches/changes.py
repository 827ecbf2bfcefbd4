"""What a branch changes on purpose: settings that a resume would refuse, or restore as they were.

A checkpoint holds the learning rate and the other settings of optimizers and schedulers, and Lightning restores them.
On a branch, those that the script has changed keep their new values.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, final

from lightning.pytorch import Trainer

_LR, _BASE = "lr", "initial_lr"
_NOT_SETTINGS = ("self", "optimizer", "last_epoch", "verbose", "args", "kwargs")
_PARAMS = "params"
_LAST = "_last_lr"

Settings = dict[str, Any]


@final
class ChangedSettings:
    """The settings of optimizers and schedulers of this start, applied over those of a checkpoint.

    Args:
        trainer: The trainer that runs the fit. Its optimizers and schedulers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._defaults = [dict(optimizer.defaults) for optimizer in trainer.optimizers]
        self._schedulers = [_arguments(config.scheduler) for config in trainer.lr_scheduler_configs]
        self._window = trainer.accumulate_grad_batches

    def apply(self, saved: Mapping[str, Any]) -> list[str]:
        """Set what has changed. Call it when the checkpoint is loaded.

        Args:
            saved: The optimizers' fingerprints in the checkpoint, by number.

        Returns:
            A line for each setting of a scheduler that has changed, and for each that could not be set.
        """
        self.apply_window()
        ratios: dict[int, float] = {}
        lines: list[str] = []
        for number, optimizer in enumerate(self._trainer.optimizers):
            before = saved.get(str(number), {})
            for index, (group, now) in enumerate(zip(optimizer.param_groups, self._groups[number], strict=False)):
                for name, value in now.items():
                    then = group.get(_BASE, before.get(name)) if name == _LR else before.get(name)
                    if name not in before or value == self._defaults[number][name] == before[name]:
                        continue  # unknown then, or the same now
                    if _same(value, then):
                        continue
                    if name == _LR:
                        ratios[id(optimizer)] = _set_rate(group, value, then)
                    elif _same(group.get(name), then):
                        group[name] = value
                    else:
                        kept = f"{name} stays {group.get(name)!r}, as training had set it"
                        lines.append(f"optimizer {number}, group {index}: {kept}")
        return [*lines, *self._apply_to_schedulers(ratios)]

    def apply_window(self) -> None:
        """Set how many batches' gradients are accumulated."""
        self._trainer.accumulate_grad_batches = self._window

    def _apply_to_schedulers(self, ratios: Mapping[int, float]) -> Iterator[str]:
        for config, now in zip(self._trainer.lr_scheduler_configs, self._schedulers, strict=False):
            scheduler: Any = config.scheduler
            ratio = ratios.get(id(getattr(scheduler, "optimizer", None)), 1.0)
            if ratio != 1.0 and hasattr(scheduler, "base_lrs"):
                groups = scheduler.optimizer.param_groups
                scheduler.base_lrs = [group.get(_BASE, group[_LR]) for group in groups]
                vars(scheduler)[_LAST] = [group[_LR] for group in groups]
            for name, value in now.items():
                then = getattr(scheduler, name)
                if not _same(then, value):
                    setattr(scheduler, name, value)
                    yield f"{type(scheduler).__name__}.{name}: {then!r} when it was saved, {value!r} now"


def _settings(group: Mapping[str, Any]) -> Settings:
    return {name: value for name, value in group.items() if name not in (_PARAMS, _BASE)}


def _arguments(scheduler: Any) -> Settings:
    """Return the arguments of a scheduler that it keeps under their own names."""
    names = [name for name in inspect.signature(type(scheduler).__init__).parameters if name not in _NOT_SETTINGS]
    held = vars(scheduler)
    kinds = (bool, int, float, str, tuple, list)
    return {name: held[name] for name in names if isinstance(held.get(name), (*kinds, dict))}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other)


def _set_rate(group: dict[str, Any], now: float, then: float) -> float:
    """Give a group another learning rate, at the same place of its schedule. Return new by old."""
    current = group[_LR]
    ratio = now / then if then else 1.0
    group[_LR] = now if not then or current == then else current * ratio
    if _BASE in group:
        group[_BASE] = now
    return ratio if ratio != 1.0 else 0.0
