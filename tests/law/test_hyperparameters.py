"""A run whose hyperparameters differ between starts resumes if the difference is text, or if the user accepts it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_faulttolerant.records.requests import ACCEPT_VARIABLE
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.processes import Ended, run
from tests.runs import Net, fit_net
from tests.scripts import autosaves, protected, tell, told, weights


class Named(Net):
    """Has hyperparameters."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.save_hyperparameters(values)


def train(directory: Path, values: dict[str, Any], *faults: Callback, **options: Any) -> None:
    """Fit a module with hyperparameters, and record its weights."""
    trainer = fit_net([protected(**options), *faults], directory, module=Named(**values))
    tell(directory, "weights", weights(trainer))


def killed_and_restarted(directory: Path, first: dict[str, Any], then: dict[str, Any], **options: Any) -> Ended:
    """Run it until it is killed, and again with other hyperparameters."""
    ended = run(lambda: train(directory, first, KillAt(3), **options))
    assert ended.exit_code == -signal.SIGKILL, ended.output
    return run(lambda: train(directory, then, **options), seed=99)


@pytest.mark.usefixtures("whole_reports")
def test_text_that_differs_is_a_note(tmp_path: Path) -> None:
    """The run resumes exactly, and the report names both values."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert run(lambda: train(tmp_path / "whole", {"name": "a"})).exit_code == 0
    ended = killed_and_restarted(tmp_path / "killed", {"o": {"name": "a"}}, {"o": {"name": "b"}})
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert "  note      hyperparameters.o.name: 'a' when it was saved, 'b' now" in ended.output
    assert "NOT EXACT" not in ended.output
    assert told(tmp_path / "killed", "weights") == told(tmp_path / "whole", "weights")


@pytest.mark.parametrize("values", [({"start": 1.5}, {"start": 2.5}), ({"name": None}, {"name": "a"})], ids=str)
def test_other_values_are_refused_with_what_to_do(values: Any, tmp_path: Path) -> None:
    """Another number or flag, or a value instead of ``None``, is refused with advice, and the autosaves stay."""
    refused = killed_and_restarted(tmp_path, *values)
    assert refused.exit_code == 1
    assert "FingerprintMismatchError" in refused.output
    assert f"lightning-faulttolerant run --accept hyperparameters.{next(iter(values[0]))} -- " in refused.output
    assert autosaves(tmp_path) != []


@pytest.mark.usefixtures("whole_reports")
def test_what_was_accepted_once_stays_accepted_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that differs at each start, or values below a name, are accepted once; each report tells of them."""
    values = [{"start": number, "o": {"times": {"a": number}, "rate": 1}} for number in range(3)]
    refused = killed_and_restarted(tmp_path, values[0], values[1])
    assert "--accept hyperparameters.o.times.a --accept hyperparameters.start -- " in refused.output
    monkeypatch.setenv(ACCEPT_VARIABLE, "hyperparameters.o.times, hyperparameters.start")
    accepted = run(lambda: train(tmp_path, values[1], KillAt(1)), seed=99)
    assert "NOT EXACT hyperparameters.start: 0 when it was saved, 1 now" in accepted.output
    monkeypatch.delenv(ACCEPT_VARIABLE)
    last = run(lambda: train(tmp_path, values[2]), seed=98)
    assert last.exit_code == 0, last.output
    assert ": hyperparameters.start: 0 when it was saved, 1 now" in last.output
    assert "NOT EXACT hyperparameters.o.times.a: 1 when it was saved, 2 now" in last.output


def test_no_other_difference_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name covers what is below it, and nothing that only begins with the same letters."""
    monkeypatch.setenv(ACCEPT_VARIABLE, "hyperparameters.start")
    refused = killed_and_restarted(tmp_path, {"started": 1}, {"started": 2})
    assert "run --accept hyperparameters.started -- " in refused.output
    assert refused.exit_code == 1


def test_without_strict_it_is_not_exact(tmp_path: Path) -> None:
    """With ``strict=False`` a number that differs becomes a line of the report."""
    ended = killed_and_restarted(tmp_path, {"start": 1.5}, {"start": 2.5}, strict=False)
    assert ended.exit_code == 0, ended.output
    assert "NOT EXACT hyperparameters.start: 1.5 when it was saved, 2.5 now" in ended.output
