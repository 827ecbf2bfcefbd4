"""Each start writes to its own directory, or all checkouts to the same: a run is found by what it trains."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.starts.started import (
    NUM_BATCHES,
    STOPPED,
    Project,
    Started,
    assert_same_fit,
    assert_starts_over,
    plain,
    stopped_twice,
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


def checkout(tmp_path: Path, name: str) -> Project:
    """Return a checkout of the scripts that writes to a directory shared by all checkouts."""
    return Project(tmp_path / name, {"OUTPUT_ROOT": str(tmp_path / "output")})


@pytest.mark.slow
def test_a_directory_named_by_the_time(project: Project) -> None:
    """With ``default_root_dir=f"runs/{time}"``, the run is found although its directory is a new one."""
    starts = stopped_twice(project, "timed.py")
    whole = plain("timed.py")
    assert_same_fit(whole, starts)
    assert project.rows() == whole.rows
    assert not starts[-1].lines("continues in")  # nothing is lost: it is a note of the report
    assert not starts[-1].lines("saves to")
    assert "ModelCheckpoint continues in" in " ".join(project.tool("report").stdout.split())


@pytest.mark.slow
def test_killed_in_a_directory_named_by_the_time(project: Project) -> None:
    """After a SIGKILL, too, the run continues from its last autosave, and logs the same rows."""
    killed = project.start("timed.py", interrupt="KILL@6", sleep=0.5)
    assert killed.exit_code == -signal.SIGKILL
    ended = project.start("timed.py")
    assert ended.exit_code == 0, ended.output
    whole = plain("timed.py")
    assert_same_fit(whole, [killed, ended])
    assert project.rows() == whole.rows


@pytest.mark.slow
def test_a_run_that_ended_normally_in_a_directory_named_by_the_time(project: Project) -> None:
    """After a normal end the same command trains everything again."""
    assert project.start("timed.py", interrupt="TERM@4").exit_code == STOPPED
    assert project.start("timed.py").exit_code == 0
    assert_starts_over(project.start("timed.py"))


@pytest.mark.slow
def test_hyperparameters_with_the_time(project: Project) -> None:
    """With ``save_hyperparameters()`` and ``run_name=f"run-{time}"``, the restart is not refused."""
    starts = stopped_twice(project, "named.py")
    assert_same_fit(plain("named.py"), starts)


@pytest.mark.slow
def test_another_checkout(tmp_path: Path) -> None:
    """A copy of the code in another directory continues if both write to the same directory."""
    first = checkout(tmp_path, "monday").start("shared.py", interrupt="TERM@4")
    second = checkout(tmp_path, "tuesday").start("shared.py", interrupt="TERM@9")
    third = checkout(tmp_path, "wednesday").start("shared.py")
    assert [first.exit_code, second.exit_code, third.exit_code] == [STOPPED, STOPPED, 0], third.output
    assert_same_fit(plain("shared.py", OUTPUT_ROOT="output"), [first, second, third])


@pytest.mark.slow
def test_another_checkout_after_a_kill(tmp_path: Path) -> None:
    """A copy of the code in another directory also continues after a SIGKILL."""
    killed = checkout(tmp_path, "monday").start("shared.py", interrupt="KILL@6", sleep=0.5)
    ended = checkout(tmp_path, "tuesday").start("shared.py")
    assert [killed.exit_code, ended.exit_code] == [-signal.SIGKILL, 0], ended.output
    assert_same_fit(plain("shared.py", OUTPUT_ROOT="output"), [killed, ended])


def assert_is_not_continued(ended: Started, edited: Project) -> None:
    """Assert that a start was refused with the reason, or trained everything from the beginning, as without us."""
    if ended.exit_code:
        assert "FingerprintMismatchError" in ended.output
        assert ended.num_batches() == 0
    else:
        assert_starts_over(ended)
        assert ended.weights() == edited.start("shared.py", protected=False).weights()


@pytest.mark.slow
def test_another_checkout_with_other_data(tmp_path: Path) -> None:
    """Another checkout with as many rows but other values does not continue the run."""
    assert checkout(tmp_path, "monday").start("shared.py", interrupt="TERM@4").exit_code == STOPPED
    other = checkout(tmp_path, "tuesday")
    rows = [row / 8 - 1 for row in range(24)]
    (other.directory / "data.json").write_text(str(rows))
    assert_is_not_continued(other.start("shared.py"), other)


@pytest.mark.slow
def test_another_checkout_with_another_seed(tmp_path: Path) -> None:
    """Another seed in another checkout is another run."""
    first = checkout(tmp_path, "monday").start("shared.py", interrupt="TERM@4")
    assert first.exit_code == STOPPED
    other = checkout(tmp_path, "tuesday")
    other.edit("shared.py", "SEED = 1", "SEED = 2")
    assert_is_not_continued(other.start("shared.py"), other)


@pytest.mark.slow
def test_the_first_checkout_after_another_one(tmp_path: Path) -> None:
    """Another checkout with another seed leaves the interrupted run as it is, and that run continues afterwards."""
    monday = checkout(tmp_path, "monday")
    first = monday.start("shared.py", interrupt="TERM@4")
    other = checkout(tmp_path, "tuesday")
    other.edit("shared.py", "SEED = 1", "SEED = 2")
    other.start("shared.py")
    ended = monday.start("shared.py")
    assert ended.exit_code == 0, ended.output
    assert_same_fit(plain("shared.py", OUTPUT_ROOT="output"), [first, ended])
    assert ended.num_batches() == NUM_BATCHES - 4
