"""Hydra creates a new output directory at each start, and the same command still continues."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.starts.started import (
    NUM_BATCHES,
    STOPPED,
    Project,
    assert_same_fit,
    assert_starts_over,
    continues,
    plain,
    stopped_twice,
)

FIT = "lr=0.1"
SWEEP = ("hydra_train.py", "-m", "model.lr=0.1,0.2")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts and the configuration."""
    return Project(tmp_path / "project")


def test_a_run_in_a_new_output_directory(project: Project) -> None:
    """A run like those of lightning-hydra-template is stopped twice, and ends with the same weights and metrics."""
    starts = stopped_twice(project, "hydra_train.py")
    whole = plain("hydra_train.py")
    assert_same_fit(whole, starts, FIT)
    assert project.rows() == whole.rows
    [values] = starts[-1].values(FIT)
    assert Path(values["best"]).exists()


@pytest.mark.slow
def test_overrides(project: Project) -> None:
    """The same overrides are the same run."""
    command = ("hydra_train.py", "model.lr=0.05", "+trainer.enable_model_summary=false")
    starts = stopped_twice(project, *command)
    assert_same_fit(plain(*command), starts, "lr=0.05")


@pytest.mark.slow
def test_killed(project: Project) -> None:
    """A run that was killed continues from its last autosave, also in a new output directory."""
    killed = project.start("hydra_train.py", interrupt="KILL@6", sleep=0.5)
    assert killed.exit_code == -signal.SIGKILL
    ended = project.start("hydra_train.py")
    whole = plain("hydra_train.py")
    assert_same_fit(whole, [killed, ended], FIT)
    assert project.rows() == whole.rows


@pytest.mark.slow
def test_other_overrides_start_from_the_beginning(project: Project) -> None:
    """``model.lr=0.2`` does not continue the run with ``model.lr=0.1``."""
    assert project.start("hydra_train.py", "model.lr=0.1", interrupt="TERM@4").exit_code == STOPPED
    ended = project.start("hydra_train.py", "model.lr=0.2")
    assert_starts_over(ended, name="lr=0.2")
    assert ended.weights() == plain("hydra_train.py", "model.lr=0.2").started.weights()


@pytest.mark.slow
def test_a_run_that_ended_normally_is_a_new_run(project: Project) -> None:
    """After a normal end the same command trains everything again."""
    assert project.start("hydra_train.py", interrupt="TERM@4").exit_code == STOPPED
    assert project.start("hydra_train.py").exit_code == 0
    assert_starts_over(project.start("hydra_train.py"), name=FIT)


@pytest.mark.slow
def test_hydra_changes_the_directory(project: Project) -> None:
    """With ``hydra.job.chdir=True`` and a default Trainer, the new working directory is not a new run."""
    command = ("hydra_chdir.py", "hydra.job.chdir=True")
    starts = stopped_twice(project, *command)
    whole = plain(*command)
    assert_same_fit(whole, starts)
    assert project.rows() == whole.rows


@pytest.mark.slow
@pytest.mark.parametrize("job", ["lr=0.1", "lr=0.2"])
def test_a_sweep(job: str, project: Project) -> None:
    """A multirun that is stopped in one of its jobs continues this job, and no job takes the state of another one."""
    starts = stopped_twice(project, *SWEEP, steps=(f"TERM@4@{job}", f"TERM@9@{job}"))
    whole = plain(*SWEEP)
    assert_same_fit(whole, starts, job)
    assert starts[-1].weights() == whole.started.weights()


@pytest.mark.slow
def test_a_sweep_that_is_stopped_in_each_job(project: Project) -> None:
    """A multirun that is stopped in its first job, then in its second one, continues both."""
    first = project.start(*SWEEP, interrupt="TERM@4@lr=0.1")
    second = project.start(*SWEEP, interrupt="TERM@9@lr=0.2")
    third = project.start(*SWEEP)
    assert [first.exit_code, second.exit_code, third.exit_code] == [STOPPED, STOPPED, 0], third.output
    continues(first, second, "lr=0.1")
    continues(second, third, "lr=0.2")
    assert third.num_batches("lr=0.1") == 0, "a job that had come to its end is trained again"
    assert third.num_batches("lr=0.2") < NUM_BATCHES
    assert third.weights() == plain(*SWEEP).started.weights()


@pytest.mark.slow
def test_a_sweep_that_ended_normally_is_a_new_sweep(project: Project) -> None:
    """After a normal end the same sweep trains everything again."""
    assert project.start(*SWEEP, interrupt="TERM@4@lr=0.2").exit_code == STOPPED
    assert project.start(*SWEEP).exit_code == 0
    again = project.start(*SWEEP)
    for job in ("lr=0.1", "lr=0.2"):
        assert_starts_over(again, name=job)
