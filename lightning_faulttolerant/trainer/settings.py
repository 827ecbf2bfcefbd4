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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from pathlib import PurePath
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_faulttolerant.errors import OPTIONS_VARIABLE, SEPARATOR
from lightning_faulttolerant.records.incidents import RULES, Rule
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.records.requests import Skip, accepted_names, skips_requested
from lightning_faulttolerant.records.runs import RESUME_FROM_VARIABLE
from lightning_faulttolerant.storage.store import is_url, local_path
from lightning_faulttolerant.supervision.heartbeats import HANG_NAMES
from lightning_faulttolerant.trainer.process import read_trust
from lightning_faulttolerant.trainer.run.directory import Script, check_run_id, this_process
from lightning_faulttolerant.trainer.signals import checked_deadline, duration

_VALUE = r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>(?!["'])[^,]*?))"""
_PAIR = re.compile(rf"\s*(?P<name>[\w.]*)\s*=\s*{_VALUE}\s*(?:,|$)")
EXAMPLE = 'every_n_train_steps=50, strict=false, dirpath="s3://bucket/runs"'
"""A value of the variable."""
COMPANIONS = ("FlightRecorder", "HangWatch")
_RUN = "type `lightning-faulttolerant run"
_ELSEWHERE = {
    "record": "pass FlightRecorder(rule=...), another callback, next to it",
    "stop_on_incident": "pass FlightRecorder(stop=True), another callback, next to it",
    "keep_every": "pass FlightRecorder(None, keep_every=...), another callback, next to it",
    "hang": "pass HangWatch(action=...), another callback, next to it",
    "hang_timeout": "pass HangWatch(timeout=...), another callback, next to it",
    "resume_from": f"{_RUN} --from STEP -- python train.py`",
    "skip_batches": f"{_RUN} --skip EPOCH:BATCH -- python train.py`",
    "ignore_hyperparameters": f"{_RUN} --accept hyperparameters.NAME -- python train.py`",
    "ledger": f"set {LEDGER_VARIABLE} to the path of the file",
    "save_on_exception": "leave it out, since an exception always saves what is known to be correct",
}
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
        moved = [name for name in kwargs if name in _ELSEWHERE and name not in option_names(init)]
        if moved:
            raise TypeError(f"FaultTolerance has no argument {moved[0]}: {_ELSEWHERE[moved[0]]}.")
        by_variable = read_options(init, os.environ.get(OPTIONS_VARIABLE, ""))
        passed = {**dict(zip(option_names(init), args, strict=False)), **kwargs}
        contradicted = {_CONTRADICTING.get(name) for name, value in passed.items() if value is not None}
        options = {name: by_variable[name] for name in by_variable if name not in passed and name not in contradicted}
        vars(self)["_given"] = {**options, **passed}
        try:
            init(self, *args, **options, **kwargs)
        except (TypeError, ValueError) as error:
            if not any(name in str(error) for name in options):
                raise
            raise type(error)(f"{OPTIONS_VARIABLE}: {error}") from None

    return with_options  # type: ignore[return-value]  # of the same arguments


def described(callback: object, init: Callable[..., None]) -> str:
    """Return the ``repr`` of a callback: its arguments that differ from the defaults.

    Args:
        callback: The callback.
        init: Its constructor, from `with_options_of_environment`.
    """
    given, known = vars(callback).get("_given", {}), inspect.signature(init).parameters
    shown = [f"{name}={given[name]!r}" for name in known if name in given and given[name] != known[name].default]
    return f"{type(callback).__name__}({', '.join(shown)})"


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
    kind = init.__qualname__.partition(".")[0]
    prefix = f"{kind}." if kind in COMPANIONS else ""
    own = {name: prefix + name for name in option_names(init)}
    others = () if prefix else COMPANIONS
    rest = [name for name in pairs if name.startswith(prefix) and name not in own.values()]
    unknown = [name for name in rest if name.partition(".")[0] not in others]
    if unknown:
        options = ", ".join((*own.values(), *(f"{name}...." for name in others)))
        raise ValueError(f"{OPTIONS_VARIABLE}: there is no option {unknown[0]!r}. The options are {options}.")
    types = get_type_hints(init)
    return {name: _value(told, pairs[told], types[name]) for name, told in own.items() if told in pairs}


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
    types = get_args(hint) if get_origin(hint) not in (None, Sequence, Literal) and get_args(hint) else (hint,)
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
    str: ("a text that is not empty", lambda text: text or _UNFIT),
    Literal: ("a word", lambda text: text or _UNFIT),
    timedelta: ("a time such as 0:05:00 (hours, minutes, seconds)", _duration),
    Sequence: (f"names separated by {SEPARATOR}", _list),
}
"""The readers in the order in which they are tried: any text that is not ``none`` fits a string."""


DEFAULT_BUDGET = 0.01
"""The `overhead_budget` if the user sets none."""
_UNSTOPPABLE = ("SIGKILL", "SIGSTOP", "SIGCHLD")
_FLAGS = ("auto_resume", "strict", "elastic", "async_save", "incremental")
_ACTIONS = HANG_NAMES[1:]
PLACE = re.compile(r"\d+(:\d+)?")
"""Where a branch begins, if it is not a path: a number of optimizer steps, or ``EPOCH:BATCH``."""
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


def requested_branch() -> str:
    """Return where a branch begins: a number of optimizer steps, ``EPOCH:BATCH``, an absolute path, or a URL."""
    text = os.environ.get(RESUME_FROM_VARIABLE, "").strip()
    is_path = text and not PLACE.fullmatch(text) and not is_url(text)
    return os.path.abspath(os.path.expanduser(local_path(text))) if is_path else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """See `FaultTolerance` for what each argument means."""

    dirpath: str | None
    run_id: str | None
    keep_last: int
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    overhead_budget: float
    async_save: bool
    incremental: bool
    stop_signals: tuple[str, ...]
    grace_seconds: float
    deadline: float | None
    auto_resume: bool
    strict: bool
    elastic: bool
    worker_rng: str
    trust_autosaves: bool | None
    rule: str | Rule | None = None
    stop: bool = False
    keep_every: int | None = None
    action: str | None = None
    timeout: float | None = None
    has_own_budget: bool = True
    """Whether the user has set `overhead_budget`."""
    resume_from: str = field(default_factory=requested_branch)
    """Where the branch begins that the environment has asked for when the callback was created, or ``""``."""
    skips: tuple[Skip, ...] = field(default_factory=skips_requested)
    """The batches to leave out."""
    accepted: tuple[str, ...] = field(default_factory=accepted_names)
    """The names of differences that a resume accepts."""
    made_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    ledger: str | None = field(default_factory=requested_ledger)
    """The absolute path of the ledger that the environment has asked for when the callback was created."""
    script: Script = field(default_factory=this_process)
    """The process that created the callback. Lightning may run the fit in other processes."""

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options that arguments of `FaultTolerance` ask for."""
        own = {name: arguments[name] for name in cls.__slots__ if name in arguments}
        budget, trust = own["overhead_budget"], own["trust_autosaves"]
        return cls(**{
            **own,
            "dirpath": _checked_dirpath(own["dirpath"]),
            "overhead_budget": DEFAULT_BUDGET if budget is None else budget,
            "has_own_budget": budget is not None,
            "stop_signals": tuple(own["stop_signals"]),
            "deadline": checked_deadline(own["deadline"]),
            "trust_autosaves": read_trust() if trust is None else trust,
        })  # fmt: skip

    def __post_init__(self) -> None:
        self._check_types()
        if self.run_id is not None:
            check_run_id(self.run_id)
        if self.every_n_train_steps is not None and self.train_time_interval is not None:
            raise ValueError("every_n_train_steps and train_time_interval contradict each other; pass one of them.")
        if self.train_time_interval is not None and self.train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval must be positive, got {self.train_time_interval}.")
        if not 0 < self.overhead_budget <= 1:
            raise ValueError(f"overhead_budget must be a share of the time in (0, 1], got {self.overhead_budget}.")
        if self.worker_rng not in ("capture", "per_sample"):
            raise ValueError(f'worker_rng must be "capture" or "per_sample", got {self.worker_rng!r}.')
        for name in self.stop_signals:
            _check_signal(name)

    def _check_types(self) -> None:
        for name in ("keep_last", "every_n_train_steps"):
            if name == "keep_last" or getattr(self, name) is not None:
                object.__setattr__(self, name, _at_least_1(name, getattr(self, name)))
        _check_number("overhead_budget", self.overhead_budget)
        _check_positive("grace_seconds", self.grace_seconds)
        for name in _FLAGS:
            _check_flag(name, getattr(self, name))
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


def checked_recording(rule: str | Rule | None, *, stop: bool, keep_every: int | None) -> dict[str, object]:
    """Return the fields of `Options` for arguments of `FlightRecorder`.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of its range, or two contradict each other.
    """
    if rule is not None and rule not in RULES and not callable(rule):
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, a function, or None; got {rule!r}.")
    _check_flag("stop", stop)
    if stop and rule is None:
        raise ValueError("stop=True has no effect without a rule: pass rule='nan', too.")
    if keep_every is not None:
        keep_every = _at_least_1("keep_every", keep_every)
    return {"rule": rule, "stop": stop, "keep_every": keep_every}


def checked_watch(action: str, timeout: float | None) -> dict[str, object]:
    """Return the fields of `Options` for arguments of `HangWatch`.

    Raises:
        TypeError: If `timeout` is not a number.
        ValueError: If one is out of its range.
    """
    if action not in _ACTIONS:
        raise ValueError(f"action must be one of {', '.join(map(repr, _ACTIONS))}; got {action!r}.")
    if timeout is not None:
        _check_positive("timeout", timeout)
    return {"action": action, "timeout": timeout}


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")


def _check_positive(name: str, value: Any) -> None:
    _check_number(name, value)
    if not value > 0:  # refuses NaN, too
        raise ValueError(f"{name} must be positive, got {value}.")


def _check_signal(name: str) -> None:
    if name in _UNSTOPPABLE:
        raise ValueError(f"stop_signals can't contain {name}: no process can handle it as a request to stop.")
    if name not in signal.Signals.__members__:
        raise ValueError(
            f"stop_signals contains {name!r}, which is not a signal on this system. Use names such as 'SIGTERM'."
        )


def _at_least_1(name: str, value: object) -> int:
    """Return a whole number of any type, such as NumPy's, as Python's ``int``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    return number


def _checked_dirpath(dirpath: str | os.PathLike[str] | None) -> str | None:
    """Return `dirpath` as a local path, with the home directory for ``~``, or as a URL of another file system."""
    if dirpath is None:
        return None
    if not isinstance(dirpath, (str, os.PathLike)):
        raise TypeError(f"dirpath must be a path, got {dirpath!r}.")
    text = os.fspath(dirpath)
    if isinstance(dirpath, PurePath) and _SPOILT_URL.match(text):
        raise ValueError(f"dirpath is {dirpath!r}: Path removes a slash from a URL. Pass the URL as a string.")
    return text if is_url(text) else os.path.expanduser(local_path(text))
