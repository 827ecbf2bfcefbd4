"""The environment variable adds the callback to every Trainer, or switches it off; other values are refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.process import VARIABLE, read_switch
from lightning_faulttolerant.trainer.switch import callbacks_from_environment
from tests.processes import run
from tests.runs import fit_net

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
