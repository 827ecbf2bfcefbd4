"""One process holds the lock of a run at a time, on a disk or in a store; a dead holder loses it, and notices."""

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import RunInUseError
from lightning_faulttolerant.processes import this_machine
from lightning_faulttolerant.storage.lock import LOCK_NAME, RunLease, RunLock, open_lock
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.storage.store import open_store
from tests.faulty_files import FaultyFiles, fail_with
from tests.messages import error_of
from tests.processes import Child, dead_process_id, in_child, run_all, wait_for
from tests.storage.stores import requests_to_s3

LEASE_SECONDS = 0.6
EVER = 10_000.0
HERE = socket.gethostname()


def is_refused(path):
    """Return whether another process can't take the lock of a local directory."""

    def main():
        try:
            RunLock(Path(path)).acquire()
        except RunInUseError:
            os._exit(3)

    code = in_child(main)
    assert code in (0, 3)
    return code == 3


def put_lock(url, *, hostname="elsewhere", process_id=1, renewals=0, **more):
    """Write the lock of another process."""
    holder = {"hostname": hostname, "process_id": process_id, "num_renewals": renewals, "token": "theirs"}
    RemoteStore(url).replace(LOCK_NAME, json.dumps({**holder, "machine": this_machine(), **more}).encode())


def holder_of(url):
    """Read the lock."""
    return json.loads(RemoteStore(url).read(LOCK_NAME) or b"{}")


def test_lock_is_held_and_given_back(any_url):
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


def test_forked_child_neither_holds_nor_releases(any_url):
    """A data-loading worker has a copy of the object, can't take the lock, and does not release it at its end."""

    def child():
        assert not held.is_held
        for again in (open_lock(any_url), held) if "://" not in any_url else ():
            assert str(os.getppid()) in error_of(RunInUseError, again.acquire)
        held.release()
        held.__exit__(None, None, None)

    with open_lock(any_url) as held:
        assert in_child(child) == 0
        held.check()
        assert open_store(any_url).names() == [LOCK_NAME]
        assert "://" in any_url or is_refused(any_url)


# On a disk, the operating system keeps the lock.


def test_links_lead_to_the_same_lock(tmp_path):
    """POSIX locks don't conflict within a process: another path to the directory must be recognized."""

    def write_names():  # here, it would drop the lock
        for content in (b"", b"[]", b'{"hostname": 1, "process_id": null}', b"\xff"):
            (tmp_path / LOCK_NAME).write_bytes(content)
            assert "by a process on an unknown host" in error_of(RunInUseError, RunLock(tmp_path).acquire)

    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with RunLock(tmp_path), RunLock(tmp_path / "other"):
        error_of(RunInUseError, RunLock(tmp_path / "link").acquire)
        assert is_refused(tmp_path)
        assert in_child(write_names) == 0
    assert not is_refused(tmp_path)


