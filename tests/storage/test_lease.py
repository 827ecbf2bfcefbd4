"""The lock of a run in an object store: a dead holder loses it, a suspended one notices, and waiting has an end."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.processes import this_machine
from lightning_faulttolerant.storage import lock
from lightning_faulttolerant.storage.lock import LOCK_NAME, RunLease, RunLock, open_lock
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.storage.store import open_store
from tests.storage.stores import calls_of_s3

FORK = multiprocessing.get_context("fork")
LEASE_SECONDS = 0.6


def put_lock(
    url: str,
    *,
    hostname: str,
    process_id: int,
    token: str = "theirs",
    num_renewals: int = 0,
    machine: str | None = None,
) -> None:
    """Write the lock of another process."""
    machine = this_machine() if machine is None else machine
    holder = {
        "hostname": hostname,
        "process_id": process_id,
        "token": token,
        "num_renewals": num_renewals,
        "machine": machine,
    }
    RemoteStore(url).replace(LOCK_NAME, json.dumps(holder).encode())


def holder_of(url: str) -> dict[str, Any]:
    """Read the lock."""
    content = RemoteStore(url).read(LOCK_NAME)
    assert content is not None
    holder: dict[str, Any] = json.loads(content)
    return holder


def dead_process_id() -> int:
    """Return the id of a process that no longer exists."""
    process = FORK.Process(target=int)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def test_lock_is_of_the_kind_that_the_directory_needs(remote_url: str, tmp_path: Any) -> None:
    """The operating system locks a local directory; a lease locks one below a URL."""
    assert isinstance(open_lock(remote_url), RunLease)
    assert isinstance(open_lock(tmp_path), RunLock)
    assert isinstance(open_lock(f"file://{tmp_path}"), RunLock)


def test_lock_is_held_and_given_back(remote_url: str) -> None:
    """While the lock is held, the object names the holder; afterwards it is gone, and so is its thread."""
    held = RunLease(remote_url)
    with held:
        assert held.is_held
        assert "run-lease" in [thread.name for thread in threading.enumerate()]
        held.check()
        assert (holder_of(remote_url)["hostname"], holder_of(remote_url)["process_id"]) == (
            socket.gethostname(),
            os.getpid(),
        )
    assert not held.is_held
    assert "run-lease" not in [thread.name for thread in threading.enumerate()]
    assert open_store(remote_url).names() == []
    held.release()
    with held:
        held.check()


def test_lock_is_given_back_after_an_exception(remote_url: str) -> None:
    """An error inside the block must not keep others out."""
    with pytest.raises(KeyError), RunLease(remote_url):
        raise KeyError
    assert open_store(remote_url).names() == []


def test_second_one_in_this_process_is_refused_at_once(remote_url: str) -> None:
    """Within one process there is no wait: the lock is known to be held."""
    with RunLease(remote_url) as held:
        for again in (RunLease(remote_url), held):
            with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on .* \(this one\)"):
                again.acquire()
        held.check()


OTHER = """
import sys, time
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.processes import this_machine
from lightning_faulttolerant.storage.lock import RunLease
from lightning_faulttolerant.errors import RunInUseError
held = RunLease(sys.argv[1], lease_seconds=float(sys.argv[2]))
held.acquire()
autosaves = AutosaveSeries(sys.argv[1], keep_last=1, check=held.check)
print("held", flush=True)
for number, _ in enumerate(sys.stdin):
    try:
        autosaves.save({"by": "other"}, epoch=0, batch=number, global_step=number)
        print("saved", flush=True)
    except RunInUseError as error:
        print(error, flush=True)
