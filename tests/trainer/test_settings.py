"""Bad arguments are refused when the callback is created, with the value and the reason."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.settings import Options


def made(**arguments: Any) -> Options:
    """Return the options of a callback with these arguments."""
    return FaultTolerance(**arguments)._options


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
    ({"auto_resume": None}, "auto_resume must be True or False, got None"),
    ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
    ({"elastic": "x"}, "elastic must be True or False, got 'x'"),
    ({"async_save": 0}, "async_save must be True or False, got 0"),
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
    value = getattr(made(**{name: np.int64(3)}), name)
    assert (value, type(value)) == (3, int)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"keep_last": 1, "overhead_budget": 1.0, "grace_seconds": 0.1},
        {"every_n_train_steps": 1},
        {"train_time_interval": timedelta(seconds=1)},
        {"run_id": "run-1", "dirpath": "here"},
        {"stop_signals": ()},
    ],
)
def test_good_arguments_are_kept(arguments: dict[str, Any]) -> None:
    """Values in range, including the limits, are kept as they are."""
    options = made(**arguments)
    assert all(getattr(options, name) == value for name, value in arguments.items())


def test_signals_are_those_of_the_system() -> None:
    """The names become signals, in their order."""
    options = made(stop_signals=("SIGUSR1", "SIGTERM"))
    assert options.signals == (signal.SIGUSR1, signal.SIGTERM)


def test_signal_that_is_named_twice_is_handled_once() -> None:
    """If the callback took a signal over twice, it would never give the signal back."""
    assert made(stop_signals=("SIGINT", "SIGINT")).signals == (signal.SIGINT,)


def test_options_cant_be_changed() -> None:
    """Checked options can't change."""
    with pytest.raises(AttributeError):
        made().keep_last = 0  # type: ignore[misc]


def test_directory_may_be_a_url() -> None:
    """Paths and file URLs are directories, and other URLs are kept; a URL that Path has broken is refused by name."""
    assert made(dirpath=None).dirpath is None
    assert made(dirpath="runs").dirpath == "runs"
    assert made(dirpath=Path("/runs")).dirpath == "/runs"
    assert made(dirpath="file:///runs").dirpath == "/runs"
    assert made(dirpath="s3://bucket/runs").dirpath == "s3://bucket/runs"
    with pytest.raises(ValueError, match="Pass the URL as a string"):
        made(dirpath=Path("s3://bucket/runs"))


@pytest.mark.parametrize("path", ["~/ft", Path("~/ft"), "file://~/ft"])
def test_tilde_is_the_home_directory(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere in Lightning, `~` is the home directory, for autosaves and for a ledger."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert made(dirpath=path).dirpath == str(tmp_path / "ft")
    monkeypatch.setenv("PL_FAULT_TOLERANT_LEDGER", str(path))
    assert made().ledger == str(tmp_path / "ft")


def test_tilde_in_a_url_stays() -> None:
    """The names in an object store are its own."""
    assert made(dirpath="s3://~/runs").dirpath == "s3://~/runs"
