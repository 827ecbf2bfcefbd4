"""A run whose hyperparameters differ between starts resumes if the difference is text, or if the user allows it."""

from __future__ import annotations

import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_faulttolerant.trainer.recorder import KillAt
from tests.processes import Ended, run
from tests.runs import Net, fit_net
from tests.scripts import autosaves, protected, tell, told, weights

HOLD = "Some hyperparameters hold the time or the process id"


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
    assert "name it in FaultTolerance(ignore_hyperparameters=(...))" in refused.output
    assert autosaves(tmp_path) != []


def test_ignored_values_may_differ(tmp_path: Path) -> None:
    """Values that the option names, and values below them, are not compared."""
    names = ("start", "o.times")
    first = {"start": 1.5, "o": {"times": {"a": 1}, "rate": 1}}
    ended = killed_and_restarted(
        tmp_path, first, {"start": 2.5, "o": {"times": {"a": 2}, "rate": 1}}, ignore_hyperparameters=names
    )
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert "hyperparameters." not in ended.output


def test_without_strict_it_is_not_exact(tmp_path: Path) -> None:
    """With ``strict=False`` a number that differs becomes a line of the report."""
    ended = killed_and_restarted(tmp_path, {"start": 1.5}, {"start": 2.5}, strict=False)
    assert ended.exit_code == 0, ended.output
    assert "NOT EXACT hyperparameters.start: 1.5 when it was saved, 2.5 now" in ended.output


def test_time_is_named_at_the_first_save_of_the_first_start(tmp_path: Path) -> None:
    """A hyperparameter with a time is named once, at the first save; a start that resumes does not repeat it."""
    values = {"start": time.time(), "name": f"{datetime.now():%Y-%m-%d_%H-%M-%S}", "seed": 2024}
    first = run(lambda: train(tmp_path, values, KillAt(3), ignore_hyperparameters=("seed",)))
    assert first.output.count(HOLD) == 1
    assert "ignore_hyperparameters=('start',)" in first.output
    ended = run(lambda: train(tmp_path, values), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output
    assert HOLD not in ended.output


def test_nothing_is_said_of_common_values(tmp_path: Path) -> None:
    """A run with ordinary hyperparameters prints no advice."""
    ended = run(lambda: train(tmp_path, {"seed": 2024, "size": 1e9, "name": "resnet-50", "layers": [1, 2]}))
    assert ended.exit_code == 0, ended.output
    assert HOLD not in ended.output
