"""What a branch changes on purpose: settings that a resume would refuse, or restore as they were.

A checkpoint holds the learning rate and the other settings of optimizers and schedulers, and Lightning restores them.
On a branch, those that the script has changed get their new values. Each autosave holds the settings with which the
optimizers and schedulers were created, so what the script has changed is told from what training has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import lr_scheduler

from lightning_faulttolerant.errors import BranchError
from lightning_faulttolerant.trainer.ranks.deepspeed import unwrapped, users_optimizers

_RATE, _BASE = "lr", "initial_lr"
_BASES, _LAST, _ETA_MIN = "base_lrs", "_last_lr", "eta_min"
_CHILDREN = "_schedulers"
_PARAMS = ("params", "param_names")
# How far a scheduler is, and what follows from the optimizer's settings.
_PROGRESS = frozenset({
    "last_epoch", "_step_count", _LAST, _BASES, "best", "num_bad_epochs", "cooldown_counter", "mode_worse", "verbose",
    "_get_lr_called_within_step", "_is_initial", "T_cur", "T_i",
})  # fmt: skip
# Each of these multiplies the present rate, or computes it from the first one: with another first rate, all rates are
# in the same proportion.
_IN_PROPORTION = (
    lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ExponentialLR, lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR, lr_scheduler.ConstantLR, lr_scheduler.LinearLR, lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR, lr_scheduler.ReduceLROnPlateau,
)  # fmt: skip
# The arguments that count from the next step on.
_ARGUMENTS: Mapping[type, frozenset[str]] = {
    lr_scheduler.StepLR: frozenset({"step_size", "gamma"}),
    lr_scheduler.MultiStepLR: frozenset({"milestones", "gamma"}),
    lr_scheduler.ExponentialLR: frozenset({"gamma"}),
    lr_scheduler.CosineAnnealingLR: frozenset({"T_max"}),
    lr_scheduler.ReduceLROnPlateau: frozenset(
        {"factor", "patience", "threshold", "cooldown", "min_lrs", "eps", "default_min_lr"}
    ),
}

Settings = dict[str, Any]


@final
class ChangedSettings:
    """The settings of optimizers and schedulers of this start, applied over those of a checkpoint.

    Args:
        trainer: The trainer that runs the fit. Its optimizers and schedulers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._window = trainer.accumulate_grad_batches
        optimizers = users_optimizers(trainer)
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
        self._arguments = [dict(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
        self._created = {
            "optimizers": [
                {"class": _name(optimizer), "groups": [_of_group(group) for group in optimizer.param_groups]}
                for optimizer in optimizers
            ],
            "schedulers": [_of_scheduler(config.scheduler) for config in trainer.lr_scheduler_configs],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the settings with which optimizers and schedulers were created, for branches of this run."""
        return self._created

    def apply(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Set what has changed. Call it when the checkpoint is loaded.

        Args:
            saved: A result of `state_dict`, from the checkpoint; ``None`` if it has none.

        Returns:
            A line for each setting that has changed.

        Raises:
            BranchError: If a changed setting can't take effect.
        """
        self.apply_window()
        if saved is None:
            return ["optimizers and schedulers: as they were saved. The autosave does not say how they were created"]
        for kind in ("optimizers", "schedulers"):
            then, now = ([one["class"] for one in each[kind]] for each in (saved, self._created))
            if then != now:
                raise BranchError(
                    f"A branch must have the {kind} of its parent: {', '.join(then) or 'none'} when it was saved, "
                    f"{', '.join(now) or 'none'} now. Their state can't be used by others."
                )
        lines: list[str] = []
        for number, optimizer in enumerate(users_optimizers(self._trainer)):
            lines += self._apply_to_optimizer(number, optimizer, saved["optimizers"][number]["groups"])
        for number, config in enumerate(self._trainer.lr_scheduler_configs):
            lines += self._apply_to_scheduler(number, config.scheduler, saved["schedulers"][number])
        return lines

    def apply_window(self) -> None:
        """Set how many batches' gradients are accumulated."""
        self._trainer.accumulate_grad_batches = self._window

    def _apply_to_optimizer(self, number: int, optimizer: Any, saved: Sequence[Mapping[str, object]]) -> Iterator[str]:
        created = self._created["optimizers"][number]["groups"]
        if len(saved) != len(created):
            raise BranchError(
                f"A branch must have the parameter groups of its parent: {len(saved)} when it was saved, "
                f"{len(created)} now."
            )
        for index, (then, now) in enumerate(zip(saved, created, strict=True)):
            place = f"optimizers.{number}" if len(created) == 1 else f"optimizers.{number}.groups.{index}"
            group = optimizer.param_groups[index]
            for name in dict.fromkeys((*then, *now)):
                before, after = then.get(name), now.get(name)
                if before == after:
                    continue
                if name == _RATE:
                    self._set_rate(optimizer, group, before, after)
                elif _plain(group.get(name)) == before and name in self._groups[number][index]:
                    group[name] = self._groups[number][index][name]
                else:
                    raise BranchError(
                        f"{place}.{name} was created as {before!r}, and is {after!r} now. It can't take effect on a "
                        f"branch, because training or a scheduler has set it to {_plain(group.get(name))!r}."
                    )
                yield f"{place}.{name}: {before!r} when it was saved, {after!r} now"

    def _set_rate(self, optimizer: Any, group: dict[str, object], before: Any, after: object) -> None:
        """Give a group another learning rate, at the same place of its schedule."""
        schedulers = [
            config.scheduler
            for config in self._trainer.lr_scheduler_configs
            if _optimizer_of(config.scheduler) is optimizer
        ]
        for scheduler in schedulers:
            if type(scheduler) not in _IN_PROPORTION or vars(scheduler).get(_ETA_MIN):
                raise BranchError(
                    f"The learning rate was {before!r}, and is {after!r} now. It can't be changed on a branch under "
                    f"{_name(scheduler)}: the rates of its schedule are not in proportion to it."
                )
        if not before:
            raise BranchError(f"The learning rate was {before!r}, and is {after!r} now: there is no proportion.")
        is_first = not schedulers and _plain(group[_RATE]) == before
        group[_RATE] = after if is_first else group[_RATE] * (after / before)
        if _BASE in group:
            group[_BASE] = after
        for scheduler in schedulers:
            groups = optimizer.param_groups
            if hasattr(scheduler, _BASES):
                vars(scheduler)[_BASES] = [one.get(_BASE, one[_RATE]) for one in groups]
            if hasattr(scheduler, _LAST):
                vars(scheduler)[_LAST] = [one[_RATE] for one in groups]

    def _apply_to_scheduler(self, number: int, scheduler: object, saved: Mapping[str, Any]) -> Iterator[str]:
        created = self._created["schedulers"][number]
        if saved.get(_CHILDREN) != created.get(_CHILDREN):
            raise BranchError(
                f"The schedulers inside {_name(scheduler)} have other arguments now. They have no effect on a branch."
            )
        then, now = saved["arguments"], created["arguments"]
        for name in dict.fromkeys((*then, *now)):
            before, after = then.get(name), now.get(name)
            if before == after:
                continue
            text = f"{_name(scheduler)}.{name}: {before!r} when it was saved, {after!r} now"
            may_be_set = name in _ARGUMENTS.get(type(scheduler), ())
            if may_be_set and _plain(getattr(scheduler, name)) == before:
                setattr(scheduler, name, self._arguments[number][name])
                yield text
            elif type(scheduler).__module__.startswith("torch."):
                raise BranchError(f"{text}. It can't take effect on a branch: keep it as it was.")
            else:  # it may be how far a user's own scheduler is
                yield f"{text}, without effect: the scheduler is restored as it was saved"


def _optimizer_of(scheduler: object) -> object:
    optimizer = getattr(scheduler, "optimizer", None)
    return None if optimizer is None else unwrapped(optimizer)


def _of_group(group: Mapping[str, object]) -> Settings:
    """Return the settings of a group. If a scheduler has set the rate already, the rate is the one before that."""
    found = {name: _plain(value) for name, value in group.items() if name not in (*_PARAMS, _BASE)}
    return {**found, _RATE: _plain(group.get(_BASE, group.get(_RATE)))}


def _of_scheduler(scheduler: object) -> Settings:
    held = {name: value for name, value in vars(scheduler).items() if name not in (*_PROGRESS, _CHILDREN)}
    arguments = {name: plain for name, value in held.items() if (plain := _plain(value)) is not None}
    children = {_CHILDREN: list(map(_of_scheduler, vars(scheduler).get(_CHILDREN, [])))}
    return {"class": _name(scheduler), "arguments": arguments, **(children if children[_CHILDREN] else {})}


def _name(value: object) -> str:
    return type(value).__qualname__


def _plain(value: object) -> object:
    """Return a setting as numbers, strings, and lists of these, or ``None`` for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if isinstance(value, Mapping):  # the milestones of MultiStepLR, the phases of OneCycleLR
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    return None
