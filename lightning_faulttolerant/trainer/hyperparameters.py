"""Hyperparameters, compared when a run resumes: what must be as it was, and what may differ from start to start.

A name with the time in it must not stop a run that nobody watches, so text may differ; a number is arithmetic.
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

from lightning_faulttolerant.trainer.process import IMPORTED_AT
from lightning_faulttolerant.trainer.telling import tell

_DAY = 24 * 60 * 60
_UNITS = (1, 10**3, 10**9)  # seconds, milliseconds, nanoseconds
_TIME = re.compile(r"(?<!\d)(?:[01]\d|2[0-3])[-:_.h]?[0-5]\d(?:[-:_.m]?[0-5]\d)?(?!\d)")
# In a container the processes have small numbers, as batch sizes and layers do.
_SMALLEST_PROCESS_ID = 1000
_FIRST_ITEMS = 100
_MISSING = object()

MAY_BE_IGNORED = (
    "A hyperparameter that differs at each start and doesn't change the training may be named in"
    " FaultTolerance(ignore_hyperparameters=(...))."
)
"""What to do where hyperparameters are refused."""


@final
class Hyperparameters:
    """Those of a module, as they are when this is made: a finder may set some later.

    Args:
        module: Whose.
        ignored: Names of those that may differ, with dots for nested ones.
    """

    def __init__(self, module: LightningModule, *, ignored: Sequence[str] = ()) -> None:
        self._ignored = tuple(ignored)
        own = {str(name): value for name, value in dict(module.hparams).items()}
        self._values = {name: plain(value) for name, value in own.items()}
        self._texts = set(_texts(own, ""))
        self._has_told = False

    def state_dict(self) -> dict[str, Any]:
        """Return them as plain values."""
        return self._values

    def compare(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Compare them with those that were saved.

        Args:
            saved: What `state_dict` gave.

        Returns:
            A line for each that must not differ and does, and one for each text that differs.
        """
        refused: list[str] = []
        reported: list[str] = []
        for path, then, now in self._differences(saved, self._values, ""):
            is_text = isinstance(then, str) and path in self._texts
            shown = [repr("nothing" if value is _MISSING else value) for value in (then, now)]
            line = f"hyperparameters.{path}: {shown[0]} when it was saved, {shown[1]} now"
            (reported if is_text else refused).append(line)
        return refused, reported

    def _differences(self, then: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
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

    def tell_passing(self, *_: Any) -> None:
        """Say, once, which of them hold the time or this process's id: the next start has others."""
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


def is_passing(value: Any, *, now: float) -> bool:
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
    """Yield patterns of the dates at which this process began, or is now, here and in Greenwich."""
    zones = (None, timezone.utc)
    days = {datetime.fromtimestamp(moment, zone).date() for moment in (IMPORTED_AT, now) for zone in zones}
    for day in days:
        year, month, date = f"{day:%Y}", f"{day:%m}", f"{day:%d}"
        for separator in ("-", "/", r"\.", "_"):
            yield separator.join((year, month, date))
            yield separator.join((date, month, year))
        yield f"{year}{month}{date}"


def leaves(value: Any, path: str = "", *, first_items: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what is in nested mappings and lists, by its names.

    Args:
        value: The outermost.
        path: Its name.
        first_items: How many items of a list to look at; all by default.
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
    """Return whether a hyperparameter is one that may differ, or lies in one."""
    return any(path == name or path.startswith(f"{name}.") for name in ignored)


def _texts(value: Any, path: str) -> Iterator[str]:
    """Yield the places of what is text in the user's objects: other objects are compared by theirs, too."""
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


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_equal(then: Any, now: Any) -> bool:
    return bool(then == now) or bool(then is not _MISSING and then != then and now != now)


def plain(value: Any) -> Any:
    """Return a value as numbers, text, lists and dicts, whatever it is."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if is_list(value):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):  # their order is another one in every process
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    # What derives from them, an Enum of Lightning's or a float of NumPy's, would not load with weights_only=True.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    # The default text of an object holds its address, which is another one in every process.
    text = repr(value)
    return f"a {type(value).__qualname__}" if " at 0x" in text else text


def is_list(value: Any) -> bool:
    """Return whether a value is a list or tuple, or one of OmegaConf's, which Hydra gives."""
    return isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig"
