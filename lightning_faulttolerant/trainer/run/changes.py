"""What may differ from start to start: hyperparameters, compared at a resume, and what a branch changes on purpose.

A name that contains the time must not stop an unattended run, so text may differ. A number is part of the arithmetic.

A checkpoint holds the learning rate and the other settings of optimizers and schedulers, and Lightning restores them.
On a branch, those that the script has changed get their new values. Each autosave holds the settings with which the
optimizers and schedulers were created, so what the script has changed is told from what training has changed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any, Final, final

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import lr_scheduler

from lightning_faulttolerant.errors import BranchError
from lightning_faulttolerant.trainer.process import IMPORTED_AT

_DAY = 24 * 60 * 60
_UNITS = (1, 10**3, 10**9)  # seconds, milliseconds, nanoseconds
_TIME = re.compile(r"(?<!\d)(?:[01]\d|2[0-3])[-:_.h]?[0-5]\d(?:[-:_.m]?[0-5]\d)?(?!\d)")
# In a container, process ids are small numbers, like batch sizes and numbers of layers.
_SMALLEST_PROCESS_ID = 1000
_MISSING = object()


@dataclass(frozen=True, slots=True)
class NamedDifference:
    """What differs between a checkpoint and this start.

    Args:
        name: Its name, with dots for nested ones: ``--accept`` takes it.
        text: In words, with both values.
    """

    name: str
    text: str

    @classmethod
    def of(cls, name: str, saved: str, now: str) -> NamedDifference:
        """Return the difference of two values."""
        return cls(name, f"{saved} when it was saved, {now} now")

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@final
class Hyperparameters:
    """The hyperparameters of a module, read when this object is created: a finder may set some later.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        own = {str(name): value for name, value in dict(module.hparams).items()}
        self._values = {name: plain(value) for name, value in own.items()}
        self._texts = set(_texts(own, ""))

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters as plain values."""
        return self._values

    def compare(self, saved: Mapping[str, object]) -> tuple[list[NamedDifference], list[NamedDifference]]:
        """Compare the hyperparameters with the saved ones.

        Args:
            saved: The return value of `state_dict`.

        Returns:
            Those that differ but must not, and the texts that differ.
        """
        refused: list[NamedDifference] = []
        reported: list[NamedDifference] = []
        for path, then, now in self._differences(saved, self._values, ""):
            is_text = isinstance(then, str) and path in self._texts
            shown = [repr("nothing" if value is _MISSING else value) for value in (then, now)]
            (reported if is_text else refused).append(NamedDifference.of(f"hyperparameters.{path}", *shown))
        return refused, reported

    def _differences(self, then: object, now: object, path: str) -> Iterator[tuple[str, object, object]]:
        if _is_equal(then, now):
            return
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            for name in sorted({*then, *now}):
                yield from self._differences(then.get(name, _MISSING), now.get(name, _MISSING), _joined(path, name))
        elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
            for number, (one, other) in enumerate(zip(then, now, strict=True)):
                yield from self._differences(one, other, _joined(path, number))
        else:
            yield path, then, now


def is_passing(value: object, *, now: float) -> bool:
    """Return whether a hyperparameter looks like the time of this process, or its id.

    Args:
        value: A plain value.
        now: The time, in seconds since 1970.
    """
    process_id = os.getpid()
    if isinstance(value, str):
        words = re.split(r"[^0-9A-Za-z]+", value)
        return _has_time(value, now) or (process_id >= _SMALLEST_PROCESS_ID and str(process_id) in words)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 10**30:
        return False
    if value == process_id and process_id >= _SMALLEST_PROCESS_ID:
        return True
    return any(abs(value / unit - now) < _DAY for unit in _UNITS)


def _has_time(text: str, now: float) -> bool:
    """Return whether a text holds a date of this process together with a time of day."""
    for date in _dates(now):
        for found in re.finditer(rf"(?<!\d){date}", text):
            if _TIME.search(f"{text[: found.start()]} {text[found.end() :]}"):
                return True
    return False


def _dates(now: float) -> Iterator[str]:
    """Yield patterns of the date when this process began and of the date now, in local time and in UTC."""
    zones = (None, timezone.utc)
    days = {datetime.fromtimestamp(moment, zone).date() for moment in (IMPORTED_AT, now) for zone in zones}
    for day in days:
        year, month, date = f"{day:%Y}", f"{day:%m}", f"{day:%d}"
        for separator in ("-", "/", r"\.", "_"):
            yield separator.join((year, month, date))
            yield separator.join((date, month, year))
        yield f"{year}{month}{date}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values in nested mappings and lists, each with its path.

    Args:
        value: The outermost mapping or list.
        path: The path of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, _joined(path, name))
    elif is_list(value):
        for number, item in enumerate(value):
            yield from leaves(item, _joined(path, number))
    else:
        yield path, value


def is_below(path: str, names: Collection[str]) -> bool:
    """Return whether a path is one of these names, or below one."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _texts(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of text in the user's objects. Other objects are compared as text, but are not text."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, _joined(path, name))
    elif is_list(value):
        for number, item in enumerate(value):
            yield from _texts(item, _joined(path, number))
    elif isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value):
        yield from (_joined(path, number) for number in range(len(value)))
    elif isinstance(value, (str, PurePath)):
        yield path


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_equal(then: object, now: object) -> bool:
    return bool(then == now) or bool(then is not _MISSING and then != then and now != now)


