"""`FlightRecorder` and `HangWatch`: callbacks next to `FaultTolerance`, and the arguments that it no longer has."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance, FlightRecorder, HangWatch
from lightning_faulttolerant.errors import OPTIONS_VARIABLE, UnsupportedTrainerError
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.settings import Options
from tests.runs import fit_net


class Asks(Callback):
    """Notes the options that a fit works with."""

    def __init__(self) -> None:
        self.options: Options | None = None

    def on_fit_start(self, trainer: Any, pl_module: object) -> None:
        [own] = [callback for callback in trainer.callbacks if isinstance(callback, FaultTolerance)]
        assert own._session is not None
        self.options = own._session._options


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    """The fit has the options of all three."""
    all_of_them: list[Any] = [FaultTolerance(), FlightRecorder("spike", keep_every=50), HangWatch("off", timeout=600)]
    asks = Asks()
    fit_net([*(all_of_them[number] for number in order), asks], tmp_path, max_epochs=1, limit_train_batches=1)
    found = asks.options
    assert found is not None
    assert (found.rule, found.stop, found.keep_every, found.action, found.timeout) == ("spike", False, 50, "off", 600)


def test_without_them_nothing_is_recorded_or_watched(tmp_path: Path) -> None:
    """The negative control."""
    asks = Asks()
    fit_net([FaultTolerance(), asks], tmp_path, max_epochs=1, limit_train_batches=1)
    assert asks.options is not None
    assert (asks.options.rule, asks.options.keep_every, asks.options.action) == (None, None, None)


def test_the_variable_adds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has neither gets both; what a script passes wins."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(OPTIONS_VARIABLE, "FlightRecorder.keep_every=50, HangWatch.action=off, strict=false")
    asks = Asks()
    fit_net([FlightRecorder("spike"), asks], tmp_path, max_epochs=1, limit_train_batches=1)
    found = asks.options
    assert found is not None
    assert (found.rule, found.keep_every, found.action, found.strict) == ("spike", 50, "off", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FlightRecorder.rul=nan", "there is no option 'FlightRecorder.rul'. The options are FlightRecorder.rule, "),
        ("FlightRecorder.stop=1", "FlightRecorder.stop must be true or false, got '1'"),
        ("FlightRecorder.keep_every=0", "keep_every must be at least 1, got 0"),
    ],
)
def test_the_variable_is_checked(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the fit begins, also if the script has no such callback."""
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}: {message}"):
        fit_net([FaultTolerance()], tmp_path, max_epochs=1)


@pytest.mark.parametrize("kind", [FlightRecorder, HangWatch])
def test_alone_it_says_what_it_needs(kind: Any, tmp_path: Path) -> None:
    """Nothing would be recorded or watched."""
    with pytest.raises(UnsupportedTrainerError, match=f"^{kind.__name__} works only next to FaultTolerance: pass "):
        fit_net([kind()], tmp_path, max_epochs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlightRecorder("inf"), "rule must be one of 'nan', 'spike', a function, or None; got 'inf'"),  # type: ignore[arg-type]
        (lambda: FlightRecorder(None, stop=True), "stop=True has no effect without a rule"),
        (lambda: FlightRecorder(stop=1), "stop must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: FlightRecorder(keep_every=0), "keep_every must be at least 1, got 0"),
        (lambda: HangWatch("wait"), "action must be one of 'off', 'report', 'stop'; got 'wait'"),  # type: ignore[arg-type]
        (lambda: HangWatch(timeout=0.0), "timeout must be positive, got 0.0"),
        (lambda: HangWatch(timeout=float("nan")), "timeout must be positive, got nan"),
        (lambda: HangWatch(timeout="1"), "timeout must be a number, got '1'"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused_at_construction(make: Any, message: str) -> None:
    """Each message names the argument and the value."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


GONE = {
    "record": "FlightRecorder(rule=...)",
    "stop_on_incident": "FlightRecorder(stop=True)",
    "keep_every": "FlightRecorder(None, keep_every=...)",
    "hang": "HangWatch(action=...)",
    "hang_timeout": "HangWatch(timeout=...)",
    "resume_from": "`lightning-faulttolerant run --from STEP -- python train.py`",
    "skip_batches": "`lightning-faulttolerant run --skip EPOCH:BATCH -- python train.py`",
    "ignore_hyperparameters": "`lightning-faulttolerant run --accept hyperparameters.NAME -- python train.py`",
    "ledger": "PL_FAULT_TOLERANT_LEDGER",
    "save_on_exception": "leave it out",
}


@pytest.mark.parametrize("name", GONE)
def test_an_argument_that_has_left_says_where_it_went(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, and in the variable."""
    with pytest.raises(TypeError, match=f"^FaultTolerance has no argument {name}: ") as refused:
        FaultTolerance(**{name: None})  # type: ignore[arg-type]
    assert GONE[name] in str(refused.value)
    monkeypatch.setenv(OPTIONS_VARIABLE, f"{name}=1")
    with pytest.raises(ValueError, match=f"there is no option '{name}'"):
        FaultTolerance()


def test_the_repr_shows_what_differs_from_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a subclass, a copy, and what the variable has set."""
    assert repr(FaultTolerance()) == "FaultTolerance()"
    assert repr(FaultTolerance("here", keep_last=2, strict=False)) == "FaultTolerance(dirpath='here', strict=False)"
    assert repr(FlightRecorder()) == "FlightRecorder()"
    assert repr(FlightRecorder("spike", keep_every=9)) == "FlightRecorder(rule='spike', keep_every=9)"
    assert repr(HangWatch(timeout=60)) == "HangWatch(timeout=60)"

    class Own(FaultTolerance):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(every_n_train_steps=5, **kwargs)

    assert repr(Own(elastic=True)) == "Own(every_n_train_steps=5, elastic=True)"
    monkeypatch.setenv(OPTIONS_VARIABLE, "keep_last=7, HangWatch.action=report")
    copied = copy.deepcopy(pickle.loads(pickle.dumps([FaultTolerance(), HangWatch()])))
    assert repr(copied) == "[FaultTolerance(keep_last=7), HangWatch(action='report')]"


def test_the_front_door_is_small() -> None:
    """A user reads all of it."""
    assert len(inspect.signature(FaultTolerance).parameters) <= 16
    assert len((FaultTolerance.__doc__ or "").split()) <= 350


def test_words_are_literals() -> None:
    """So mypy refuses ``worker_rng="per-sample"``."""
    assert get_type_hints(FaultTolerance.__init__)["worker_rng"] == Literal["capture", "per_sample"]
    assert Literal["nan", "spike"] in get_args(get_type_hints(FlightRecorder.__init__)["rule"])
    assert get_type_hints(HangWatch.__init__)["action"] == Literal["off", "report", "stop"]
