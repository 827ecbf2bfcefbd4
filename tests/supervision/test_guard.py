"""The guard ends the processes of a supervisor that is killed, and only those."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.cli.supervisor import end_left
from lightning_faulttolerant.processes import is_running, started_at
from lightning_faulttolerant.supervision.guard import Guard, guard
from lightning_faulttolerant.supervision.heartbeats import Heartbeat


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


def ends_soon(process_id: int) -> bool:
    """Return whether a process ends within some seconds."""
    deadline = time.monotonic() + 10
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(process_id)


def test_processes_of_a_killed_supervisor_end_with_all_their_children(directory: Path, tmp_path: Path) -> None:
    """A child that has left the session ends, too, and the directory is removed."""
    child = tmp_path / "child"

    def have_child() -> None:
        process_id = os.fork()
        if not process_id:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        child.write_text(str(process_id))

    with process(have_child) as guarded:

        def supervise() -> None:
            Guard(directory).watch([guarded])
            os.kill(os.getpid(), signal.SIGKILL)

        supervisor = os.fork()
        if not supervisor:
            supervise()
        os.waitpid(supervisor, 0)
        assert ends_soon(guarded)
        assert ends_soon(int(child.read_text()))
    deadline = time.monotonic() + 10
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not directory.exists()


def test_a_supervisor_that_ends_leaves_its_processes_alone(directory: Path) -> None:
    """The guard ends with it, and only says so by ending."""
    with process() as guarded:
        one = Guard(directory)
        one.watch([guarded])
        one.close()
        one.close()
        assert os.waitpid(one.process_id, 0)[1] == 0
        assert is_running(guarded)
    assert directory.exists()


def test_a_guard_that_is_killed_is_replaced_at_the_next_start(directory: Path) -> None:
    """The processes of that start are guarded by another one."""
    one = Guard(directory)
    one.watch([os.getpid()])
    first = one.process_id
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    one.watch([os.getpid()])
    assert one.process_id != first
    one.close()
    assert os.waitpid(one.process_id, 0)[1] == 0


def test_only_the_processes_of_the_last_start_are_killed(directory: Path) -> None:
    """Those of an earlier start have ended, and their numbers may belong to others by now."""
    with process() as earlier, process() as later, process(lambda: Heartbeat(directory)) as marked:
        guard([f"{earlier}\n", f"{later}\n"], str(directory))
        assert is_running(earlier)
        assert not is_running(later)
        assert not is_running(marked)


def test_a_number_that_belongs_to_another_process_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started at another time than the one that was guarded."""
    with process() as other:
        began = started_at(other)
        monkeypatch.setattr("lightning_faulttolerant.supervision.guard.started_at", lambda _: began - 1)
        guard([f"{other}\n"], str(directory))
        assert is_running(other)


def test_without_a_companion_a_run_is_not_guarded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each system can start one. The run continues."""

    def refuse(*_: object, **__: object) -> int:
        raise NotImplementedError

    monkeypatch.setattr("lightning_faulttolerant.supervision.guard.start_companion", refuse)
    one = Guard(directory)
    one.watch([os.getpid()])
    one.close()
    assert one.process_id == 0


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
