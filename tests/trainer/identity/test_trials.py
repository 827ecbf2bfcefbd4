"""Whether a script runs several fits: the lines of user code that lead to a fit are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.identity import fingerprint


def test_no_sweep_here() -> None:
    """Outside of a study, there is neither a sweep nor a trial."""
    assert (fingerprint.sweep(), fingerprint.trial_of()) == (None, None)


def test_study_in_a_database(tmp_path: Path) -> None:
    """Its trials continue at each start: each has a name, and a retried trial has the name of the first try."""
    optuna = pytest.importorskip("optuna")
    found: list[tuple[str | None, str | None]] = []

    def objective(trial: object) -> float:
        found.append((fingerprint.sweep(), fingerprint.trial_of()))
        return 0.0

    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="tiny")
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, system_attrs={"failed_trial": 0}))
    study.optimize(objective, n_trials=2)
    assert found == [("optuna", "tiny/0"), ("optuna", "tiny/2")]
