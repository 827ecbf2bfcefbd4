"""Fits in the processes of a pool: they run at the same time, and each continues its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.starts.started import (
    NUM_BATCHES,
    Project,
    assert_interrupted,
    assert_starts_over,
    continues,
    plain,
)

NAMES = ["lr=0.1", "lr=0.2"]

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


@pytest.mark.parametrize("pool", ["joblib"])
def test_side_by_side(pool: str, project: Project) -> None:
    """Two simultaneous tasks don't make each other fail, and train the same as without us."""
    ended = project.start("pool.py", pool, sleep=0.1, forks=False)
    for name in NAMES:
        assert_starts_over(ended, name=name)
    assert ended.weights() == plain("pool.py", pool).started.weights()


@pytest.mark.parametrize("pool", ["joblib", "fork"])
def test_all_are_killed(pool: str, project: Project) -> None:
    """After a SIGKILL for the whole process group, each task continues its own fit."""
    killed = project.start("pool.py", pool, interrupt="GROUP-KILL@6@lr=0.2", sleep=0.5)
    assert killed.exit_code == -signal.SIGKILL
    ended = project.start("pool.py", pool)
    assert ended.exit_code == 0, ended.output
    for name in NAMES:
        continues(killed, ended, name)
    assert ended.num_batches() < 2 * NUM_BATCHES
    assert ended.weights() == plain("pool.py", pool).started.weights()


@pytest.mark.parametrize("pool", ["spawn", "fork"])
def test_all_are_stopped_twice(pool: str, project: Project) -> None:
    """After a SIGTERM for the whole process group, each task continues its own fit."""
    starts = [project.start("pool.py", pool, interrupt=f"GROUP-TERM@{step}@lr=0.2", sleep=0.2) for step in (3, 6)]
    assert_interrupted(starts[0], 3, "lr=0.2")
    assert_interrupted(starts[1], 3, "lr=0.2")
    ended = project.start("pool.py", pool)
    assert ended.exit_code == 0, ended.output
    for name in NAMES:
        continues(starts[0], starts[1], name)
        continues(starts[1], ended, name)
    assert ended.weights() == plain("pool.py", pool).started.weights()


@pytest.mark.parametrize("pool", ["fork"])
def test_one_task_is_stopped(pool: str, project: Project) -> None:
    """A task with only its own process stopped continues, and the other one ends with its own weights."""
    first = project.start("pool.py", pool, interrupt="TERM@4@lr=0.2")
    assert_interrupted(first, 4, "lr=0.2")
    ended = project.start("pool.py", pool, forks=False)
    assert ended.exit_code == 0, ended.output
    continues(first, ended, "lr=0.2")
    whole = plain("pool.py", pool).started.weights()
    assert {**first.weights(), **ended.weights()} == whole


@pytest.mark.parametrize("pool", ["joblib", "fork"])
def test_a_pool_that_ended_normally_is_a_new_run(pool: str, project: Project) -> None:
    """After a normal end the same command trains everything again."""
    first = project.start("pool.py", pool, interrupt="GROUP-TERM@4@lr=0.2", sleep=0.2)
    assert_interrupted(first, 4, "lr=0.2")
    assert project.start("pool.py", pool).exit_code == 0
    again = project.start("pool.py", pool)
    for name in NAMES:
        assert_starts_over(again, name=name)
