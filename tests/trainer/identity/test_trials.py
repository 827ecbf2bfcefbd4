"""Whether a script runs several fits: the lines of user code that lead to a fit are checked."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.identity import fingerprint


def asked_in(tmp_path: Path, code: str) -> list[bool]:
    """Return the answers that a script with this code gets; `ask()` stands for `fit`."""
    answers: list[bool] = []
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(code))
    runpy.run_path(
        str(path), init_globals={"ask": lambda: answers.append(fingerprint.is_in_loop())}, run_name="__main__"
    )
    return answers


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ask()", False),
        ("for i in range(1):\n    ask()", True),
        ("for i in range(1):\n    pass\nask()", False),
        ("[ask() for i in range(1)]", True),
        ("{i: ask() for i in range(1)}", True),
        ("def train():\n    ask()\nfor i in range(1):\n    train()", True),
        ("def train():\n    ask()\nfor i in range(1):\n    pass\ntrain()", False),
        ("def train():\n    for i in range(1):\n        pass\n    ask()\ntrain()", False),
        ("def train():\n    for i in range(1):\n        ask()\ntrain()", True),
        ("for i in range(1):\n    def train():\n        ask()\ntrain()", False),
        ("while True:\n    ask()\n    break", False),
        ("def train(numbers):\n    ask()\ntrain([i for i in range(1)])", False),
        ("def train(numbers):\n    ask()\ntrain({i: [j for j in range(1)] for i in range(1)})", False),
        ("def train():\n    ask()\nfor i in range(1): train()", True),
        ("def train():\n    ask()\n    return [1]\nfor i in train():\n    pass", False),
        ("def train():\n    ask()\n    return [1]\n[i for i in train()]", False),
        ("def train(i):\n    ask()\n    return i\nmodels = {\n    i: train(i)\n    for i in range(1)\n}", True),
    ],
)
def test_loops(code: str, expected: bool, tmp_path: Path) -> None:
    """A line in the body of a `for` may run several times; a line after it may not, nor may a line that is retried."""
    assert asked_in(tmp_path, code) == [expected]


def test_no_sweep_here() -> None:
    """Outside of a study, there is neither a sweep nor a trial."""
    assert (fingerprint.sweep(), fingerprint.trial_of()) == (None, None)


def test_study_in_memory() -> None:
    """Its trials are the same ones at each start, so they are fits in their order."""
    optuna = pytest.importorskip("optuna")
    found: list[tuple[str | None, str | None]] = []

    def objective(trial: object) -> float:
        found.append((fingerprint.sweep(), fingerprint.trial_of()))
        return 0.0

    optuna.create_study().optimize(objective, n_trials=1)
    assert found == [(None, None)]


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
