"""Hyperparameters, compared when a run resumes: some must be as they were, others may differ from start to start.

A name that contains the time must not stop an unattended run, so text may differ. A number is part of the arithmetic.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any, final

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.process import IMPORTED_AT

_DAY = 24 * 60 * 60
_UNITS = (1, 10**3, 10**9)  # seconds, milliseconds, nanoseconds
_TIME = re.compile(r"(?<!\d)(?:[01]\d|2[0-3])[-:_.h]?[0-5]\d(?:[-:_.m]?[0-5]\d)?(?!\d)")
# In a container, process ids are small numbers, like batch sizes and numbers of layers.
_SMALLEST_PROCESS_ID = 1000
_FIRST_ITEMS = 100
_MISSING = object()

MAY_BE_IGNORED = (
    "If a hyperparameter differs at each start and doesn't change the training, name it in "
    "FaultTolerance(ignore_hyperparameters=(...))."
)
"""The advice if hyperparameters are refused."""


@final
class Hyperparameters:
    """The hyperparameters of a module, read when this object is created: a finder may set some later.

    Args:
        module: The module.
        ignored: Names of the hyperparameters that may differ, with dots for nested ones.
    """

    def __init__(self, module: LightningModule, *, ignored: Sequence[str] = ()) -> None:
        self._ignored = tuple(ignored)
        own = {str(name): value for name, value in dict(module.hparams).items()}
        self._values = {name: plain(value) for name, value in own.items()}
        self._texts = set(_texts(own, ""))
        self._has_told = False

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters as plain values."""
        return self._values

    def compare(self, saved: Mapping[str, object]) -> tuple[list[str], list[str]]:
        """Compare the hyperparameters with the saved ones.

        Args:
            saved: The return value of `state_dict`.

        Returns:
            A line for each that differs but must not, and a line for each text that differs.
        """
        refused: list[str] = []
        reported: list[str] = []
        for path, then, now in self._differences(saved, self._values, ""):
            is_text = isinstance(then, str) and path in self._texts
            shown = [repr("nothing" if value is _MISSING else value) for value in (then, now)]
            line = f"hyperparameters.{path}: {shown[0]} when it was saved, {shown[1]} now"
            (reported if is_text else refused).append(line)
        return refused, reported

    def _differences(self, then: object, now: object, path: str) -> Iterator[tuple[str, object, object]]:
        if is_ignored(path, self._ignored) or _is_equal(then, now):
            return
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            for name in sorted({*then, *now}):
                yield from self._differences(then.get(name, _MISSING), now.get(name, _MISSING), _joined(path, name))
        elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
            for number, (one, other) in enumerate(zip(then, now, strict=True)):
                yield from self._differences(one, other, _joined(path, number))
        else:
            yield path, then, now

    def tell_passing(self, *_: object) -> None:
        """Report once which hyperparameters hold the time or this process's id: they differ at the next start."""
        if self._has_told:
            return
        self._has_told = True
        now = time.time()
        found = [
            leaf for leaf in leaves(self._values, first_items=_FIRST_ITEMS) if not is_ignored(leaf[0], self._ignored)
        ]
        passing = {path: value for path, value in found if is_passing(value, now=now)}
        numbers = tuple(path for path, value in passing.items() if not isinstance(value, str))
        advice = ["Strings that differ are only reported."] if len(numbers) < len(passing) else []
        if numbers:
            advice.append(
                "Numbers that differ are refused. Give them values that stay the same, or pass"
                f" FaultTolerance(ignore_hyperparameters={numbers})."
            )
        if passing:
            named = ", ".join(f"{path}={value!r}" for path, value in passing.items())
            tell(
                "Some hyperparameters hold the time or the process id, so they will differ at the next start:"
                f" {named}. {' '.join(advice)}"
            )


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


def leaves(value: Any, path: str = "", *, first_items: int | None = None) -> Iterator[tuple[str, object]]:
    """Yield the values in nested mappings and lists, each with its path.

    Args:
        value: The outermost mapping or list.
        path: The path of `value`.
        first_items: How many items of a list to visit; all by default.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, _joined(path, name), first_items=first_items)
    elif is_list(value):
        for number, item in enumerate(value[:first_items]):
            yield from leaves(item, _joined(path, number), first_items=first_items)
    else:
        yield path, value


def is_ignored(path: str, ignored: Collection[str]) -> bool:
    """Return whether a hyperparameter may differ, or is inside one that may."""
    return any(path == name or path.startswith(f"{name}.") for name in ignored)


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
