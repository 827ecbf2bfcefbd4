"""One process holds the lock of a run at a time, on a disk or in a store; a dead holder loses it, and notices."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.processes import this_machine
from lightning_faulttolerant.storage import lock
from lightning_faulttolerant.storage.lock import LOCK_NAME, RunLease, RunLock, open_lock
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.storage.store import open_store
from tests.messages import plain
from tests.processes import dead_process_id, in_child
from tests.storage.stores import error_of, requests_to_s3

FORK = multiprocessing.get_context("fork")
LEASE_SECONDS = 0.6
EVER = 10_000.0
HERE = socket.gethostname()


def exit_code(main: Callable[[], object]) -> int:
    """Run a function in a forked process that may talk to stores; return its exit code."""
    process = FORK.Process(target=main)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def is_refused(path: str | Path) -> bool:
    """Return whether another process can't take the lock of a local directory."""

    def main() -> None:
        try:
            RunLock(Path(path)).acquire()
        except RunInUseError:
            sys.exit(3)

    code = exit_code(main)
    assert code in (0, 3)
    return code == 3


def put_lock(url: str, *, hostname: str = "elsewhere", process_id: int = 1, renewals: int = 0, **more: str) -> None:
    """Write the lock of another process."""
    holder = {"hostname": hostname, "process_id": process_id, "num_renewals": renewals, "token": "theirs"}
    RemoteStore(url).replace(LOCK_NAME, json.dumps({**holder, "machine": this_machine(), **more}).encode())


def holder_of(url: str) -> dict[str, Any]:
    """Read the lock."""
    holder: dict[str, Any] = json.loads(RemoteStore(url).read(LOCK_NAME) or b"{}")
    return holder


def test_lock_is_held_and_given_back(any_url: str) -> None:
    """While it is held, no second object gets it, and a refusal does not drop it; afterwards nothing is left."""
    held = open_lock(any_url)
    assert isinstance(held, RunLease if "://" in any_url else RunLock)
    for _ in range(2):
        with held:
            assert held.is_held
            for again in (open_lock(any_url), held):
                with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on .* \(this one\)"):
                    again.acquire()
                open_lock(any_url).release()
            held.check()
            assert open_store(any_url).names() == [LOCK_NAME]
        assert not held.is_held
        assert open_store(any_url).names() == []
        assert "run-lease" not in [thread.name for thread in threading.enumerate()]
        held.release()
    with pytest.raises(KeyError), held:
        raise KeyError
    assert open_store(any_url).names() == []


def test_forked_child_neither_holds_nor_releases(any_url: str) -> None:
    """A data-loading worker has a copy of the object, and does not release the lock at its end."""

    def child() -> None:
        assert not held.is_held
        held.release()
        held.__exit__(None, None, None)

    with open_lock(any_url) as held:
        assert exit_code(child) == 0
        held.check()
        assert open_store(any_url).names() == [LOCK_NAME]
        if "://" not in any_url:
            assert is_refused(any_url)