def test_lock_of_a_killed_process_is_free(tmp_path):
    """After SIGKILL the next run starts immediately, even if a worker that the dead process has forked is alive."""
    reader, writer = os.pipe()

    def hold():
        RunLock(tmp_path).acquire()
        worker = os.fork()
        if worker:
            os.write(writer, f"{worker}\n".encode())
        signal.pause()

    holder = Child(hold)
    with open(reader) as answers:
        worker = int(answers.readline())
    os.close(writer)
    try:
        assert is_refused(tmp_path)
        holder.kill()
        assert (tmp_path / LOCK_NAME).exists()
        assert not is_refused(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_system_that_can_not_lock_or_write(tmp_path, monkeypatch, caplog):
    """Without locks, the run continues with a warning that names the directory; a full disk leaves no lock."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        with RunLock(tmp_path) as held:
            assert held.is_held
            error_of(RunInUseError, RunLock(tmp_path).acquire)
    [message] = caplog.messages
    assert str(tmp_path) in message
    assert "No locks available" in message
    with FaultyFiles(tmp_path, fail_with(errno.ENOSPC), kind="write"):
        assert "No space left" in error_of(OSError, RunLock(tmp_path).acquire)
    assert not is_refused(tmp_path)
    with RunLock(tmp_path):
        pass


def test_never_two_inside_while_the_file_is_removed_and_made_again(tmp_path):
    """A release removes the file: a process or thread that had opened it before does not believe that it holds it."""

    def compete():
        for _ in range(200):
            with contextlib.suppress(RunInUseError), RunLock(tmp_path):
                os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL))
                os.unlink(tmp_path / "inside")

    def compete_in_threads():
        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(compete) for _ in range(2)]:
                each.result()

    assert run_all([compete_in_threads] * 2) == [0, 0]


# In a store, it is an object that its holder renews.

DEAD, OURS = {"process_id": dead_process_id}, {"hostname": HERE, "process_id": os.getpid}
CONTAINER = {"machine": "another container"}
HOLDERS = {
    "dead here": ({**DEAD, "hostname": HERE}, "taken at once"),
    "our own id, as in containers": (OURS, "taken at once"),
    "dead elsewhere": (DEAD, "taken after a lease"),
    "unreadable": (None, "taken after a lease"),
    "our id in a container": ({**OURS, **CONTAINER}, "renewed"),
    "renews elsewhere": ({}, "renewed"),
    "gives back": ({}, "deleted"),
}


@pytest.mark.parametrize(("theirs", "what"), HOLDERS.values(), ids=HOLDERS)
def test_whether_a_held_lock_is_taken(remote_url, caplog, theirs, what):
    """A holder known to be dead loses its lock at once, an unknown one after a lease, and one that renews never."""
    if theirs is None:
        RemoteStore(remote_url).replace(LOCK_NAME, b"{")
    else:
        theirs = {**theirs, "process_id": theirs.get("process_id", lambda: 1)()}
        put_lock(remote_url, **theirs)
    is_over = threading.Event()

    def happen():
        renewals = 0
        while not is_over.wait(0.2):
            renewals += 1
            if what == "renewed":
                put_lock(remote_url, renewals=renewals, **theirs)
            elif what == "deleted":
                RemoteStore(remote_url).delete(LOCK_NAME)
                return

    meanwhile = threading.Thread(target=happen)
    meanwhile.start()
    lease_seconds = {"taken at once": EVER, "taken after a lease": LEASE_SECONDS}.get(what, 20.0)
    lease, began = RunLease(remote_url, lease_seconds=lease_seconds), time.monotonic()
    try:
        if what == "renewed":
            assert "in use by process" in error_of(RunInUseError, lease.acquire)
            assert holder_of(remote_url)["token"] == "theirs"
        else:
            with lease:
                lease.check()
                assert holder_of(remote_url)["process_id"] == os.getpid()
        assert ("its lock was not renewed by" in caplog.text) == (what == "taken after a lease")
        assert what != "taken after a lease" or time.monotonic() - began >= LEASE_SECONDS
    finally:
        is_over.set()
        meanwhile.join()


def test_s3_itself_refuses_the_second_lock(s3, monkeypatch):
    """The request that creates the lock has the condition that there is none."""
    put_lock(f"{s3}/other")
    with requests_to_s3(monkeypatch) as requests:
        error_of(FileExistsError, lambda: RemoteStore(f"{s3}/other").create(LOCK_NAME, b"mine"))
    assert [arguments["IfNoneMatch"] for _, arguments in requests] == ["*"]


def test_who_loses_a_race_is_refused(remote_url, monkeypatch):
    """Of two that create the lock at the same time, the one whose lock does not stay does not begin."""
    real = RemoteStore.create

    def create_too_late(self, name, content):
        real(self, name, content)
        put_lock(remote_url)

    monkeypatch.setattr(RemoteStore, "create", create_too_late)
    assert "process 1 on elsewhere" in error_of(RunInUseError, RunLease(remote_url).acquire)
    assert holder_of(remote_url)["hostname"] == "elsewhere"


def test_lost_lock_is_noticed_and_not_renewed(remote_url):
    """A lock that was removed or taken over is an error before a write, and its old holder leaves it alone."""
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        RemoteStore(remote_url).delete(LOCK_NAME)
        assert "has been removed" in error_of(RunInUseError, held.check)
        put_lock(remote_url)
        assert "taken over the directory" in error_of(RunInUseError, held.check)
        time.sleep(LEASE_SECONDS)
    assert (holder_of(remote_url)["hostname"], holder_of(remote_url)["num_renewals"]) == ("elsewhere", 0)


def test_lock_is_renewed_also_after_a_failure(remote_url, monkeypatch, capsys):
    """The holder shows that it is alive, tries a failed renewal again silently, and draws no random number."""
    before, has_failed = random.getstate(), threading.Event()
    real = RemoteStore.replace

    def fail_once(self, name, content):
        if not has_failed.is_set() and threading.current_thread().name == "run-lease":
            has_failed.set()
            raise OSError(5, "unreachable")
        real(self, name, content)

    monkeypatch.setattr(RemoteStore, "replace", fail_once)
    with RunLease(remote_url, lease_seconds=LEASE_SECONDS) as held:
        wait_for(lambda: holder_of(remote_url)["num_renewals"] >= 3)
        held.check()
    assert has_failed.is_set()
    assert random.getstate() == before
    assert capsys.readouterr() == ("", "")
