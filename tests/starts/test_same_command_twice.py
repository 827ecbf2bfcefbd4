"""The same command is started while it already runs: the second one waits, then continues or is refused."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.starts.started import STOPPED, Process, Project, assert_same_fit, num_saved, plain

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


@pytest.fixture
def running(project: Project) -> Iterator[Callable[[float], Process]]:
    """Yield a function that starts a slow run and waits until it trains; the run is killed after the test."""
    started: list[Process] = []

    def start(sleep: float) -> Process:
        process = project.launch("train.py", sleep=sleep)
        started.append(process)
        wait_until(lambda: process.now().num_batches() > 1)
        return process

    yield start
    for process in started:
        process.kill()


def wait_until(happened: Callable[[], bool], timeout_seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_seconds
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.1)


def test_a_run_in_use_is_refused(project: Project, running: Callable[[float], Process]) -> None:
    """A second start waits for the grace period, then names process and host of the first one, which trains on."""
    first = running(5)
    began = time.monotonic()
    second = project.start("train.py", PL_FAULT_TOLERANT_OPTIONS="grace_seconds=8")
    assert second.exit_code == 1, second.output
    assert time.monotonic() - began > 8, "it did not wait for the first one to end"
    assert "RunInUseError" in second.output
    assert second.lines(str(first.process_id), socket.gethostname())
    assert second.num_batches() == 0
    assert first.is_running


def test_the_first_one_is_stopped_meanwhile(project: Project, running: Callable[[float], Process]) -> None:
    """A second start that waits continues the first one once that has saved and ended."""
    first = running(2)
    second = project.launch("train.py")
    wait_until(lambda: "Adding 1 callbacks" in second.now().output)
    time.sleep(2)
    assert second.is_running
    os.kill(first.process_id, signal.SIGTERM)
    stopped, ended = first.wait(), second.wait()
    assert [stopped.exit_code, ended.exit_code] == [STOPPED, 0], ended.output
    assert_same_fit(plain("train.py"), [stopped, ended])


def test_the_first_one_is_killed_meanwhile(project: Project, running: Callable[[float], Process]) -> None:
    """A second start that waits continues the first one once that is dead."""
    first = running(2)
    second = project.launch("train.py")
    wait_until(lambda: "Adding 1 callbacks" in second.now().output)
    wait_until(lambda: num_saved(project) > 0)
    time.sleep(2)
    first.kill()
    killed, ended = first.now(), second.wait()
    assert [killed.exit_code, ended.exit_code] == [-signal.SIGKILL, 0], ended.output
    assert_same_fit(plain("train.py"), [killed, ended])


def test_other_arguments_need_not_wait(project: Project, running: Callable[[float], Process]) -> None:
    """Another command trains at the same time, from the beginning."""
    first = running(4)
    other = project.start("train.py", "--lr", "0.2")
    assert other.exit_code == 0, other.output
    assert other.weights() == plain("train.py", "--lr", "0.2").started.weights()
    assert first.is_running