"""


@pytest.fixture
def other(s3: str) -> Any:
    """Yield another process that holds the lock of a run, and saves when it gets a line."""
    command = [sys.executable, "-c", OTHER, f"{s3}/run", str(LEASE_SECONDS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def ask(other: Any) -> str:
    """Make the other process save."""
    other.stdin.write("\n")
    other.stdin.flush()
    answer: str = other.stdout.readline()
    return answer


def test_living_holder_keeps_the_lock(s3: str, other: Any) -> None:
    """A holder that renews is not disturbed, and the newcomer learns within the lease which process it is."""
    began = time.monotonic()
    with pytest.raises(RunInUseError, match=f"in use by process {other.pid} on {socket.gethostname()}"):
        RunLease(f"{s3}/run", lease_seconds=10 * LEASE_SECONDS).acquire()
    assert time.monotonic() - began < 5 * LEASE_SECONDS
    assert ask(other) == "saved\n"


def test_killed_holder_loses_the_lock_at_once(s3: str, other: Any) -> None:
    """A restart after SIGKILL on the same host must not wait for a lease to run out."""
    other.kill()
    other.wait()
    began = time.monotonic()
    with RunLease(f"{s3}/run", lease_seconds=60) as held:
        held.check()
    assert time.monotonic() - began < 5


def test_process_that_was_asleep_does_not_write_over_its_successor(
    s3: str, other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A holder that is suspended for longer than its lease loses it, and saves nothing when it wakes up."""
    assert ask(other) == "saved\n"
    os.kill(other.pid, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING), RunLease(f"{s3}/run", lease_seconds=LEASE_SECONDS) as held:
        assert "its lock was not renewed by" in caplog.text
        autosaves = AutosaveSeries(f"{s3}/run", keep_last=1, check=held.check)
        path = autosaves.save({"by": "us"}, epoch=0, batch=5, global_step=5)
        os.kill(other.pid, signal.SIGCONT)
        assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in ask(other)
        assert autosaves.load_newest() == (path, {"by": "us"})
        assert autosaves.paths() == [path]
        held.check()


