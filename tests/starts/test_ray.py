"""Fits in Ray tasks: they run at the same time, and each continues its own."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.starts.started import NUM_BATCHES, Project, assert_starts_over, continues, num_saved, plain

NAMES = ["lr=0.1", "lr=0.2"]

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Yield a directory with the scripts, and one for Ray, which needs short names for its sockets."""
    directory = tempfile.mkdtemp(prefix="ray-")
    yield Project(tmp_path / "project", {"RAY_DIRECTORY": directory}, forks=False)
    shutil.rmtree(directory, ignore_errors=True)


def test_side_by_side(project: Project) -> None:
    """Two simultaneous tasks don't make each other fail, and train the same as without us."""
    ended = project.start("rays.py", sleep=0.1)
    for name in NAMES:
        assert_starts_over(ended, name=name)
    assert ended.weights() == plain("rays.py").started.weights()


def test_all_is_killed(project: Project) -> None:
    """After a SIGKILL for the script, its workers, and Ray itself, each task continues its own fit."""
    process = project.launch("rays.py", sleep=1.5)
    deadline = time.monotonic() + 120
    while num_saved(project) < 2:
        assert time.monotonic() < deadline, process.now().output
        assert process.is_running, process.now().output
        time.sleep(0.1)
    process.kill()
    killed = process.now()
    ended = project.start("rays.py")
    assert ended.exit_code == 0, ended.output
    for name in NAMES:
        continues(killed, ended, name)
    assert ended.num_batches() < 2 * NUM_BATCHES
    assert ended.weights() == plain("rays.py").started.weights()
