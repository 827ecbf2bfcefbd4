"""The environment variable adds the callback to every Trainer, or switches it off; other values are refused."""

from __future__ import annotations

import signal
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.process import VARIABLE, is_switched_off, read_switch
from lightning_faulttolerant.trainer.switch import callbacks_from_environment
from tests.processes import run
from tests.runs import fit_net


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (None, "unset"),
        ("", "unset"),
        ("1", "on"),
        ("automatic", "on"),
        ("AUTOMATIC", "on"),
        ("0", "off"),
        ("manual", "manual"),
        ("Manual", "manual"),
    ],
)
def test_each_value_has_its_meaning(value: str | None, meaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, automatic and manual switch on, 0 switches off; unset and empty leave it to the script."""
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert read_switch() == meaning
    assert is_switched_off() is (meaning == "off")
    assert len(callbacks_from_environment()) == (meaning in ("on", "manual"))


@pytest.mark.parametrize("value", ["2", "yes", "true", " 1", "off"])
def test_other_values_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid value is an error that shows it and names the valid ones; it never silently switches off."""
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"must be 1 or automatic .*, manual, 0 .*, or unset; got '{value}'"):
        read_switch()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_entry_point_is_installed(package: str) -> None:
    """The installed package offers its callback in the group of each Lightning package, under this package's name."""
    [found] = [e for e in entry_points(group=f"{package}.callbacks_factory") if "faulttolerant" in e.name]
    assert found.load() is callbacks_from_environment


def ours(trainer: Trainer) -> list[FaultTolerance]:
    """Return a trainer's callbacks of this package."""
    return [callback for callback in trainer.callbacks if isinstance(callback, FaultTolerance)]


def fitted(callbacks: list[FaultTolerance], directory: Path) -> list[Path]:
    """Fit for a batch and return the directories of the runs that saved during the fit."""
    found: list[Path] = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer: object, *_: object) -> None:
            found.extend(path.parent.parent for path in directory.rglob("autosave-*.ckpt"))

    fit_net([*callbacks, Looking()], directory, limit_train_batches=1, limit_val_batches=0, max_epochs=1)
    return sorted(set(found))


def test_only_one_of_two_acts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the script and the environment both add one, the script's acts, with its arguments; the other does nothing."""
    monkeypatch.setenv(VARIABLE, "1")
    callback = FaultTolerance(tmp_path / "own", run_id="switch-both")
    assert fitted([callback], tmp_path) == [tmp_path / "own" / "switch-both"]


class Holds(Callback):
    """Holds a callback of ours, and calls none of its hooks."""

    def __init__(self, held: Any) -> None:
        self.held = held


class PassesOn(Holds):
    """Calls the hooks of the callback that it holds, as scripts do that know no better way."""

    def setup(self, *arguments: Any, **named: Any) -> None:
        self.held.setup(*arguments, **named)

    def on_save_checkpoint(self, *arguments: Any) -> None:
        self.held.on_save_checkpoint(*arguments)

    def on_exception(self, *arguments: Any) -> None:
        self.held.on_exception(*arguments)

    def teardown(self, *arguments: Any, **named: Any) -> None:
        self.held.teardown(*arguments, **named)


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

    class Creates(PassesOn):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.held = FaultTolerance(tmp_path / "own")
            super().setup(trainer, pl_module, stage)

    with pytest.raises(UnsupportedTrainerError, match="nor held by one, when the Trainer was created"):
        fitted([Creates(None)], tmp_path)


def test_the_environments_acts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If only the environment adds one, it acts, in the default directory, under the run id of the environment."""
    monkeypatch.setenv(VARIABLE, "automatic")
    monkeypatch.setenv("PL_FAULT_TOLERANT_RUN_ID", "switch-env")
    assert fitted([], tmp_path) == [tmp_path / "fault_tolerance" / "switch-env"]


def test_zero_switches_off_what_was_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With 0 the callback does nothing, even if the script has added it: no file, no directory."""
    monkeypatch.setenv(VARIABLE, "0")
    assert fitted([FaultTolerance(tmp_path / "own", run_id="switch-off")], tmp_path) == []
    assert not (tmp_path / "own").exists()