def plain(value: Any) -> object:
    """Return any value as numbers, text, lists, and dicts."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if is_list(value):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):  # their order differs in every process
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    # A subclass, such as an Enum of Lightning or a float of NumPy, would not load with weights_only=True.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    # The default text of an object holds its address, which differs in every process.
    text = repr(value)
    return f"a {type(value).__qualname__}" if " at 0x" in text else text


def is_list(value: object) -> bool:
    """Return whether a value is a list or tuple, or a list of OmegaConf, which Hydra passes."""
    return isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig"


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


CREATED: Final = "created"
"""The part of a state with the settings with which optimizers and schedulers were created."""


@final
class ChangedSettings:
    """The settings of optimizers and schedulers of this start, applied over those of a checkpoint.

    Args:
        trainer: The trainer that runs the fit. Its optimizers and schedulers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._window = trainer.accumulate_grad_batches
        optimizers = trainer.optimizers
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

    def apply(self, saved: Mapping[str, Any]) -> list[str]:
        """Set what has changed. Call it when the checkpoint is loaded.

        Args:
            saved: A result of `state_dict`, from the checkpoint; empty if it has none.

        Returns:
            A line for each setting that has changed.

        Raises:
            BranchError: If a changed setting can't take effect.
        """
        self.apply_window()
        if not saved:
            return ["optimizers and schedulers: as they were saved, because the autosave lacks their first settings"]
        for kind in ("optimizers", "schedulers"):
            then, now = ([one["class"] for one in each[kind]] for each in (saved, self._created))
            if then != now:
                raise BranchError(
                    f"A branch must have the same {kind} as its parent: {', '.join(then) or 'none'} when it was saved, "
                    f"{', '.join(now) or 'none'} now. The saved state fits no others."
                )
        lines: list[str] = []
        for number, optimizer in enumerate(self._trainer.optimizers):
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
                f"A branch must have as many parameter groups as its parent: {len(saved)} when it was saved, "
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
                        f"{place}.{name} began as {before!r}, and is {after!r} now. A branch can't change it, because "
                        f"training or a scheduler has set it to {_plain(group.get(name))!r}. Keep {before!r}."
                    )
                yield str(NamedDifference.of(f"{place}.{name}", repr(before), repr(after)))

    def _set_rate(self, optimizer: Any, group: dict[str, object], before: Any, after: object) -> None:
        """Give a group another learning rate, at the same place of its schedule."""
        schedulers = [
            config.scheduler
            for config in self._trainer.lr_scheduler_configs
            if getattr(config.scheduler, "optimizer", None) is optimizer
        ]
        for scheduler in schedulers:
            if type(scheduler) not in _IN_PROPORTION or vars(scheduler).get(_ETA_MIN):
                raise BranchError(
                    f"The learning rate was {before!r}, and is {after!r} now. A branch can't change it under "
                    f"{_name(scheduler)}, whose rates are not in proportion to it. Keep {before!r}."
                )
        if not before:
            raise BranchError(f"The learning rate was {before!r}, and is {after!r} now. A branch can't scale it.")
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
                f"The schedulers inside {_name(scheduler)} have other arguments now. A branch must keep the old ones."
            )
        then, now = saved["arguments"], created["arguments"]
        for name in dict.fromkeys((*then, *now)):
            before, after = then.get(name), now.get(name)
            if before == after:
                continue
            text = str(NamedDifference.of(f"{_name(scheduler)}.{name}", repr(before), repr(after)))
            may_be_set = name in _ARGUMENTS.get(type(scheduler), ())
            if may_be_set and _plain(getattr(scheduler, name)) == before:
                setattr(scheduler, name, self._arguments[number][name])
                yield text
            elif type(scheduler).__module__.startswith("torch."):
                raise BranchError(f"{text}. A branch can't change it. Keep {before!r}.")
            else:  # it may be how far a user's own scheduler is
                yield f"{text}, without effect: the scheduler is restored as it was saved"


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
    if type(value) is Tensor:  # no parameter, which a scheduler may hold in a group, nor a part of one in shards
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if isinstance(value, Mapping):  # the milestones of MultiStepLR, the phases of OneCycleLR
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    return None
