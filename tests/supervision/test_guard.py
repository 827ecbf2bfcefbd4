"""The guard ends the processes of a supervisor that is killed, and only those."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from lightning_faulttolerant.cli.supervisor import end_left
from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.supervision.guard import Guard, kill_all
from lightning_faulttolerant.supervision.heartbeats import DIRECTORY_VARIABLE, Heartbeat
from tests.processes import in_child, wait_for


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of the heartbeats."""
    path = tmp_path / "heartbeat"
    path.mkdir()
    return path


def test_processes_of_a_killed_supervisor_end_with_all_their_children(directory: Path, tmp_path: Path) -> None:
    """A process that nobody has noted yet ends, too, and so does its child in another session without a variable."""
    started = tmp_path / "started"

    def supervise() -> None:
        Guard(directory)
        words = ["sh", "-c", f"env -i setsid sleep 60 & echo $$ $! > {started}; sleep 60"]
        subprocess.Popen(words, env={**os.environ, DIRECTORY_VARIABLE: str(directory)}, start_new_session=True)
        wait_for(lambda: started.exists() and started.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(supervise) == -signal.SIGKILL
    process_ids = [*map(int, started.read_text().split())]
    wait_for(lambda: not any(map(is_running, process_ids)) and not directory.exists())


def test_a_number_that_belongs_to_another_process_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started at another time than the one that left its heartbeat. Neither is a process of another run killed."""
    monkeypatch.setattr("lightning_faulttolerant.supervision.guard._QUIET_SECONDS", 0.2)
    environments = [os.environ, {**os.environ, DIRECTORY_VARIABLE: f"{directory}-of-another-run"}]
    others = [subprocess.Popen(["sleep", "60"], env=environment) for environment in environments]
    with monkeypatch.context() as patch:
        patch.setattr("lightning_faulttolerant.supervision.heartbeats.started_at", lambda _: 1)
        Heartbeat(directory)
    (directory / f"heartbeat-{os.getpid()}").rename(directory / f"heartbeat-{others[0].pid}")
    kill_all(str(directory))
    assert [is_running(other.pid) for other in others] == [True, True]
    for other in others:
        other.kill()
        other.wait()


def test_what_a_process_has_left_in_its_session_is_ended() -> None:
    """A worker whose parent was killed before it looked for it would wait forever, even a stopped one.

    Other sessions are left alone.
    """
    words = "sleep 60 & echo $!; setsid sleep 60 & echo $!"
    with subprocess.Popen(["sh", "-c", words], stdout=subprocess.PIPE, text=True, start_new_session=True) as leader:
        assert leader.stdout is not None
        left, other = (int(leader.stdout.readline()) for _ in range(2))
    wait_for(lambda: os.getsid(other) != leader.pid)
    os.kill(left, signal.SIGSTOP)
    end_left([leader.pid])
    assert [is_running(process_id) for process_id in (left, other)] == [False, True]
    os.kill(other, signal.SIGKILL)
