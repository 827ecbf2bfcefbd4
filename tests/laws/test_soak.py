"""The soak itself: it strikes, it repeats, and it sees what is wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.laws import rows
from tests.laws.rows import Net
from tests.laws.soak import KINDS, Trial, new_trial, run_trial


def test_trial_of_a_seed_is_always_the_same() -> None:
    """A seed decides rows, strikes, and ranks; over many seeds, each kind of strike comes."""
    trials = [new_trial(seed) for seed in range(100)]
    assert trials == [new_trial(seed) for seed in range(100)]
    assert {kind for trial in trials for kind in trial.kinds} == set(KINDS)


@pytest.mark.parametrize("kinds", [["SIGKILL of all", "two starts"], ["full disk", "damaged autosave"]], ids=str)
def test_trial_is_exact(kinds: list[str], tmp_path: Path) -> None:
    """A training that continues exactly leaves nothing."""
    outcomes = run_trial(Trial(seed=1, rows=["Outputs", "shuffled"], kinds=kinds, num_ranks=1), tmp_path / "failures")
    assert outcomes["exact"] == 1
    assert not (tmp_path / "failures").exists()


class Clock(Net):
    """Trains on the time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch + time.time() % 1, batch_idx)


def test_wrong_trial_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that never does the same twice is wrong, and its directory says how to repeat it."""
    monkeypatch.setitem(rows._rows, "Clock", rows.Row(name="Clock", module=Clock))
    outcomes = run_trial(Trial(seed=3, rows=["Clock"], kinds=["SIGKILL of all"], num_ranks=1), tmp_path)
    assert outcomes == {"wrong": 1}
    kept = tmp_path / "trial-3"
    assert json.loads((kept / "trial.json").read_text())["rows"] == ["Clock"]
    assert f"make soak TRIAL={kept}" in capsys.readouterr().out
