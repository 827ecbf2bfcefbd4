"""An Optuna study that is started again: a repeated trial continues, and a new trial is a new fit."""

from __future__ import annotations

import time
from pathlib import Path

import optuna
import pytest

from tests.starts.started import NUM_BATCHES, STOPPED, Project, Started, continues, plain

OPTIONS = [(), ("--hyperparameters",), ("--seed",), ("--hyperparameters", "--seed")]


STALE_SECONDS = 3.5
"""The time after which Optuna takes a trial of the study for dead."""


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import SQLAlchemy and Alembic, which a storage does, in the process from which the scripts are forked."""
    optuna.storages.RDBStorage("sqlite:///:memory:").remove_session()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


def weights_by_rate(*starts: Started) -> dict[float, str]:
    """Return the final weights of the finished trials by their learning rate."""
    finished = [event for start in starts for event in start.events if event["event"] == "finished"]
    return {event["lr"]: event["weights"] for event in finished}


def assert_are_new(started: Started, names: list[str]) -> None:
    """Assert that trials were trained from the beginning to the end."""
    for name in names:
        assert started.first(name)["step"] == 0, started.output
        assert started.num_batches(name) == NUM_BATCHES, started.output


CASES = [
    pytest.param(options, trial, id=f"{'+'.join(options) or 'plain'}-{trial}")
    for options in OPTIONS
    for trial in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "trial"), CASES)
def test_a_trial_that_is_run_again_continues(options: tuple[str, ...], trial: int, project: Project) -> None:
    """Stopped twice in one trial, the study finishes, the trial with the same values continues, and others are new."""
    command = ("study.py", "--retry", *options)
    first = project.start(*command, interrupt=f"TERM@4@trial-{trial}")
    time.sleep(STALE_SECONDS)
    second = project.start(*command, interrupt=f"TERM@9@trial-{trial + 1}")
    time.sleep(STALE_SECONDS)
    third = project.start(*command)
    assert [first.exit_code, second.exit_code, third.exit_code] == [STOPPED, STOPPED, 0], third.output
    continues(first, second, f"trial-{trial}", renamed=f"trial-{trial + 1}")
    continues(second, third, f"trial-{trial + 1}", renamed=f"trial-{trial + 2}")
    assert second.names() == [f"trial-{trial + 1}"]
    assert third.names() == [f"trial-{number}" for number in range(trial + 2, 5)]
    assert third.num_batches(f"trial-{trial + 2}") < NUM_BATCHES - 4
    assert_are_new(third, [f"trial-{number}" for number in range(trial + 3, 5)])
    if "--seed" in options:
        assert weights_by_rate(first, third) == weights_by_rate(plain(*command).started)


@pytest.mark.slow
@pytest.mark.parametrize("trial", [0, 1])
@pytest.mark.parametrize("options", [(), ("--hyperparameters",)])
def test_new_trials_after_one_that_was_stopped(options: tuple[str, ...], trial: int, project: Project) -> None:
    """If the stopped trial is not run again, the next start does new ones from the beginning, without an error."""
    command = ("study.py", *options)
    assert project.start(*command, interrupt=f"TERM@4@trial-{trial}").exit_code == STOPPED
    second = project.start(*command, interrupt=f"TERM@9@trial-{trial + 2}")
    assert second.exit_code == STOPPED, second.output
    assert_are_new(second, [f"trial-{trial + 1}"])
    third = project.start(*command)
    assert third.exit_code == 0, third.output
    assert third.first()["name"] == f"trial-{trial + 3}"
    assert_are_new(third, third.names())


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--seed",), ("--hyperparameters", "--seed")])
def test_new_trials_with_a_fixed_seed(options: tuple[str, ...], project: Project) -> None:
    """Equal random states do not merge two trials, and each ends with the weights of its own values."""
    command = ("study.py", *options)
    first = project.start(*command, interrupt="TERM@4@trial-1")
    assert first.exit_code == STOPPED, first.output
    second = project.start(*command)
    assert second.exit_code == 0, second.output
    assert_are_new(second, ["trial-2"])  # the last one has the values of the stopped trial, and may continue it
    assert weights_by_rate(first, second) == weights_by_rate(plain(*command).started)
