"""The arguments of the callbacks, from a script and from a variable, and the variable that adds the callback."""

from __future__ import annotations

import copy
import pickle
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import FaultTolerance, FlightRecorder, HangWatch
from lightning_faulttolerant.errors import OPTIONS_VARIABLE, UnsupportedTrainerError
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.process import VARIABLE, read_switch
from lightning_faulttolerant.trainer.settings import option_names
from lightning_faulttolerant.trainer.switch import callbacks_from_environment
from tests.processes import run
from tests.runs import fit_net

MINUTES = timedelta(minutes=5)
REFUSED = [
    *({"run_id": value} for value in ("a/b", "", 5)),
    *({"keep_last": value} for value in (0, 1.5, True, None)),
    {"every_n_train_steps": 0},
    {"every_n_train_steps": 5, "train_time_interval": MINUTES},
    *({"train_time_interval": value} for value in (timedelta(0), 5)),
    *({"overhead_budget": value} for value in (0.0, 1.01, float("nan"), "1%")),
    *({"grace_seconds": value} for value in (0.0, float("nan"), True)),
    *({"stop_signals": value} for value in (("SIGKILL",), ("SIGCHLD",), ("TERM",), "SIGTERM")),
    *({"dirpath": value} for value in (5, Path("s3://bucket/runs"))),
    *({"deadline": value} for value in (timedelta(0), 3600, "12:00", "tomorrow", "0:00:00")),
    {"auto_resume": None},
    {"strict": "yes"},
    {"elastic": "x"},
    {"async_save": 0},
    {"worker_rng": "sample"},
]
GONE = (
    *("record", "stop_on_incident", "keep_every", "hang", "hang_timeout", "resume_from", "skip_batches"),
    *("ignore_hyperparameters", "ledger", "save_on_exception"),
)
OF_OTHERS: list[tuple[Any, dict[str, Any]]] = [
    *((FlightRecorder, {"rule": value}) for value in ("inf", 3)),
    (FlightRecorder, {"rule": None, "stop": True}),
    (FlightRecorder, {"stop": 1}),
    (FlightRecorder, {"keep_every": 0}),
    (HangWatch, {"action": "wait"}),
    *((HangWatch, {"timeout": value}) for value in (0.0, float("nan"), "1")),
]
CALLS = [
    *((FaultTolerance, arguments) for arguments in REFUSED),
    *((FaultTolerance, {name: None}) for name in GONE),
    *OF_OTHERS,
]


