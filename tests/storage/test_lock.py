"""One process holds the lock at a time, and dead processes don't count."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.storage import lock
from lightning_faulttolerant.storage.lock import RunLock

FORK = multiprocessing.get_context("fork")


def _exit_code(function, *args: object) -> int:
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join(30)
    assert process.exitcode is not None
    return process.exitcode


def _try_lock(directory: Path) -> None:
    """Exit with 0 if the lock is free, and with 3 if it is refused."""
    try:
        RunLock(directory).acquire()
    except RunInUseError:
        sys.exit(3)


def test_second_process_is_refused_until_release(tmp_path):
    """While the lock is held, others must be refused; after the release they may get it, and nothing is left behind."""
    with RunLock(tmp_path / "new" / "run") as held:
        assert held.is_held
        assert _exit_code(_try_lock, tmp_path / "new" / "run") == 3
    assert not held.is_held
    assert list((tmp_path / "new" / "run").iterdir()) == []
    assert _exit_code(_try_lock, tmp_path / "new" / "run") == 0


def test_message_names_host_process_and_directory(tmp_path):
    """The error must name the holder, the place and the remedy, even in a process that shares no code with this one."""
    script = (
        "import sys, pathlib\n"
        "from lightning_faulttolerant.storage.lock import RunLock\n"
        "RunLock(pathlib.Path(sys.argv[1])).acquire()\n"
    )
    with RunLock(tmp_path):
        root = Path(lock.__file__).parents[2]
        result = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
    assert result.returncode == 1
    assert f"RunInUseError: {tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}." in result.stderr
    assert "Wait for that run, stop it, or give this run another directory" in result.stderr


def test_second_lock_object_of_this_process_is_refused(tmp_path):
    """POSIX locks don't conflict within a process, ours must, and the refusal must not drop the first lock."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    held = RunLock(tmp_path)
    with held:
        for again in (RunLock(tmp_path), RunLock(tmp_path / "link"), held):
            with pytest.raises(RunInUseError, match=r"\(this one\)"):
                again.acquire()
            RunLock(tmp_path).release()
        assert _exit_code(_try_lock, tmp_path) == 3
    with RunLock(tmp_path), RunLock(tmp_path / "other"):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path):
    """After SIGKILL the next run must start immediately, although the file with the dead holder's name still exists."""
    holder = FORK.Process(target=_hold_for_ever, args=(tmp_path,))
    holder.start()
    _wait_for(tmp_path / "ready")
    assert _exit_code(_try_lock, tmp_path) == 3
    holder.kill()
    holder.join()
    assert (tmp_path / "run.lock").exists()
    assert _exit_code(_try_lock, tmp_path) == 0


def _hold_for_ever(directory: Path, *, with_worker: bool = False) -> None:
    RunLock(directory).acquire()
    if with_worker:
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        (directory / "worker").write_text(str(worker))
    (directory / "ready").touch()
    time.sleep(60)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    """A forked data-loading worker has the descriptor, but must not hold the lock when the main process is dead."""
    holder = FORK.Process(target=_hold_for_ever, args=(tmp_path,), kwargs={"with_worker": True})
    holder.start()
    _wait_for(tmp_path / "ready")
    worker = int((tmp_path / "worker").read_text())
    try:
        holder.kill()
        holder.join()
        os.kill(worker, 0)  # it is alive
        assert _exit_code(_try_lock, tmp_path) == 0
    finally:
        os.kill(worker, signal.SIGKILL)


def test_forked_child_can_neither_release_nor_take_the_lock(tmp_path):
    """A child's actions on its copy of the lock must not change the parent's."""
    held = RunLock(tmp_path)

    def child() -> None:
        assert not held.is_held
        held.release()
        held.__exit__(None, None, None)
        os.close(held._descriptor)
        for again in (RunLock(tmp_path), held):
            with pytest.raises(RunInUseError, match=str(os.getppid())):
                again.acquire()

    with held:
        assert _exit_code(child) == 0
        assert (tmp_path / "run.lock").exists()
        assert _exit_code(_try_lock, tmp_path) == 3


def test_lock_is_given_back_when_the_block_raises(tmp_path):
    """An exception in the run must not leave the directory locked."""
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    assert _exit_code(_try_lock, tmp_path) == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"hostname": "x"}', b'{"hostname": 1, "process_id": null}', b"\xff"]
)
def test_holder_without_a_readable_name_is_still_respected(tmp_path, content):
    """A holder that has not yet written its name must still keep others out."""
    with RunLock(tmp_path) as held:
        os.truncate(held._descriptor, 0)
        os.pwrite(held._descriptor, content, 0)
        script = RunLock(tmp_path)

        def child() -> None:
            with pytest.raises(RunInUseError, match="in use by a process on an unknown host"):
                script.acquire()

        assert _exit_code(child) == 0


def test_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    """If the system can't lock, the run must continue, with a warning that names the directory."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as held:
        assert held.is_held
        with pytest.raises(RunInUseError):
            RunLock(tmp_path).acquire()
    (message,) = caplog.messages
    assert str(tmp_path) in message
    assert "No locks available" in message


def test_failing_write_of_the_name_gives_the_lock_back(tmp_path, monkeypatch):
    """A full disk must be raised and must leave neither a lock nor an entry of this process."""

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            RunLock(tmp_path).acquire()
    assert _exit_code(_try_lock, tmp_path) == 0
    RunLock(tmp_path).acquire()


def _compete(directory: Path, num_rounds: int) -> None:
    """Exit with an error if two processes are inside at the same time; the inner file shows it."""
    for _ in range(num_rounds):
        with contextlib.suppress(RunInUseError), RunLock(directory):
            os.close(os.open(directory / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(directory / "inside")


def test_never_two_inside_while_the_file_is_removed_and_made_again(tmp_path):
    """A release removes the file: a process that had opened it before must not believe that it holds the lock."""
    processes = [FORK.Process(target=_compete, args=(tmp_path, 1500)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_threads_of_one_process_are_kept_apart(tmp_path):
    """Of several threads that request the lock at the same time, exactly one must get it."""
    results: list[str] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        try:
            RunLock(tmp_path).acquire()
            results.append("got it")
        except RunInUseError:
            results.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["got it", "refused", "refused", "refused"]
