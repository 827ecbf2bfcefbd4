"""A change between two starts makes another run, or is refused with instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.starts.started import (
    STOPPED,
    Project,
    Started,
    assert_same_fit,
    assert_starts_over,
    continues,
    plain,
    run_names,
)

CHANGES = {
    "batch size": ("loader(batch_size=4)", "loader(batch_size=6)"),
    "hyperparameter": ("lr=arguments.lr", "lr=2 * arguments.lr"),
    "size": ("hidden=8)", "hidden=9)"),
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


def interrupted(project: Project, *command: str) -> tuple[Started, str]:
    """Start a script and stop it, and return the start and the name of the run."""
    first = project.start(*(command or ("train.py",)), interrupt="TERM@4")
    assert first.exit_code == STOPPED, first.output
    [name] = run_names(project)
    return first, name


@pytest.mark.slow
def test_other_arguments_start_from_the_beginning(project: Project) -> None:
    """``--lr 0.2`` does not continue ``--lr 0.1``, and one line of the log names that run, which stays as it is."""
    first, name = interrupted(project, "train.py", "--lr", "0.1")
    second = project.start("train.py", "--lr", "0.2")
    assert_starts_over(second)
    assert second.lines(name), second.output
    third = project.start("train.py", "--lr", "0.1")
    assert third.exit_code == 0, third.output
    continues(first, third)


@pytest.mark.slow
def test_the_log_says_how_to_continue_the_other_run(project: Project) -> None:
    """If other arguments mean the same fit, the command in the log continues the interrupted run."""
    first, name = interrupted(project, "train.py", "--lr", "0.1")
    command = ("train.py", "--lr=0.1", "--tag", "again")
    second = project.start(*command)
    assert_starts_over(second)
    said = re.search(rf"PL_FAULT_TOLERANT_RUN_ID=['\"]?({re.escape(name)})\b", second.output)
    assert said is not None, second.output
    third = project.start(*command, PL_FAULT_TOLERANT_RUN_ID=said[1])
    assert third.exit_code == 0, third.output
    assert_same_fit(plain("train.py"), [first, third])


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_an_edited_script_is_refused(change: str, project: Project) -> None:
    """Other settings in the same script are refused, and the last lines say how to continue and how to start over."""
    first, name = interrupted(project)
    before, after = CHANGES[change]
    project.edit("train.py", before, after)
    refused = project.start("train.py")
    assert refused.exit_code == 1, refused.output
    assert "FingerprintMismatchError" in refused.output
    assert refused.num_batches() == 0
    last = "\n".join(refused.output.rstrip().splitlines()[-5:])
    assert f"lightning-faulttolerant discard {name}" in last
    assert "continue" in last.lower()
    project.edit("train.py", after, before)
    ended = project.start("train.py")
    assert ended.exit_code == 0, ended.output
    assert_same_fit(plain("train.py"), [first, ended])


@pytest.mark.slow
def test_an_edited_script_after_discard(project: Project) -> None:
    """After the command that the refusal names, the edited script starts from the beginning."""
    _, name = interrupted(project)
    before, after = CHANGES["hyperparameter"]
    project.edit("train.py", before, after)
    assert project.start("train.py").exit_code == 1
    discarded = project.tool("discard", name)
    assert discarded.returncode == 0, discarded.stdout + discarded.stderr
    assert_starts_over(project.start("train.py"))
