"""``PL_FAULT_TOLERANT_OPTIONS`` sets each argument by name; a script's arguments win; errors are refused."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import OPTIONS_VARIABLE
from lightning_faulttolerant.records.requests import ACCEPT_VARIABLE
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.settings import option_names, read_options
from tests.faults import RaiseIn
from tests.processes import run
from tests.runs import fit_net, make_trainer

NAMES = option_names(FaultTolerance.__init__)


def read(text: str) -> dict[str, Any]:
    """Return the arguments that a text sets."""
    return read_options(FaultTolerance.__init__, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        (
            "every_n_train_steps=50, strict=false, async_save=true, dirpath=s3://bucket/folder",
            {"every_n_train_steps": 50, "strict": False, "async_save": True, "dirpath": "s3://bucket/folder"},
        ),
        ("every_n_train_steps=none,dirpath=None", {"every_n_train_steps": None, "dirpath": None}),
        ("train_time_interval=0:05:00", {"train_time_interval": timedelta(minutes=5)}),
        ('train_time_interval="1 day, 2:00:00"', {"train_time_interval": timedelta(days=1, hours=2)}),
        ("deadline=4:00:00", {"deadline": "4:00:00"}),
        ("deadline=2099-12-31 18:30:00,", {"deadline": "2099-12-31 18:30:00"}),
        ("stop_signals=SIGTERM|SIGUSR1", {"stop_signals": ("SIGTERM", "SIGUSR1")}),
        ("stop_signals=", {"stop_signals": ()}),
        ("overhead_budget=0.05, grace_seconds=90", {"overhead_budget": 0.05, "grace_seconds": 90.0}),
        ("dirpath=s3://bucket/a?x=1&y=2", {"dirpath": "s3://bucket/a?x=1&y=2"}),
        ('dirpath="/a, b=c", keep_last=3', {"dirpath": "/a, b=c", "keep_last": 3}),
        ("dirpath='/my \"own\"'", {"dirpath": '/my "own"'}),
        ("strict=TRUE,\n elastic = True ", {"strict": True, "elastic": True}),
    ],
)
def test_values_have_the_types_of_the_signature(text: str, expected: dict[str, Any]) -> None:
    """Whole numbers, numbers, booleans, none, times, lists, and quoted texts with commas get the right types."""
    found = read(text)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in expected.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "every_n_steps=50",
            f"there is no option 'every_n_steps'. The options are {', '.join(NAMES)}, FlightRecorder....",
        ),
        ("strict=maybe", "strict must be true or false, got 'maybe'"),
        ("strict=1", "strict must be true or false, got '1'"),
        ("strict=none", "strict must be true or false, got 'none'"),
        ("every_n_train_steps=5.5", "every_n_train_steps must be none or a whole number, got '5.5'"),
        ("keep_last=", "keep_last must be a whole number, got ''"),
        ("overhead_budget=low", "overhead_budget must be none or a number, got 'low'"),
        ("train_time_interval=300", "train_time_interval must be none or a time such as 0:05:00"),
        ("dirpath=", "dirpath must be none or a text that is not empty"),
        ("strict", "must be pairs of name=value, separated by commas"),
        ('dirpath="/a, strict=false', "must be pairs of name=value, separated by commas"),
        ('dirpath="/a" b', "must be pairs of name=value, separated by commas"),
        ("strict=true strict=false", "strict must be true or false, got 'true strict=false'"),
        ("strict=true, strict=false", "gives strict twice"),
    ],
)
def test_wrong_names_and_values_are_refused(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating the callback or the Trainer raises an error with the variable, the mistake, and the correct form."""
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}") as refused:
        FaultTolerance()
    assert message in str(refused.value)
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}"):
        Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep_last=0", "keep_last must be at least 1, got 0"),
        ("worker_rng=sample", 'worker_rng must be "capture" or "per_sample"'),
        ("stop_signals=SIGNONE", "which is not a signal on this system"),
        ("deadline=tomorrow", "deadline is 'tomorrow'"),
        ("every_n_train_steps=5, train_time_interval=0:05:00", "contradict each other"),
    ],
)
def test_values_are_checked_as_arguments_are(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid value of the right type is refused by the same check, and the error names the variable."""
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}: .*{message}"):
        FaultTolerance()


def test_error_of_an_argument_does_not_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument of the script gives the same error as without the variable."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "strict=false")
    with pytest.raises(ValueError, match=r"^keep_last must be"):
        FaultTolerance(keep_last=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep'"):
        FaultTolerance(keep=3)  # type: ignore[call-arg]


VALUES = {
    "bool": "true",
    "int": "2",
    "float": "0.5",
    "timedelta": "0:05:00",
    "Sequence": "SIGTERM",
    "str": "mine",
    "Literal": "capture",
}


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_can_be_set(name: str) -> None:
    """This holds for every argument of the callback, including future ones."""
    annotation = str(inspect.signature(FaultTolerance).parameters[name].annotation)
    value = "4:00:00" if name == "deadline" else next(text for kind, text in VALUES.items() if kind in annotation)
    assert name in read(f"{name}={value}")


def options_of(callback: FaultTolerance) -> Any:
    """Return the arguments that a callback works with."""
    return callback._options


def test_what_is_passed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A passed argument wins even if it equals the default, is passed by position, or is None."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "dirpath=/by-variable, strict=false, keep_last=5, every_n_train_steps=7")
    options = options_of(FaultTolerance("/own", strict=True, every_n_train_steps=None))
    assert (options.dirpath, options.strict, options.every_n_train_steps) == ("/own", True, None)
    assert options.keep_last == 5
    assert options_of(FaultTolerance()).dirpath == "/by-variable"


def test_what_contradicts_an_argument_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that saves by time does so, whatever number of steps the variable sets."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "every_n_train_steps=7")
    options = options_of(FaultTolerance(train_time_interval=timedelta(minutes=1)))
    assert (options.every_n_train_steps, options.train_time_interval) == (None, timedelta(minutes=1))


def test_callback_of_the_variable_has_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that adds no callback saves where and how the variable says."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(OPTIONS_VARIABLE, f"dirpath='{tmp_path}/a, b', run_id=by-variable, every_n_train_steps=2")
    [callback] = [found for found in make_trainer([], tmp_path).callbacks if isinstance(found, FaultTolerance)]
    assert options_of(callback).every_n_train_steps == 2
    fit_net([], tmp_path, max_epochs=1, limit_val_batches=0)
    assert list((tmp_path / "a, b" / "by-variable").rglob("autosave-*.ckpt"))


def test_children_have_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that a script starts reads the same variable."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "keep_last=9")

    def main() -> None:
        assert os.environ[OPTIONS_VARIABLE]
        assert options_of(FaultTolerance()).keep_last == 9

    ended = run(main)
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("by_variable", [False, True])
def test_refusal_names_what_can_be_set(by_variable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A refusal names the command that accepts the difference; what it sets works."""
    if by_variable:
        monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(OPTIONS_VARIABLE, f"dirpath={tmp_path}/saves, run_id=run")

    def main(*others: Callback, accumulate: int = 1) -> None:
        callbacks = [] if by_variable else [FaultTolerance()]
        fit_net([*callbacks, *others], tmp_path, accumulate_grad_batches=accumulate)

    assert "ZeroDivisionError" in run(lambda: main(RaiseIn("on_after_backward", 3))).output
    refused = run(lambda: main(accumulate=2))
    assert refused.exit_code == 1
    assert "FingerprintMismatchError" in refused.output
    assert "  lightning-faulttolerant run --accept trainer.accumulate_grad_batches -- " in refused.output
    monkeypatch.setenv(ACCEPT_VARIABLE, "trainer.accumulate_grad_batches")
    ended = run(lambda: main(accumulate=2))
    assert ended.exit_code == 0, ended.output
    assert "Resumed NOT EXACTLY" in ended.output
