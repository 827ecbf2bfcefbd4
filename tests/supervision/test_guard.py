"""The guard ends the processes of a supervisor that is killed, and only those."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.cli.supervisor import end_left
from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.supervision.guard import Guard, kill_all
from lightning_faulttolerant.supervision.heartbeats import DIRECTORY_VARIABLE, Heartbeat


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of the heartbeats."""
    path = tmp_path / "heartbeat"
    path.mkdir()
    return path


@contextlib.contextmanager
def process(before: Callable[[], object] = int, after: Callable[[], object] = int) -> Iterator[int]:
    """Yield the id of a process that has called `before`, sleeps, and then calls `after`."""
    ready, done = os.pipe()
    process_id = os.fork()
    if not process_id:
        before()
        os.write(done, b"x")
        time.sleep(60)
        after()
        os._exit(0)
    os.read(ready, 1)
    os.close(ready), os.close(done)
    try:
        yield process_id
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process_id, 0)


def wait_for_end(*process_ids: int, directory: Path | None = None) -> None:
    """Wait until processes have ended, and until a directory is removed."""
    while any(map(is_running, process_ids)) or (directory is not None and directory.exists()):
        time.sleep(0.01)


def test_processes_of_a_killed_supervisor_end_with_all_their_children(directory: Path, tmp_path: Path) -> None:
    """A process that nobody has noted yet ends, too, and so does its child in another session without a variable."""
    started = tmp_path / "started"

    def supervise() -> None:
        Guard(directory)
        words = ["sh", "-c", f"env -i setsid sleep 60 & echo $$ $! > {started}; sleep 60"]
        subprocess.Popen(words, env={**os.environ, DIRECTORY_VARIABLE: str(directory)}, start_new_session=True)
        while not (started.exists() and started.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    supervisor = os.fork()
    if not supervisor:
        supervise()
    os.waitpid(supervisor, 0)
    wait_for_end(*map(int, started.read_text().split()), directory=directory)


def test_a_supervisor_that_is_killed_before_its_directory_exists_leaves_none(tmp_path: Path) -> None:
    """The guard is there first. It may also be the last one that is told."""
    supervisor = os.fork()
    if not supervisor:
        Guard(tmp_path / "later")
        (tmp_path / "later").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(supervisor, 0)
    wait_for_end(directory=tmp_path / "later")


def test_a_supervisor_that_ends_leaves_its_processes_alone(directory: Path) -> None:
    """The guard ends with it."""
    with process(lambda: Heartbeat(directory)) as guarded:
        one = Guard(directory)
        first = one.process_id
        one.close()
        one.close()
        assert not is_running(first)
        assert is_running(guarded)
    assert directory.exists()


def test_a_guard_that_is_killed_is_replaced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happened is said once. One that ends at once is not replaced again and again."""
    monkeypatch.setattr("lightning_faulttolerant.supervision.guard._LIVES_SECONDS", 0.0)
    one = Guard(directory)
    assert one.look() == ""
    first = one.process_id
    os.kill(first, signal.SIGKILL)
    assert _news(one) == f"The guard of the training processes, process {first}, has ended (exit code -9)." + (
        " Another one is started."
    )
    assert one.process_id != first
    monkeypatch.setattr("lightning_faulttolerant.supervision.guard._LIVES_SECONDS", 60.0)
    os.kill(one.process_id, signal.SIGKILL)
    assert _news(one).endswith("Without it, they continue if this process is killed.")
    assert (one.process_id, one.look()) == (0, "")
    one.close()


def _news(guard: Guard) -> str:
    """Return the next thing that has happened to a guard."""
    while not (news := guard.look()):
        time.sleep(0.01)
    return news


def test_a_number_that_belongs_to_another_process_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started at another time than the one that left its heartbeat. Neither is a process of another run killed."""
    monkeypatch.setattr("lightning_faulttolerant.supervision.guard._QUIET_SECONDS", 0.2)
    environment = {**os.environ, DIRECTORY_VARIABLE: f"{directory}-of-another-run"}
    other_run = subprocess.Popen(["sleep", "60"], env=environment)

    def stale() -> None:
        monkeypatch.setattr("lightning_faulttolerant.supervision.heartbeats.started_at", lambda _: 1)
        Heartbeat(directory)

    with process(stale) as other:
        kill_all(str(directory))
        assert is_running(other)
        assert is_running(other_run.pid)
    other_run.kill()
    other_run.wait()


def test_without_a_companion_a_run_is_not_guarded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each system can start one. The run continues, and says so."""

    def refuse(*_: object, **__: object) -> int:
        raise NotImplementedError

    monkeypatch.setattr("lightning_faulttolerant.supervision.guard.start_companion", refuse)
    one = Guard(directory)
    assert "can't be started: NotImplementedError" in one.look()
    one.close()
    assert (one.process_id, one.look()) == (0, "")


@pytest.mark.parametrize("stopped", [False, True])
def test_what_a_process_has_left_in_its_session_is_ended(stopped: bool) -> None:
    """A worker whose parent was killed before it looked for it would wait forever. Other sessions are left alone."""
    ready, done = os.pipe()
    leader = os.fork()
    if not leader:
        os.setsid()
        for each in range(2):
            if not os.fork():
                if each:
                    os.setsid()
                os.write(done, f"{os.getpid()}\n".encode())
                time.sleep(60)
                os._exit(1)
        os._exit(0)
    os.close(done)
    os.waitpid(leader, 0)
    with os.fdopen(ready) as found:
        left = [int(found.readline()) for _ in range(2)]
    if stopped:
        for process_id in left:
            os.kill(process_id, signal.SIGSTOP)
    [other] = [process_id for process_id in left if os.getsid(process_id) != leader]
    end_left([leader])
    assert [is_running(process_id) for process_id in left] == [process_id == other for process_id in left]
    os.kill(other, signal.SIGKILL)
