"""The environment variable ``PL_FAULT_TOLERANT_OPTIONS``: arguments of `FaultTolerance` for unchanged scripts.

The value is a list of pairs with commas between: ``every_n_train_steps=50, strict=false, dirpath="s3://bucket/a,b"``.
A value that holds a comma needs quotes. Names and types come from the signature, so each argument can be set.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_faulttolerant.advice import OPTIONS_VARIABLE, SEPARATOR
from lightning_faulttolerant.trainer.stop.deadline import duration

_VALUE = r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>(?!["'])[^,]*?))"""
_PAIR = re.compile(rf"\s*(?P<name>\w*)\s*=\s*{_VALUE}\s*(?:,|$)")
EXAMPLE = 'every_n_train_steps=50, strict=false, dirpath="s3://bucket/runs"'
"""A value of the variable."""
_CONTRADICTING = {"every_n_train_steps": "train_time_interval", "train_time_interval": "every_n_train_steps"}

Init = TypeVar("Init", bound=Callable[..., None])


def with_options_of_environment(init: Init) -> Init:
    """Let the variable set those arguments of a constructor that are not passed.

    A passed argument wins, even if it equals the default.

    Args:
        init: The constructor. Each of its parameters has a type.
    """

    @functools.wraps(init)
    def with_options(self: object, *args: Any, **kwargs: Any) -> None:
        by_variable = read_options(init, os.environ.get(OPTIONS_VARIABLE, ""))
        passed = {**dict(zip(option_names(init), args, strict=False)), **kwargs}
        contradicted = {_CONTRADICTING.get(name) for name, value in passed.items() if value is not None}
        options = {name: by_variable[name] for name in by_variable if name not in passed and name not in contradicted}
        try:
            init(self, *args, **options, **kwargs)
        except (TypeError, ValueError) as error:
            if not any(name in str(error) for name in options):
                raise
            raise type(error)(f"{OPTIONS_VARIABLE}: {error}") from None

    return with_options  # type: ignore[return-value]  # of the same arguments


def option_names(init: Callable[..., None]) -> list[str]:
    """Return the names of a constructor's arguments, in order."""
    return list(inspect.signature(init).parameters)[1:]


def read_options(init: Callable[..., None], text: str) -> dict[str, object]:
    """Return the arguments that the variable sets.

    Args:
        init: The constructor that takes them.
        text: The value of the variable.

    Raises:
        ValueError: If a name is not an argument, or a value does not have the argument's type.
    """
    pairs = _pairs(text)
    if not pairs:
        return {}
    names, types = option_names(init), get_type_hints(init)
    unknown = [name for name in pairs if name not in names]
    if unknown:
        raise ValueError(f"{OPTIONS_VARIABLE}: there is no option {unknown[0]!r}. The options are {', '.join(names)}.")
    return {name: _value(name, value, types[name]) for name, value in pairs.items()}


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    place = 0
    while text[place:].strip():
        found = _PAIR.match(text, place)
        if found is None or not found["name"]:
            raise ValueError(
                f"{OPTIONS_VARIABLE} must be pairs of name=value, separated by commas, such as {EXAMPLE}; got "
                f"{text!r}. Put a value that contains a comma in quotes."
            )
        if found["name"] in pairs:
            raise ValueError(f"{OPTIONS_VARIABLE} gives {found['name']} twice: {text!r}.")
        values = (found["double"], found["single"], found["plain"])
        pairs[found["name"]] = next(value for value in values if value is not None)
        place = found.end()
    return pairs


def _value(name: str, text: str, hint: object) -> object:
    """Return a value of one of the types that a parameter takes."""
    types = get_args(hint) if get_origin(hint) not in (None, Sequence) and get_args(hint) else (hint,)
    kinds = [get_origin(kind) or kind for kind in types]
    read = [(told, kind_read) for kind, (told, kind_read) in _READERS.items() if kind in kinds]
    for _, kind_read in read:
        found = kind_read(text)
        if found is not _UNFIT:
            return found
    expected = " or ".join(told for told, _ in read)
    raise ValueError(f"{OPTIONS_VARIABLE}: {name} must be {expected}, got {text!r}.")


_UNFIT = object()


def _among(**values: Any) -> Callable[[str], object]:
    return lambda text: values.get(text.lower(), _UNFIT)


def _number(kind: Callable[[str], object]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return _UNFIT

    return read


def _duration(text: str) -> object:
    found = duration(text)
    return _UNFIT if found is None else found


def _list(text: str) -> object:
    return tuple(element.strip() for element in text.split(SEPARATOR) if element.strip())


def _text(text: str) -> object:
    return text or _UNFIT


_READERS: dict[object, tuple[str, Callable[[str], object]]] = {
    type(None): ("none", _among(none=None)),
    bool: ("true or false", _among(true=True, false=False)),
    int: ("a whole number", _number(int)),
    float: ("a number", _number(float)),
    str: ("a text, not empty", _text),
    timedelta: ("a time such as 0:05:00 (hours, minutes, seconds)", _duration),
    Sequence: (f"names separated by {SEPARATOR}", _list),
}
"""The readers in the order in which they are tried: any text that is not ``none`` fits a string."""
