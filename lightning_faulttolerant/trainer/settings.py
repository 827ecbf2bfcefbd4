"""The environment variable ``PL_FAULT_TOLERANT_OPTIONS``: arguments of `FaultTolerance` for unchanged scripts.

The value is a list of pairs with commas between: ``every_n_train_steps=50, strict=false, dirpath="s3://bucket/a,b"``.
A value that holds a comma needs quotes. Names and types come from the signature, so each argument can be set.

The arguments of `FaultTolerance`, checked once, before any work.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from pathlib import PurePath
from typing import TypeVar, get_args, get_origin, get_type_hints

from lightning_faulttolerant.errors import OPTIONS_VARIABLE, SEPARATOR
from lightning_faulttolerant.records.incidents import RULES, Rule
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.records.requests import Skip, checked_skips
from lightning_faulttolerant.records.runs import RESUME_FROM_VARIABLE
from lightning_faulttolerant.storage.store import is_url, local_path
from lightning_faulttolerant.supervision.heartbeats import HANG_NAMES
from lightning_faulttolerant.trainer.run.directory import Script, check_run_id, this_process
from lightning_faulttolerant.trainer.signals import duration

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
    def with_options(self: object, *args: object, **kwargs: object) -> None:
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


def _among(**values: object) -> Callable[[str], object]:
    return lambda text: values.get(text.lower(), _UNFIT)


def _number(kind: Callable[[str], object]) -> Callable[[str], object]:
    def read(text: str) -> object:
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


_READERS: dict[object, tuple[str, Callable[[str], object]]] = {
    type(None): ("none", _among(none=None)),
    bool: ("true or false", _among(true=True, false=False)),
    int: ("a whole number", _number(int)),
    float: ("a number", _number(float)),
    str: ("a text, not empty", lambda text: text or _UNFIT),
    timedelta: ("a time such as 0:05:00 (hours, minutes, seconds)", _duration),
    Sequence: (f"names separated by {SEPARATOR}", _list),
}
"""The readers in the order in which they are tried: any text that is not ``none`` fits a string."""


DEFAULT_BUDGET = 0.01
"""The `overhead_budget` if the user sets none."""
_UNSTOPPABLE = ("SIGKILL", "SIGSTOP", "SIGCHLD")
_FLAGS = (
    "auto_resume",
    "strict",
    "elastic",
    "async_save",
    "incremental",
    "stop_on_incident",
)
_HANG = HANG_NAMES[1:]
_EPOCH_AND_BATCH = re.compile(r"\d+:\d+")
_SPOILT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")


def requested_ledger() -> str | None:
    """Return the absolute path of the ledger that the environment asks for: the process may change its directory.

    Raises:
        ValueError: If it is a URL: a line can't be added to an object in a store.
    """
    text = os.environ.get(LEDGER_VARIABLE)
    if not text:
        return None
    if is_url(text):
        raise ValueError(f"{LEDGER_VARIABLE} must be a local file, to which lines are appended; got {text}.")
    return os.path.abspath(os.path.expanduser(local_path(text)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """See `FaultTolerance` for what each argument means."""

    dirpath: str | None
    run_id: str | None
    keep_last: int
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    overhead_budget: float
    stop_signals: tuple[str, ...]
    grace_seconds: float
    auto_resume: bool
    strict: bool
    elastic: bool = False
    worker_rng: str = "capture"
    async_save: bool = False
    incremental: bool = False
    deadline: float | None = None
    trust_autosaves: bool | None = None
    ignore_hyperparameters: tuple[str, ...] = ()
    hang: str | None = None
    hang_timeout: float | None = None
    keep_every: int | None = None
    record: str | Rule | None = None
    stop_on_incident: bool = False
    resume_from: int | str | None = None
    skip_batches: tuple[Skip, ...] = ()
    has_own_budget: bool = True
    """Whether the user has set `overhead_budget`."""
    made_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    ledger: str | None = field(default_factory=requested_ledger)
    """The absolute path of the ledger that the environment has asked for when the callback was created."""
    script: Script = field(default_factory=this_process)
    """The process that created the callback. Lightning may run the fit in other processes."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.run_id is not None:
            check_run_id(self.run_id)
        if self.keep_last < 1:
            raise ValueError(
                f"keep_last must be at least 1, got {self.keep_last}: nothing resumes without an autosave."
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {self.keep_every}.")
        if self.every_n_train_steps is not None and self.train_time_interval is not None:
            raise ValueError("every_n_train_steps and train_time_interval contradict each other; pass one of them.")
        if self.every_n_train_steps is not None and self.every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be at least 1, got {self.every_n_train_steps}.")
        if self.train_time_interval is not None and self.train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval must be positive, got {self.train_time_interval}.")
        if not 0 < self.overhead_budget <= 1:
            raise ValueError(f"overhead_budget must be a share of the time in (0, 1], got {self.overhead_budget}.")
        if not self.grace_seconds > 0:  # refuses NaN, too
            raise ValueError(f"grace_seconds must be positive, got {self.grace_seconds}.")
        if self.worker_rng not in ("capture", "per_sample"):
            raise ValueError(f'worker_rng must be "capture" or "per_sample", got {self.worker_rng!r}.')
        for name in self.stop_signals:
            _check_signal(name)
        if self.record is not None and self.record not in RULES and not callable(self.record):
            raise ValueError(
                f"record must be one of {', '.join(map(repr, RULES))}, a function, or None; got {self.record!r}."
            )
        name = "stop_on_incident"
        if self.stop_on_incident and self.record is None:
            raise ValueError(f"{name}=True has no effect without record: pass record='nan', too.")
        if self.hang is not None and self.hang not in _HANG:
            raise ValueError(f"hang must be one of {', '.join(map(repr, _HANG))}, or None; got {self.hang!r}.")
        if self.hang_timeout is not None and not self.hang_timeout > 0:
            raise ValueError(f"hang_timeout must be positive, got {self.hang_timeout}.")
        object.__setattr__(self, "ignore_hyperparameters", _names(self.ignore_hyperparameters))
        object.__setattr__(self, "skip_batches", checked_skips(self.skip_batches))

    def _check_types(self) -> None:
        for name in ("keep_last", "every_n_train_steps", "keep_every"):
            if name == "keep_last" or getattr(self, name) is not None:
                object.__setattr__(self, name, _whole_number(name, getattr(self, name)))
        numbers = ("overhead_budget", "grace_seconds", *(() if self.hang_timeout is None else ("hang_timeout",)))
        for name in numbers:
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), Real):
                raise TypeError(f"{name} must be a number, got {getattr(self, name)!r}.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.trust_autosaves is not None and not isinstance(self.trust_autosaves, bool):
            raise TypeError(f"trust_autosaves must be True, False or None, got {self.trust_autosaves!r}.")
        interval = self.train_time_interval
        if interval is not None and not isinstance(interval, timedelta):
            raise TypeError(f"train_time_interval must be a timedelta, such as timedelta(minutes=5); got {interval!r}.")

    @property
    def is_paced(self) -> bool:
        """Whether `overhead_budget` says when to save, rather than an interval."""
        return self.every_n_train_steps is None and self.train_time_interval is None

    @property
    def follows_failures(self) -> bool:
        """Whether the failures of the run say when to save: the user has set neither an interval nor the budget."""
        return self.is_paced and not self.has_own_budget

    @property
    def allows_other_ranks(self) -> bool:
        """Whether a different number of ranks may continue the run."""
        return self.elastic or self.worker_rng == "per_sample"

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The stop signals that exist on this system."""
        return tuple(dict.fromkeys(signal.Signals[name] for name in self.stop_signals))


def _check_signal(name: str) -> None:
    if name in _UNSTOPPABLE:
        raise ValueError(f"stop_signals can't contain {name}: no process can handle it as a request to stop.")
    if name not in signal.Signals.__members__:
        raise ValueError(
            f"stop_signals contains {name!r}, which is not a signal on this system. Use names such as 'SIGTERM'."
        )


def _whole_number(name: str, value: object) -> int:
    """Return a whole number of any type, such as NumPy's, as Python's ``int``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    return number


def _names(names: object) -> tuple[str, ...]:
    """Return names of hyperparameters as a tuple."""
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        advice = f" For a single one, pass ({names!r},)." if isinstance(names, str) else ""
        raise TypeError(
            "ignore_hyperparameters must be a tuple or a list of names, such as ('run_name', 'optimizer.start_time');"
            f" got {names!r}.{advice}"
        )
    if not all(names):
        raise ValueError(f"ignore_hyperparameters contains an empty name, got {names!r}. It would have no effect.")
    return tuple(names)


def _text(name: str, path: str | os.PathLike[str]) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {path!r}.")
    return os.fspath(path)


def checked_dirpath(dirpath: str | os.PathLike[str] | None) -> str | None:
    """Return `dirpath` as a local path, with the home directory for ``~``, or as a URL of another file system.

    Raises:
        TypeError: If `dirpath` is not a path.
        ValueError: If `dirpath` is a URL that `Path` has spoilt.
    """
    if dirpath is None:
        return None
    text = _text("dirpath", dirpath)
    if isinstance(dirpath, PurePath) and _SPOILT_URL.match(text):
        raise ValueError(f"dirpath is {dirpath!r}: Path removes a slash from a URL. Pass the URL as a string.")
    return text if is_url(text) else os.path.expanduser(local_path(text))


def checked_resume_from(source: int | str | os.PathLike[str] | None) -> int | str | None:
    """Return where a branch begins: a number of optimizer steps, ``EPOCH:BATCH``, or an absolute path or URL.

    Without an argument, the environment decides.

    Raises:
        TypeError: If `source` is something else.
        ValueError: If `source` is empty or negative, or a URL that `Path` has spoilt.
    """
    if source is None:
        source = os.environ.get(RESUME_FROM_VARIABLE) or None
    if source is None:
        return None
    if not isinstance(source, (str, os.PathLike)):
        number = _whole_number("resume_from", source)
        if number < 0:
            raise ValueError(f"resume_from must be a number of optimizer steps, from 0; got {number}.")
        return number
    text = _text("resume_from", source).strip()
    if not text:
        raise ValueError("resume_from must name a step or an autosave, got ''. To begin no branch, leave it out.")
    if text.isdecimal():
        return int(text)
    if _EPOCH_AND_BATCH.fullmatch(text) or is_url(text):
        return text
    if isinstance(source, PurePath) and _SPOILT_URL.match(text):
        raise ValueError(f"resume_from is {source!r}: Path removes a slash from a URL. Pass the URL as a string.")
    return os.path.abspath(os.path.expanduser(local_path(text)))