@pytest.mark.parametrize(("kind", "arguments"), CALLS, ids=[f"{kind.__name__}-{given}" for kind, given in CALLS])
def test_bad_argument_is_refused_at_construction(
    kind: Any, arguments: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    """An invalid value, one of another type, and an argument that has left raise with the name and the value."""
    with pytest.raises((TypeError, ValueError)) as refused:
        kind(**arguments)
    assert f"{refused.type.__name__}: {refused.value}" == snapshot


BAD_TEXTS = (
    "every_n_steps=50",
    *("strict=maybe", "strict=none", "strict", "strict=true, strict=false"),
    *("every_n_train_steps=5.5", "keep_last=", "overhead_budget=low", "train_time_interval=300", "dirpath="),
    *('dirpath="/a, strict=false', 'dirpath="/a" b'),
    *("keep_last=0", "every_n_train_steps=5, train_time_interval=0:05:00"),
)


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_bad_text_of_the_variable_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Creating the callback or the Trainer raises an error with the variable, the mistake, and the correct form."""
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}") as refused:
        FaultTolerance()
    assert str(refused.value) == snapshot
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}"):
        Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize("text", ["FlightRecorder.rul=nan", "FlightRecorder.stop=1"])
def test_bad_text_about_another_callback_is_refused_when_the_fit_begins(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Also if the script has no such callback."""
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{OPTIONS_VARIABLE}") as refused:
        fit_net([FaultTolerance()], tmp_path, max_epochs=1)
    assert str(refused.value) == snapshot


def test_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows what differs from the defaults; also of other callbacks, a subclass, a copy, and the variable."""
    assert (
        repr(FaultTolerance(keep_last=2, run_id="a", stop_signals=())) == "FaultTolerance(run_id='a', stop_signals=())"
    )
    assert "keep_last=np.int64(3)" in repr(FaultTolerance(keep_last=np.int64(3)))
    assert repr(FlightRecorder("spike", keep_every=9)) == "FlightRecorder(rule='spike', keep_every=9)"
    assert repr(HangWatch(timeout=60)) == "HangWatch(timeout=60)"

    class Own(FaultTolerance):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(every_n_train_steps=5, **kwargs)

    assert repr(Own(elastic=True)) == "Own(every_n_train_steps=5, elastic=True)"
    monkeypatch.setenv(OPTIONS_VARIABLE, "keep_last=7, HangWatch.action=report")
    copied = copy.deepcopy(pickle.loads(pickle.dumps([FaultTolerance(), HangWatch()])))
    assert repr(copied) == "[FaultTolerance(keep_last=7), HangWatch(action='report')]"


TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("  ", {}),
    ("every_n_train_steps=50, strict=false", {"every_n_train_steps": 50, "strict": False}),
    ("async_save=true,dirpath=s3://bucket/a?x=1&y=2", {"async_save": True, "dirpath": "s3://bucket/a?x=1&y=2"}),
    ("every_n_train_steps=none,dirpath=None", {}),
    ("train_time_interval=0:05:00", {"train_time_interval": MINUTES}),
    ('train_time_interval="1 day, 2:00:00"', {"train_time_interval": timedelta(days=1, hours=2)}),
    ("deadline=2099-12-31 18:30:00,", {"deadline": "2099-12-31 18:30:00"}),
    ("stop_signals=SIGTERM|SIGUSR1", {"stop_signals": ("SIGTERM", "SIGUSR1")}),
    ("stop_signals=", {"stop_signals": ()}),
    ("overhead_budget=0.05, grace_seconds=90", {"overhead_budget": 0.05, "grace_seconds": 90.0}),
    ('dirpath="/a, b=c", keep_last=3', {"dirpath": "/a, b=c", "keep_last": 3}),
    ("dirpath='/my \"own\"'", {"dirpath": '/my "own"'}),
    ("strict=FALSE,\n elastic = True ", {"strict": False, "elastic": True}),
    ("run_id=a, incremental=true, auto_resume=false", {"run_id": "a", "incremental": True, "auto_resume": False}),
    ("worker_rng=per_sample, trust_autosaves=true", {"worker_rng": "per_sample", "trust_autosaves": True}),
]


@pytest.mark.parametrize("kind", [FlightRecorder, HangWatch])
def test_alone_it_says_what_it_needs(kind: Any, tmp_path: Path) -> None:
    """Nothing would be recorded or watched."""
    with pytest.raises(UnsupportedTrainerError, match=f"^{kind.__name__} works only next to FaultTolerance: pass "):
        fit_net([kind()], tmp_path, max_epochs=1)


@pytest.mark.parametrize(("text", "arguments"), TEXTS)
def test_text_of_the_variable_means_these_arguments(
    text: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers, numbers, booleans, none, times, lists, and quoted texts with commas get the right types."""
    expected = repr(FaultTolerance(**arguments))
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    assert repr(FaultTolerance()) == expected


def test_each_argument_is_in_a_text() -> None:
    """This holds for every argument of the callback, including future ones."""
    assert {
        name for name in option_names(FaultTolerance.__init__) if not any(name in text for text, _ in TEXTS)
    } == set()


def test_what_is_passed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A passed argument wins even if it equals the default, is passed by position, or is None, or contradicts."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "dirpath=/by-variable, strict=false, keep_last=5, every_n_train_steps=7")
    passed = FaultTolerance("/own", strict=True, every_n_train_steps=None)
    assert repr(passed) == "FaultTolerance(dirpath='/own', keep_last=5)"
    monkeypatch.setenv(OPTIONS_VARIABLE, "every_n_train_steps=7")
    assert repr(FaultTolerance(train_time_interval=MINUTES)) == f"FaultTolerance(train_time_interval={MINUTES!r})"


@pytest.mark.parametrize("path", [Path("~/ft"), "file://~/ft"], ids=str)
def test_tilde_is_the_home_directory(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere in Lightning, for autosaves and for a ledger."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(LEDGER_VARIABLE, str(path) + ".jsonl")
    fit_net([FaultTolerance(path, run_id="run")], tmp_path, max_epochs=1, limit_train_batches=1)
    assert (tmp_path / "ft" / "run").is_dir()
    assert (tmp_path / "ft.jsonl").exists()


# The variable that adds the callback to every Trainer, or switches it off

MEANINGS = {None: "unset", "": "unset", "1": "on", "AUTOMATIC": "on", "0": "off", "Manual": "manual"}


def test_each_value_has_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, automatic and manual switch on, 0 off; unset and empty leave it to the script; any other is an error."""
    for value, meaning in MEANINGS.items():
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        assert read_switch() == meaning
        assert len(callbacks_from_environment()) == (meaning in ("on", "manual"))
    monkeypatch.setenv(LEDGER_VARIABLE, "ledger.jsonl")  # a run that is off is compared with one that is on
    monkeypatch.setenv(VARIABLE, "0")
    assert len(callbacks_from_environment()) == 1
    for value in ("2", "yes", " 1", "off"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(ValueError, match=f"must be 1 or automatic .*, manual, 0 .*, or unset; got '{value}'"):
            read_switch()


class Holds(Callback):
    """Holds a callback of ours, and calls none of its hooks."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_held_one_stops_and_continues_in_its_files(tmp_path: Path) -> None:
    """A fit whose callback is inside another one is stopped, and continues in the version of its logger."""

    def fit(*faults: Callback) -> None:
        held = Holds(FaultTolerance(run_id="held"))
        fit_net([held, *faults], tmp_path, logger=CSVLogger(tmp_path), max_epochs=1)

    assert run(lambda: fit(KillAt(3, signum=signal.SIGTERM))).exit_code == 143
    assert "Resumed exactly before batch" in run(fit).output
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def test_one_that_another_callback_creates_later_is_refused(tmp_path: Path) -> None:
    """A callback of ours that nobody had when the Trainer was created is refused in one sentence."""

    class Creates(Callback):
        def setup(self, *arguments: Any, **named: Any) -> None:
            FaultTolerance(tmp_path / "own").setup(*arguments, **named)

    with pytest.raises(UnsupportedTrainerError, match="nor held by one, when the Trainer was created"):
        fit_net([Creates()], tmp_path)


@pytest.mark.parametrize(
    ("value", "has_own", "expected"),
    [("1", True, {"own/mine"}), ("automatic", False, {"fault_tolerance/by-variable"}), ("0", True, set())],
)
def test_who_acts(
    value: str, has_own: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script's callback acts, with its arguments, else that of the environment; with 0, none writes a file."""
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setenv("PL_FAULT_TOLERANT_RUN_ID", "by-variable")
    saved: set[str] = set()

    class Looks(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            saved.update(str(path.parents[1].relative_to(tmp_path)) for path in tmp_path.rglob("autosave-*.ckpt"))

    own = [FaultTolerance(tmp_path / "own", run_id="mine")] if has_own else []
    fit_net([*own, Looks()], tmp_path, limit_train_batches=1, limit_val_batches=0, max_epochs=1)
    assert saved == expected
    assert (tmp_path / "own").exists() == ("own/mine" in expected)
