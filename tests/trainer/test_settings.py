"""Bad arguments are refused when the callback is created, with the value and the reason."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.settings import Options, checked_dirpath

DEFAULTS: dict[str, Any] = {
    "dirpath": None,
    "run_id": None,
    "keep_last": 2,
    "every_n_train_steps": None,
    "train_time_interval": None,
    "overhead_budget": 0.01,
    "stop_signals": ("SIGTERM", "SIGINT"),
    "grace_seconds": 25.0,
    "auto_resume": True,
    "strict": True,
}

BAD = [
    ({"run_id": "a/b"}, "got 'a/b'"),
    ({"run_id": ""}, "got ''"),
    ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
    ({"every_n_train_steps": 0}, "every_n_train_steps must be at least 1, got 0"),
    ({"every_n_train_steps": 5, "train_time_interval": timedelta(1)}, "contradict each other"),
    ({"train_time_interval": timedelta(0)}, "train_time_interval must be positive, got 0:00:00"),
    ({"overhead_budget": 0.0}, r"in \(0, 1\], got 0.0"),
    ({"overhead_budget": 1.01}, r"in \(0, 1\], got 1.01"),
    ({"overhead_budget": float("nan")}, r"in \(0, 1\], got nan"),
    ({"grace_seconds": 0.0}, "grace_seconds must be positive, got 0.0"),
    ({"grace_seconds": float("nan")}, "grace_seconds must be positive, got nan"),
    ({"stop_signals": ("SIGKILL",)}, "can't contain SIGKILL"),
    ({"stop_signals": ("SIGCHLD",)}, "can't contain SIGCHLD"),
    ({"stop_signals": ("TERM",)}, "'TERM', which is not a signal on this system"),
    ({"stop_signals": ("SIGNONE",)}, "'SIGNONE', which is not a signal on this system"),
    ({"stop_signals": ("SIG_IGN",)}, "'SIG_IGN', which is not a signal on this system"),
    ({"stop_signals": "SIGTERM"}, "not a signal on this system"),
    ({"hang": "wait"}, "hang must be one of 'off', 'report', 'stop', or None; got 'wait'"),
    ({"hang_timeout": 0.0}, "hang_timeout must be positive, got 0.0"),
    ({"hang_timeout": float("nan")}, "hang_timeout must be positive, got nan"),
    ({"ignore_hyperparameters": ("rate", "")}, r"contains an empty name, got \('rate', ''\)"),
]

OF_ANOTHER_TYPE = [
    ({"dirpath": 5}, "dirpath must be a path, got 5"),
    ({"run_id": 5}, "run_id must be a string, got 5"),
    ({"keep_last": 1.5}, "keep_last must be a whole number, got 1.5"),
    ({"keep_last": True}, "keep_last must be a whole number, got True"),
    ({"keep_last": None}, "keep_last must be a whole number, got None"),
    ({"every_n_train_steps": 1.5}, "every_n_train_steps must be a whole number, got 1.5"),
    ({"every_n_train_steps": True}, "every_n_train_steps must be a whole number, got True"),
    ({"train_time_interval": 5}, "train_time_interval must be a timedelta, .* got 5"),
    ({"overhead_budget": "1%"}, "overhead_budget must be a number, got '1%'"),
    ({"grace_seconds": True}, "grace_seconds must be a number, got True"),
    ({"hang_timeout": "1"}, "hang_timeout must be a number, got '1'"),
    ({"auto_resume": None}, "auto_resume must be True or False, got None"),
    ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
    ({"elastic": "x"}, "elastic must be True or False, got 'x'"),
    ({"async_save": 0}, "async_save must be True or False, got 0"),
    ({"ignore_hyperparameters": "run_name"}, r"got 'run_name'. For a single one, pass \('run_name',\)."),
    ({"ignore_hyperparameters": None}, "must be a tuple or a list of names, .* got None"),
    ({"ignore_hyperparameters": ("rate", 5)}, r"must be a tuple or a list of names, .* got \('rate', 5\)"),
    ({"ignore_hyperparameters": {"rate": 5}}, "must be a tuple or a list of names"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_argument_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    """An invalid value raises immediately, from the callback too, and the message shows it."""
    with pytest.raises(ValueError, match=message):
        FaultTolerance(**arguments)


@pytest.mark.parametrize(("arguments", "message"), OF_ANOTHER_TYPE)
def test_argument_of_another_type_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    """An argument of the wrong type raises immediately, with its name and value, and not in the middle of a fit."""
    with pytest.raises(TypeError, match=message):
        FaultTolerance(**arguments)


@pytest.mark.parametrize("name", ["keep_last", "every_n_train_steps"])
def test_whole_number_of_numpys_becomes_pythons(name: str) -> None:
    """A NumPy integer, as from a sweep, is accepted."""
    value = getattr(Options(**{**DEFAULTS, name: np.int64(3)}), name)
    assert (value, type(value)) == (3, int)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"keep_last": 1, "overhead_budget": 1.0, "grace_seconds": 0.1},
        {"every_n_train_steps": 1},
        {"train_time_interval": timedelta(seconds=1)},
        {"run_id": "run-1", "dirpath": Path("here")},
        {"stop_signals": ()},
        {"hang": "report", "hang_timeout": 5},
    ],
)
def test_good_arguments_are_kept(arguments: dict[str, Any]) -> None:
    """Values in range, including the limits, are kept as they are."""
    options = Options(**{**DEFAULTS, **arguments})
    assert all(getattr(options, name) == value for name, value in arguments.items())


def test_signals_are_those_of_the_system() -> None:
    """The names become signals, in their order."""
    options = Options(**{**DEFAULTS, "stop_signals": ("SIGUSR1", "SIGTERM")})
    assert options.signals == (signal.SIGUSR1, signal.SIGTERM)


def test_signal_that_is_named_twice_is_handled_once() -> None:
    """If the callback took a signal over twice, it would never give the signal back."""
    assert Options(**{**DEFAULTS, "stop_signals": ("SIGINT", "SIGINT")}).signals == (signal.SIGINT,)


def test_options_cant_be_changed() -> None:
    """Checked options can't change."""
    with pytest.raises(AttributeError):
        Options(**DEFAULTS).keep_last = 0  # type: ignore[misc]


