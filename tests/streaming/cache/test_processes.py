"""Ranks, workers, and runs share a cache directory, and each of them may be killed at any moment."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.streaming.cache import CacheLimit, directory
from lightning_faulttolerant.streaming.cache.directory import FileLock
from tests.processes import in_child
from tests.streaming.cache.children import Child, child, run_all, wait_for
from tests.streaming.cache.remotes import (
    HASH,
    Data,
    assert_fetched,
    assert_tidy,
    assert_whole,
    cache_of,
    flaky,
    make_data,
    web,
    write,
)

SHARD = "shard.00001.mds"


def test_one_process_downloads_a_shard_for_all(tmp_path: Path) -> None:
    """Four processes that want the same shards at the same time request each one from the remote once."""
    data = make_data(num_bytes=300)
    with web(data.stored, {name: ["slow"] for name in data.stored}) as (remote, faults):
        assert run_all([lambda: assert_fetched(cache_of(data, tmp_path, remote), data)] * 4) == [0] * 4
        assert sorted(faults.asked) == sorted(data.stored)


def test_threads_of_one_process_download_a_shard_once(tmp_path: Path) -> None:
    """Threads share a download, although the locks of the operating system do not distinguish threads."""
    data = make_data(num_bytes=300)
    with web(data.stored, {name: ["slow"] for name in data.stored}) as (remote, faults):
        caches = [cache_of(data, tmp_path, remote) for _ in range(4)]
        threads = [threading.Thread(target=assert_fetched, args=(cache, data)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(faults.asked) == sorted(data.stored)
    assert_whole(caches[0], data)


def fetch_slowly(data: Data, local: Path) -> None:
    """Fetch all shards over and over from a slow remote."""
    kinds = ["drip"] * 1000
    with flaky(data.files, dict.fromkeys(data.stored, kinds)) as (remote, _):
        while True:
            cache = cache_of(data, local, remote, validate_hash=HASH)
            for number in range(len(data.infos)):
                cache.fetch(number)
                (local / data.infos[number].files[0].basename).unlink()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_process_that_is_killed_blocks_nobody(tmp_path: Path, compression: str | None) -> None:
    """A killed process leaves at most files that the next one sweeps, and the next one gets every shard complete."""
    draws = random.Random(1)
    data = make_data(num_bytes=500, compression=compression)
    num_left = 0
    for _ in range(3):
        with child(lambda: fetch_slowly(data, tmp_path)):
            wait_for(lambda: any(tmp_path.rglob(".*.tmp-*")))
            time.sleep(draws.uniform(0, 0.15))
        num_left += sum(1 for _ in tmp_path.rglob(".*.tmp-*"))
        with flaky(data.files) as (remote, _):
            cache = cache_of(data, tmp_path, remote, validate_hash=HASH, download_timeout=1)
            (tmp_path / SHARD).unlink(missing_ok=True)  # to have something to fetch
            assert_whole(cache, data)
        for path in tmp_path.glob("shard*"):
            path.unlink()
    assert num_left > 0


def test_a_waiting_process_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    """A process that waits for a download continues promptly when the downloading process is killed."""
    data = make_data()
    with (
        web(data.stored, {SHARD: ["hang"]}) as (remote, faults),
        child(lambda: cache_of(data, tmp_path, remote).fetch(1)) as first,
    ):
        wait_for(lambda: faults.asked)
        with child(lambda: cache_of(data, tmp_path, remote).fetch(1)) as second:
            time.sleep(0.1)
            assert faults.asked == [SHARD]
            first.kill()
            assert second.wait() == 0
    assert (tmp_path / SHARD).read_bytes() == data.raw[SHARD]


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_a_process_that_sleeps_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """A lock holder that does not move is bypassed once its time must be over."""
    data = make_data()
    with (
        web(data.stored, {SHARD: ["hang"]}) as (remote, faults),
        child(lambda: cache_of(data, tmp_path, remote).fetch(1)) as sleeper,
    ):
        wait_for(lambda: faults.asked)
        sleeper.stop()
        with flaky(data.stored) as (other, _):
            cache_of(data, tmp_path, other, download_timeout=0.5, download_retry=0).fetch(1)
    assert (tmp_path / SHARD).read_bytes() == data.raw[SHARD]


def test_a_child_of_a_process_that_holds_a_lock_does_not_hold_it(tmp_path: Path) -> None:
    """A worker that outlives a killed rank does not keep others from fetching what the rank was fetching."""
    path = str(tmp_path / "shard.lock")
    reading, writing = os.pipe()

    def rank() -> None:
        assert FileLock(path).acquire(0)
        worker = Child(lambda: time.sleep(60))
        os.write(writing, worker.process_id.to_bytes(8, "big"))
        time.sleep(60)

    with child(rank) as first:
        worker = int.from_bytes(os.read(reading, 8), "big")
        assert not FileLock(path).acquire(0)
        first.kill()
        lock = FileLock(path)
        assert lock.acquire(5)
        lock.release()
    os.kill(worker, signal.SIGKILL)
    os.close(reading)
    os.close(writing)


def test_a_fork_while_a_thread_is_fetching_is_safe(tmp_path: Path) -> None:
    """A worker that is forked while another thread of its parent downloads fetches like any other."""
    data = make_data()

    def work() -> None:
        assert not cache.is_held(0)
        cache.fetch(0)
        cache.hold(2)
        cache.fetch(2)
        cache.release(2)

    with web(data.stored, {SHARD: ["hang"]}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        cache.hold(0)
        thread = threading.Thread(target=cache.fetch, args=(1,))
        thread.start()
        wait_for(lambda: faults.asked)
        with child(work) as worker:
            assert worker.wait() == 0
        faults.is_over.set()
        thread.join()
    assert_whole(cache, data)


def test_a_cache_goes_to_another_process(tmp_path: Path) -> None:
    """A cache is pickled with all it needs, and the next process checks again what an earlier one has checked."""
    data = make_data()
    write(tmp_path / "remote", data.files)
    cache = cache_of(data, tmp_path / "local", str(tmp_path / "remote"), limit=CacheLimit(3000))
    cache.fetch(0)
    cache.hold(0)
    pickled = pickle.dumps(cache)
    assert in_child(lambda: assert_whole(pickle.loads(pickled), data)) == 0
    copy = pickle.loads(pickled)
    assert not copy.is_held(0)
    (tmp_path / "local" / "shard.00000.mds").write_bytes(b"")
    assert not copy.is_here(0)


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    """A temporary file goes if its process is dead, had this process's number, or was silent for long elsewhere."""
    data = make_data()
    host = socket.gethostname()
    dead = Child(lambda: None)
    dead.wait()
    old, new = time.time() - 7200, time.time()

    def leave(host: str, process_id: int, modified: float) -> str:
        path = tmp_path / f".{SHARD}.tmp-{host}-{process_id}-0123456789abcdef"
        path.write_bytes(b"")
        os.utime(path, (modified, modified))
        return path.name

    gone = {
        leave(host, dead.process_id, new),
        leave(host, os.getpid(), new),
        leave(host, 1, old),
        leave("elsewhere", 1, old),
    }
    stays = {leave(host, os.getppid(), new), leave("elsewhere", 2, new)}
    (tmp_path / "notes.tmp").write_bytes(b"not ours")
    own = tmp_path / directory.MARKS_DIRECTORY
    own.mkdir()
    (own / "shard.00002.mds.lock").write_bytes(b"")
    (own / f".{SHARD}.mark.tmp-{host}-{dead.process_id}-0123456789abcdef").write_bytes(b"")
    with flaky(data.files) as (remote, _):
        cache_of(data, tmp_path, remote).fetch(1)
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & gone
    assert stays | {"notes.tmp"} <= left
    assert [path.name for path in own.iterdir()] == [f"{SHARD}.mark"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_process_that_is_killed_after_a_download_has_said_what_it_brought(tmp_path: Path, is_lost: bool) -> None:
    """A shard is used and evicted as usual if its process died as it renamed the file, unless the content is lost."""
    data = make_data()
    replace = os.replace

    def killed_after(source: str | Path, target: str | Path) -> None:
        replace(source, target)
        if os.fspath(target).endswith(SHARD):
            os._exit(9)

    def first() -> None:
        os.replace = killed_after  # type: ignore[assignment]
        cache_of(data, tmp_path, remote).fetch(1)

    with flaky(data.files) as (remote, faults):
        assert in_child(first) == 9
        if is_lost:
            (tmp_path / SHARD).write_bytes(bytes(1000))
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(1000))
        cache.fetch(1)
        assert faults.asked == [SHARD] * is_lost
        assert (tmp_path / SHARD).read_bytes() == data.raw[SHARD]
        cache.fetch(2)
        assert not (tmp_path / SHARD).exists()


def test_locking_is_not_needed_for_right_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, each process fetches for itself, and all shards are right."""
    import fcntl

    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    data = make_data(num_bytes=300)
    with web(data.stored, {name: ["slow"] * 2 for name in data.stored}) as (remote, _):
        assert run_all([lambda: cache_of(data, tmp_path, remote).fetch(1)] * 2) == [0] * 2
        assert_whole(cache_of(data, tmp_path, remote), data)
    assert_tidy(tmp_path)