def test_dead_process_of_another_host_is_waited_for(remote_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """This host can't see whether a process of another host is alive: that process has its lease to renew."""
    process_id = dead_process_id()
    put_lock(remote_url, hostname="elsewhere", process_id=process_id)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        assert time.monotonic() - began >= LEASE_SECONDS
        held.check()
    assert f"its lock was not renewed by process {process_id} on elsewhere" in caplog.text


class Waits:
    """Stands in for ``time`` where a newcomer waits: its sleep moves the clock, and an event happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
        self._now = 0.0
        self._happens: Callable[[], None] | None = happens
        monkeypatch.setattr(lock, "time", self)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        if self._happens is not None and self._now >= LEASE_SECONDS / 2:
            self._happens()
            self._happens = None


def test_renewal_on_another_host_keeps_the_newcomer_out(remote_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One renewal of the holder is enough."""
    put_lock(remote_url, hostname="elsewhere", process_id=1)
    Waits(monkeypatch, lambda: put_lock(remote_url, hostname="elsewhere", process_id=1, num_renewals=1))
    with pytest.raises(RunInUseError, match="in use by process 1 on elsewhere"):
        RunLease(remote_url, lease_seconds=LEASE_SECONDS).acquire()
    assert holder_of(remote_url)["num_renewals"] == 1


def test_lock_that_is_given_back_meanwhile_is_taken(remote_url: str) -> None:
    """A newcomer does not wait on for a holder that has gone."""
    put_lock(remote_url, hostname="elsewhere", process_id=1)
    end = threading.Timer(LEASE_SECONDS / 4, RemoteStore(remote_url).delete, [LOCK_NAME])
    end.start()
    began = time.monotonic()
    with RunLease(remote_url, lease_seconds=20 * LEASE_SECONDS) as held:
        held.check()
    assert time.monotonic() - began < 10 * LEASE_SECONDS
    end.join()


@pytest.mark.parametrize("process_id", ["dead", "ours"])
def test_lock_of_a_dead_process_of_this_host_is_taken_at_once(remote_url: str, process_id: str) -> None:
    """A dead process is known by its id, even if this process has been given the same one, as in containers."""
    number = os.getpid() if process_id == "ours" else dead_process_id()
    put_lock(remote_url, hostname=socket.gethostname(), process_id=number)
    began = time.monotonic()
    with RunLease(remote_url, lease_seconds=60):
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("process_id", ["dead", "ours"])
def test_process_of_another_container_with_our_host_name_is_not_taken_for_dead(
    remote_url: str, process_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers on their host's network share its name, not their process ids: the second run must be refused."""
    number = os.getpid() if process_id == "ours" else dead_process_id()
    theirs = {"hostname": socket.gethostname(), "process_id": number, "machine": "another container"}
    put_lock(remote_url, **theirs)  # type: ignore[arg-type]
    Waits(monkeypatch, lambda: put_lock(remote_url, num_renewals=1, **theirs))  # type: ignore[arg-type]
    with pytest.raises(RunInUseError, match=f"process {number} on {socket.gethostname()}"):
        RunLease(remote_url, lease_seconds=LEASE_SECONDS).acquire()
    assert holder_of(remote_url)["token"] == "theirs"


def test_lock_that_cannot_be_read_is_taken_over_when_nothing_moves(remote_url: str) -> None:
    """An unreadable lock keeps no process out for longer than a lease."""
    RemoteStore(remote_url).replace(LOCK_NAME, b"{")
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        held.check()


def test_who_loses_a_race_is_refused(remote_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that create the lock at the same time, the one whose lock does not stay must not begin."""
    real = RemoteStore.create

    def create_too_late(self: RemoteStore, name: str, content: bytes) -> None:
        real(self, name, content)
        put_lock(remote_url, hostname="elsewhere", process_id=1)

    monkeypatch.setattr(RemoteStore, "create", create_too_late)
    with pytest.raises(RunInUseError, match="process 1 on elsewhere"):
        RunLease(remote_url).acquire()
    assert holder_of(remote_url)["hostname"] == "elsewhere"


def test_object_is_created_exclusively(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 itself must refuse the second of two that create the lock at the same time."""
    put_lock(f"{s3}/run", hostname="elsewhere", process_id=1)
    with calls_of_s3(monkeypatch) as calls, pytest.raises(FileExistsError):
        RemoteStore(f"{s3}/run").create(LOCK_NAME, b"mine")
    assert [arguments["IfNoneMatch"] for _, arguments in calls] == ["*"]


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOSYS, "not here")], ids=["python", "system"])
def test_store_that_can_not_create_exclusively_is_locked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A store without exclusive creation must not be refused: the last of two writers stays there."""
    real = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise error
        real(self, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with RunLease("memory://no-exclusive-creation/run") as held:
        held.check()


def test_lost_lock_is_noticed(remote_url: str) -> None:
    """A lock that was taken over or removed is an error before anything is written, and its release changes nothing."""
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        RemoteStore(remote_url).delete(LOCK_NAME)
        with pytest.raises(RunInUseError, match="has been removed"):
            held.check()
        put_lock(remote_url, hostname="elsewhere", process_id=1)
        with pytest.raises(RunInUseError, match=r"process 1 on elsewhere.*taken over the directory"):
            held.check()
        time.sleep(LEASE_SECONDS)  # the thread must not renew over it
    assert (holder_of(remote_url)["hostname"], holder_of(remote_url)["num_renewals"]) == ("elsewhere", 0)


def test_lock_is_renewed(remote_url: str) -> None:
    """The holder shows by itself that it is alive, without a draw from the global generator."""
    before = random.getstate()
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS):
        deadline = time.monotonic() + 20
        while holder_of(remote_url)["num_renewals"] < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert holder_of(remote_url)["num_renewals"] >= 2
    assert random.getstate() == before


def test_store_that_fails_for_a_moment_costs_nothing(
    remote_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A renewal that fails is silently tried again."""
    has_failed = threading.Event()

    def fail(*_: object) -> None:
        has_failed.set()
        raise OSError(5, "unreachable")

    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        with monkeypatch.context() as patch:
            patch.setattr(RemoteStore, "replace", fail)
            assert has_failed.wait(20)
        deadline = time.monotonic() + 20
        while holder_of(remote_url)["num_renewals"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        held.check()
    assert capsys.readouterr() == ("", "")


def _in_child(held: RunLease, answers: Any) -> None:
    answers.put(held.is_held)
    held.release()


def test_forked_child_neither_holds_nor_releases(remote_url: str) -> None:
    """A data-loading worker has a copy of the object, and must not release the lock at its end."""
    with RunLease(remote_url) as held:
        answers = FORK.Queue()
        process = FORK.Process(target=_in_child, args=(held, answers))
        process.start()
        assert answers.get() is False
        process.join()
        held.check()


def test_lease_is_as_long_as_is_documented() -> None:
    """A lease lasts 30 s and is renewed three times in that time."""
    assert (lock.LEASE_SECONDS, lock.RENEWALS_PER_LEASE) == (30.0, 3)