def test_directory_may_be_a_url() -> None:
    """Paths and file URLs are directories, and other URLs are kept; a URL that Path has broken is refused by name."""
    assert checked_dirpath(None) is None
    assert checked_dirpath("runs") == "runs"
    assert checked_dirpath(Path("/runs")) == "/runs"
    assert checked_dirpath("file:///runs") == "/runs"
    assert checked_dirpath("s3://bucket/runs") == "s3://bucket/runs"
    with pytest.raises(ValueError, match="Pass the URL as a string"):
        checked_dirpath(Path("s3://bucket/runs"))


@pytest.mark.parametrize("path", ["~/ft", Path("~/ft"), "file://~/ft"])
def test_tilde_is_the_home_directory(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere in Lightning, `~` is the home directory, for autosaves and for a ledger."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checked_dirpath(path) == str(tmp_path / "ft")
    monkeypatch.setenv("PL_FAULT_TOLERANT_LEDGER", str(path))
    assert Options(**DEFAULTS).ledger == str(tmp_path / "ft")


def test_tilde_in_a_url_stays() -> None:
    """The names in an object store are its own."""
    assert checked_dirpath("s3://~/runs") == "s3://~/runs"


def test_names_may_be_a_list() -> None:
    """LightningCLI passes lists."""
    options = Options(**{**DEFAULTS, "ignore_hyperparameters": ["run_name", "optimizer.start_time"]})
    assert options.ignore_hyperparameters == ("run_name", "optimizer.start_time")
