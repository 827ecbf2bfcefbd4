"""The messages of the log and the command line about interrupted runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.starts.started import STOPPED, Project, assert_starts_over, continues, run_names

SCRIPTS = ["train.py", "timed.py", "hydra_train.py"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


def interrupted(project: Project, *command: str) -> str:
    """Start a script and stop it, and return the name of the run."""
    before = run_names(project)
    assert project.start(*command, interrupt="TERM@4").exit_code == STOPPED
    [name] = [name for name in run_names(project) if name not in before]
    return name


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resume_says_from_what_and_how_to_start_over(script: str, project: Project) -> None:
    """One line names the run that continues and the command that discards it, but not at a first start."""
    first = project.start(script, interrupt="TERM@4")
    assert not first.lines("discard")
    [name] = run_names(project)
    second = project.start(script)
    assert second.exit_code == 0, second.output
    [line] = second.lines("lightning-faulttolerant discard")
    assert name in line


@pytest.mark.slow
def test_a_new_start_names_the_interrupted_run_of_the_script(project: Project) -> None:
    """One line names the run that this start does not continue, but only as long as the run exists."""
    name = interrupted(project, "train.py", "--lr", "0.1")
    second = project.start("train.py", "--lr", "0.2")
    assert_starts_over(second)
    [_] = second.lines(name)
    assert project.start("train.py", "--lr", "0.1").exit_code == 0
    third = project.start("train.py", "--lr", "0.2")
    assert_starts_over(third)
    assert not third.lines(name)


@pytest.mark.slow
def test_another_script_is_not_named(project: Project) -> None:
    """The interrupted run of another script is not mentioned."""
    name = interrupted(project, "train.py")
    second = project.start("train_too.py")
    assert_starts_over(second)
    assert not second.lines(name)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_list_without_an_argument(script: str, project: Project) -> None:
    """``lightning-faulttolerant list`` shows the interrupted run of the script's directory, and then as finished."""
    nothing = project.tool("list")
    assert nothing.returncode == 1, nothing.stdout + nothing.stderr
    name = interrupted(project, script)
    listed = project.tool("list")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert name in listed.stdout
    assert "finished" not in listed.stdout
    assert project.start(script).exit_code == 0
    listed = project.tool("list")
    assert re.search(rf"{name}\n +finished ", listed.stdout), listed.stdout


@pytest.mark.parametrize("script", ["train.py", pytest.param("timed.py", marks=pytest.mark.slow)])
def test_discard(script: str, project: Project) -> None:
    """After ``discard`` with the name that ``list`` shows, the next start starts from scratch."""
    name = interrupted(project, script)
    assert name in project.tool("list").stdout
    discarded = project.tool("discard", name)
    assert discarded.returncode == 0, discarded.stdout + discarded.stderr
    assert name not in project.tool("list").stdout
    assert_starts_over(project.start(script), name="fit")


@pytest.mark.slow
def test_discard_leaves_other_runs(project: Project) -> None:
    """Only the named run is discarded, and an unknown name is an error."""
    first = project.start("train.py", interrupt="TERM@4")
    assert first.exit_code == STOPPED
    other = interrupted(project, "train.py", "--lr", "0.2")
    unknown = project.tool("discard", "no-such-run")
    assert unknown.returncode != 0
    assert "no-such-run" in unknown.stdout + unknown.stderr
    assert project.tool("discard", other).returncode == 0
    second = project.start("train.py")
    assert second.exit_code == 0, second.output
    continues(first, second)