def test_messages_name_the_holder_and_the_remedy(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each error says who holds the run or has taken it over, and what to do."""
    url = f"memory://{tmp_path.name}/run"
    with RunLock(tmp_path), RunLease(url, lease_seconds=EVER) as lease:
        said = [error_of(RunInUseError, take) for take in (RunLock(tmp_path).acquire, RunLease(url).acquire)]
        put_lock(url, hostname="node7", process_id=12)
        said.append(error_of(RunInUseError, lease.check))
        RemoteStore(url).delete(LOCK_NAME)
        said.append(error_of(RunInUseError, lease.check))
    said.append(error_of(RunInUseError, lease.check))
    text = "\n".join(said).replace(f" on {HERE}", " on HOST")
    assert plain(text, DIR=tmp_path, URL=url, RUN=url.removeprefix("memory:/")) == snapshot


# On a disk, the operating system keeps the lock.


def test_links_lead_to_the_same_lock(tmp_path: Path) -> None:
    """POSIX locks don't conflict within a process: another path to the directory must be recognized."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with RunLock(tmp_path), RunLock(tmp_path / "other"):
        error_of(RunInUseError, RunLock(tmp_path / "link").acquire)
        assert is_refused(tmp_path)
    assert not is_refused(tmp_path)


@pytest.mark.parametrize("has_worker", [False, True])
def test_lock_of_a_killed_process_is_free(tmp_path: Path, has_worker: bool) -> None:
    """After SIGKILL the next run starts immediately, even if a worker that the dead process has forked is alive."""
    reader, writer = os.pipe()

    def hold() -> None:
        RunLock(tmp_path).acquire()
        worker = os.fork() if has_worker else -1
        if worker:
            os.write(writer, f"{worker}\n".encode())
        signal.pause()

    holder = FORK.Process(target=hold)
    holder.start()
    with open(reader) as answers:
        worker = int(answers.readline())
    os.close(writer)
    try:
        assert is_refused(tmp_path)
        holder.kill()
        holder.join()
        assert (tmp_path / LOCK_NAME).exists()
        assert not is_refused(tmp_path)
    finally:
        if has_worker:
            os.kill(worker, signal.SIGKILL)


def test_forked_child_can_not_take_the_lock(tmp_path: Path) -> None:
    """A child that tries is refused with its parent's name, and the parent keeps the lock."""
    held = RunLock(tmp_path)

    def child() -> None:
        for again in (RunLock(tmp_path), held):
            with pytest.raises(RunInUseError, match=str(os.getppid())):
                again.acquire()

    with held:
        assert in_child(child) == 0
        assert is_refused(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"hostname": 1, "process_id": null}', b"\xff"])
def test_holder_without_a_readable_name_is_still_respected(tmp_path: Path, content: bytes) -> None:
    """A holder that has not yet written its name keeps others out."""

    def child() -> None:
        (tmp_path / LOCK_NAME).write_bytes(content)
        with pytest.raises(RunInUseError, match="in use by a process on an unknown host"):
            RunLock(tmp_path).acquire()

    with RunLock(tmp_path):
        assert in_child(child) == 0


def test_system_that_can_not_lock_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues, with a warning that names the directory; a second lock of the process is still refused."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as held:
        assert held.is_held
        error_of(RunInUseError, RunLock(tmp_path).acquire)
    [message] = caplog.messages
    assert str(tmp_path) in message
    assert "No locks available" in message


def test_failing_write_of_the_name_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is raised, and leaves neither a lock nor an entry of this process."""

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            RunLock(tmp_path).acquire()
    assert not is_refused(tmp_path)
    with RunLock(tmp_path):
        pass


def test_never_two_inside_while_the_file_is_removed_and_made_again(tmp_path: Path) -> None:
    """A release removes the file: a process that had opened it before does not believe that it holds the lock."""

    def compete() -> None:
        for _ in range(200):
            with contextlib.suppress(RunInUseError), RunLock(tmp_path):
                os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL))
                os.unlink(tmp_path / "inside")

    processes = [FORK.Process(target=compete) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_of_several_threads_one_gets_the_lock(tmp_path: Path) -> None:
    """Of threads that request the lock at the same time, exactly one gets it."""
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


# In a store, it is an object that its holder renews.

THEIRS = "another container"
HOLDERS = {
    "dead here": (lambda: {"hostname": HERE, "process_id": dead_process_id()}, "taken at once"),
    "our own id, as in containers": (lambda: {"hostname": HERE, "process_id": os.getpid()}, "taken at once"),
    "dead elsewhere": (lambda: {"process_id": dead_process_id()}, "taken after a lease"),
    "dead in a container": (lambda: {"hostname": HERE, "process_id": dead_process_id(), "machine": THEIRS}, "renewed"),
    "our id in a container": (lambda: {"hostname": HERE, "process_id": os.getpid(), "machine": THEIRS}, "renewed"),
    "renews elsewhere": (dict, "renewed"),
    "gives back": (dict, "deleted"),
}


@pytest.mark.parametrize(("holder", "what"), HOLDERS.values(), ids=HOLDERS)
def test_whether_a_held_lock_is_taken(
    remote_url: str, caplog: pytest.LogCaptureFixture, holder: Callable[[], dict[str, Any]], what: str
) -> None:
    """A holder known to be dead loses its lock at once, an unknown one after a lease, and one that renews never."""
    theirs, is_over = holder(), threading.Event()
    put_lock(remote_url, **theirs)

    def happen() -> None:
        renewals = 0
        while what in ("renewed", "deleted") and not is_over.wait(0.2):
            renewals += 1
            if what == "renewed":
                put_lock(remote_url, renewals=renewals, **theirs)
            else:
                RemoteStore(remote_url).delete(LOCK_NAME)
                return

    meanwhile = threading.Thread(target=happen)
    meanwhile.start()
    lease_seconds = {"taken at once": EVER, "taken after a lease": LEASE_SECONDS}.get(what, 20.0)
    lease, began = RunLease(remote_url, lease_seconds=lease_seconds), time.monotonic()
    try:
        with caplog.at_level(logging.WARNING):
            if what == "renewed":
                with pytest.raises(RunInUseError, match="in use by process"):
                    lease.acquire()
                assert holder_of(remote_url)["token"] == "theirs"
            else:
                with lease:
                    lease.check()
                    assert holder_of(remote_url)["process_id"] == os.getpid()
        assert ("its lock was not renewed by process" in caplog.text) == (what == "taken after a lease")
        assert what != "taken after a lease" or time.monotonic() - began >= LEASE_SECONDS
    finally:
        is_over.set()
        meanwhile.join()


def test_lock_that_cannot_be_read_is_taken_over_when_nothing_moves(remote_url: str) -> None:
    """An unreadable lock keeps no process out for longer than a lease."""
    RemoteStore(remote_url).replace(LOCK_NAME, b"{")
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        held.check()


@pytest.fixture
def other(s3: str) -> Iterator[tuple[Any, Any]]:
    """Yield another process that holds the lock of a run, and a connection: it saves when it gets a message."""
    ours, theirs = FORK.Pipe()

    def main() -> None:
        held = RunLease(f"{s3}/run", lease_seconds=LEASE_SECONDS)
        held.acquire()
        autosaves = AutosaveSeries(f"{s3}/run", keep_last=1, check=held.check)
        theirs.send("held")
        while True:
            number = theirs.recv()
            try:
                autosaves.save({"by": "other"}, epoch=0, batch=number, global_step=number)
                theirs.send("saved")
            except RunInUseError as error:
                theirs.send(str(error))

    process = FORK.Process(target=main)
    process.start()
    assert ours.recv() == "held"
    yield process, ours
    process.kill()


def test_living_holder_keeps_the_lock(s3: str, other: tuple[Any, Any]) -> None:
    """A holder that renews is not disturbed, and the newcomer learns which process it is; killed, it loses the lock."""
    process, connection = other
    with pytest.raises(RunInUseError, match=rf"in use by process {process.pid} on {HERE}\. Two runs"):
        RunLease(f"{s3}/run", lease_seconds=20).acquire()
    connection.send(1)
    assert connection.recv() == "saved"
    process.kill()
    process.join()
    with RunLease(f"{s3}/run", lease_seconds=EVER) as held:
        held.check()


def test_process_that_was_asleep_does_not_write_over_its_successor(s3: str, other: tuple[Any, Any]) -> None:
    """A holder that is suspended for longer than its lease loses it, and saves nothing when it wakes up."""
    process, connection = other
    connection.send(1)
    assert connection.recv() == "saved"
    os.kill(process.pid, signal.SIGSTOP)
    with RunLease(f"{s3}/run", lease_seconds=LEASE_SECONDS) as held:
        autosaves = AutosaveSeries(f"{s3}/run", keep_last=1, check=held.check)
        path = autosaves.save({"by": "us"}, epoch=0, batch=5, global_step=5)
        os.kill(process.pid, signal.SIGCONT)
        connection.send(2)
        assert f"is in use by process {os.getpid()} on {HERE}" in connection.recv()
        assert autosaves.load_newest() == (path, {"by": "us"})
        assert autosaves.paths() == [path]
        held.check()


def test_who_loses_a_race_is_refused(remote_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that create the lock at the same time, the one whose lock does not stay does not begin."""
    real = RemoteStore.create

    def create_too_late(self: RemoteStore, name: str, content: bytes) -> None:
        real(self, name, content)
        put_lock(remote_url)

    monkeypatch.setattr(RemoteStore, "create", create_too_late)
    with pytest.raises(RunInUseError, match="process 1 on elsewhere"):
        RunLease(remote_url).acquire()
    assert holder_of(remote_url)["hostname"] == "elsewhere"


def test_object_is_created_exclusively(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 itself refuses the second of two that create the lock at the same time."""
    put_lock(f"{s3}/run")
    with requests_to_s3(monkeypatch) as requests, pytest.raises(FileExistsError):
        RemoteStore(f"{s3}/run").create(LOCK_NAME, b"mine")
    assert [arguments["IfNoneMatch"] for _, arguments in requests] == ["*"]


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOSYS, "not here")], ids=["python", "system"])
def test_store_that_can_not_create_exclusively_is_locked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A store without exclusive creation is not refused: the last of two writers stays there."""
    real = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise error
        real(self, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with RunLease("memory://no-exclusive-creation/run") as held:
        held.check()


def test_lost_lock_is_noticed_and_not_renewed(remote_url: str) -> None:
    """A lock that was removed or taken over is an error before a write, and its old holder leaves it alone."""
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        RemoteStore(remote_url).delete(LOCK_NAME)
        with pytest.raises(RunInUseError, match="has been removed"):
            held.check()
        put_lock(remote_url)
        with pytest.raises(RunInUseError, match=r"process 1 on elsewhere.*taken over the directory"):
            held.check()
        time.sleep(LEASE_SECONDS)
    assert (holder_of(remote_url)["hostname"], holder_of(remote_url)["num_renewals"]) == ("elsewhere", 0)


def test_lock_is_renewed_also_after_a_failure(
    remote_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The holder shows that it is alive, tries a failed renewal again silently, and draws no random number."""
    before, has_failed = random.getstate(), threading.Event()
    real = RemoteStore.replace

    def fail_once(self: RemoteStore, name: str, content: bytes) -> None:
        if not has_failed.is_set() and threading.current_thread().name == "run-lease":
            has_failed.set()
            raise OSError(5, "unreachable")
        real(self, name, content)

    monkeypatch.setattr(RemoteStore, "replace", fail_once)
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        while holder_of(remote_url)["num_renewals"] < 3:
            time.sleep(0.02)
        held.check()
    assert has_failed.is_set()
    assert random.getstate() == before
    assert capsys.readouterr() == ("", "")
    assert (lock.LEASE_SECONDS, lock.RENEWALS_PER_LEASE) == (30.0, 3)
