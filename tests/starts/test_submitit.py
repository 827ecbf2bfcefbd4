"""Fits in submitit jobs on this machine: submitted again, they continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import submitit

from tests.starts.started import (
    Project,
    assert_interrupted,
    assert_same_fit,
    assert_starts_over,
    continues,
    plain,
    run_names,
)

FIT = "lr=0.1"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a directory with the scripts; the result of a dead job is not waited for 15 seconds."""
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 2)  # forked processes inherit it
    return Project(tmp_path / "project")


def test_stopped_twice(project: Project) -> None:
    """A job that was stopped continues when the script submits it again."""
    starts = [project.start("cluster.py", "0.1", interrupt=f"TERM@{step}") for step in (4, 9)]
    assert_interrupted(starts[0], 4, FIT)
    assert_interrupted(starts[1], 5, FIT)
    starts.append(project.start("cluster.py", "0.1"))
    assert starts[-1].exit_code == 0, starts[-1].output
    assert_same_fit(plain("cluster.py", "0.1"), starts, FIT)


def test_two_scripts_with_one_folder(project: Project) -> None:
    """Another script that submits the same fit to the same folder trains it from the beginning."""
    first = project.start("cluster.py", "0.1", interrupt="TERM@4")
    assert_interrupted(first, 4, FIT)
    names = run_names(project)
    assert [name.partition("-")[0] for name in names] == ["cluster"], names
    second = project.start("cluster_too.py", "0.1")
    jobs = sorted(path.name for path in project.directory.glob("submitit_logs/*_submitted.pkl"))
    assert len(jobs) == 2, f"submitit names a job by its process id, and two had the same one: {jobs}"
    assert_starts_over(second, name=FIT)
    third = project.start("cluster.py", "0.1")
    assert third.exit_code == 0, third.output
    continues(first, third, FIT)


def test_two_jobs_at_once(project: Project) -> None:
    """Two jobs of one script don't make each other fail, and the one that was stopped continues."""
    command = ("cluster.py", "0.1", "0.2")
    first = project.start(*command, interrupt="TERM@4@lr=0.2", sleep=0.1)
    assert_interrupted(first, 4, "lr=0.2")
    ended = project.start(*command)
    assert ended.exit_code == 0, ended.output
    continues(first, ended, "lr=0.2")
    assert {**first.weights(), **ended.weights()} == plain(*command).started.weights()


def test_a_job_that_ended_normally_is_a_new_run(tmp_path: Path) -> None:
    """After a normal end, the same job trains everything again, here without forks."""
    project = Project(tmp_path / "project", forks=False)
    assert_interrupted(project.start("cluster.py", "0.1", interrupt="TERM@4"), 4, FIT)
    assert project.start("cluster.py", "0.1").exit_code == 0
    assert_starts_over(project.start("cluster.py", "0.1"), name=FIT)
