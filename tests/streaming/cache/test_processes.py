"""Ranks, workers, and runs share a cache directory, and each of them may be killed at any moment."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.streaming.cache.directory import MARKS_DIRECTORY
from tests.processes import Child, in_child, run_all, wait_for
from tests.streaming.remotes import PER_SHARD, SHARD, assert_tidy, assert_whole, data_of, flaky, opened, put, web
from tests.streaming.shards import numbers

DATA = data_of()


def read(local: Path, remote: str) -> None:
    """Read all samples."""
    dataset = opened(local, remote)
    assert numbers(dataset[:]) == list(range(dataset.size))


def test_one_reader_downloads_a_shard_for_all(tmp_path: Path) -> None:
    """Four processes that want the same shards at the same time request each one from the remote once."""
    with web(DATA, {name: ["slow"] for name in DATA if name != "index.json"}) as (remote, faults):
        assert run_all([lambda: read(tmp_path, remote)] * 4) == [0] * 4
        assert sorted(faults.shards) == sorted(set(DATA) - {"index.json"})
        assert_whole(opened(tmp_path, remote))


def test_many_processes_agree_on_the_directory_of_an_index(tmp_path: Path) -> None:
    """Of two data sets that begin at the same time in one directory, one gets it, and the other a folder in it."""

    def fetch(first: int) -> None:
        with flaky(data_of(first=first)) as (remote, _):
            assert opened(tmp_path, remote)[0] == {"n": first}

    assert run_all([lambda: fetch(0), lambda: fetch(1000)] * 3) == [0] * 6
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("index-")]) == 1


def fetch_slowly(data: dict[str, bytes], local: Path) -> None:
    """Fetch all shards over and over from a slow remote."""
    with flaky(data, dict.fromkeys(set(data) - {"index.json"}, ["drip"] * 1000)) as (remote, _):
        while True:
            dataset = opened(local, remote, validate_hash="sha1")
            for shard in range(dataset.num_shards):
                dataset.prepare_shard(shard)
                dataset.evict_shard(shard)


def test_a_process_that_is_killed_blocks_nobody(tmp_path: Path) -> None:
    """A killed process leaves at most files that the next one sweeps, and the next one gets every shard complete."""
    data, num_left = data_of(compression="zstd"), 0
    for seconds in (0, 0.05, 0.1):
        with Child(lambda: fetch_slowly(data, tmp_path)):
            wait_for(lambda: any(tmp_path.rglob(".*.tmp-*")))
            time.sleep(seconds)
        num_left += sum(1 for _ in tmp_path.rglob(".*.tmp-*"))
        with flaky(data) as (remote, _):
            assert_whole(opened(tmp_path, remote, validate_hash="sha1", download_timeout=1))
        for path in tmp_path.glob("shard*"):
            path.unlink()
    assert num_left > 0


def test_a_waiting_process_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    """One that waits for a download continues promptly when the downloading one is killed, also if its child is not."""
    reading, writing = os.pipe()
    with web(DATA, {SHARD: ["hang"]}) as (remote, faults):

        def fetch() -> None:
            opened(tmp_path, remote, download_timeout=1000).prepare_shard(1)

        def fetch_beside_a_worker() -> None:
            threading.Thread(target=fetch).start()
            wait_for(lambda: any((tmp_path / MARKS_DIRECTORY).glob("*.lock")))
            os.write(writing, Child(lambda: time.sleep(60)).process_id.to_bytes(8, "big"))
            time.sleep(60)

        with Child(fetch_beside_a_worker) as first:
            worker = int.from_bytes(os.read(reading, 8), "big")
            wait_for(lambda: faults.shards)
            with Child(fetch) as second:
                time.sleep(0.1)
                assert faults.shards == [SHARD]
                first.kill()
                assert second.wait() == 0
        os.kill(worker, signal.SIGKILL)
    assert (tmp_path / SHARD).read_bytes() == DATA[SHARD]


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_a_process_that_sleeps_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """A lock holder that does not move is bypassed once its time must be over."""
    with (
        web(DATA, {SHARD: ["hang"]}) as (remote, faults),
        Child(lambda: opened(tmp_path, remote).prepare_shard(1)) as sleeper,
    ):
        wait_for(lambda: faults.shards)
        os.kill(sleeper.process_id, signal.SIGSTOP)
        opened(tmp_path, remote, download_timeout=0.5, download_retry=0).prepare_shard(1)
    assert (tmp_path / SHARD).read_bytes() == DATA[SHARD]


def test_a_fork_while_a_thread_is_fetching_is_safe(tmp_path: Path) -> None:
    """A worker that is forked while its parent fetches ahead reads and closes like any other, and blocks nowhere."""
    with web(DATA, {SHARD: ["hang"]}) as (remote, faults):
        dataset = opened(tmp_path, remote, predownload=PER_SHARD, batch_size=1)
        samples = [iter(dataset)]
        assert numbers([next(samples[0]), next(samples[0])]) == [0, 1]
        wait_for(lambda: SHARD in faults.shards)

        def work() -> None:
            samples.clear()
            assert dataset[0] == {"n": 0}
            assert dataset[-1] == {"n": 3 * PER_SHARD - 1}

        with Child(work) as worker:
            assert worker.wait() == 0
        faults.is_over.set()
        assert numbers(samples[0]) == list(range(2, 3 * PER_SHARD))


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    """A temporary file goes if its process is dead, had this process's number, or was silent for long elsewhere."""
    host, dead = socket.gethostname(), Child(lambda: None)
    dead.wait()
    old, new = time.time() - 7200, time.time()

    def leave(host: str, process_id: int, modified: float) -> str:
        path = tmp_path / f".{SHARD}.tmp-{host}-{process_id}-0123456789abcdef"
        path.write_bytes(b"")
        os.utime(path, (modified, modified))
        return path.name

    gone = {leave(host, dead.process_id, new), leave(host, os.getpid(), new), leave(host, 1, old)}
    gone.add(leave("elsewhere", 1, old))
    stays = {leave(host, os.getppid(), new), leave("elsewhere", 2, new), "notes.tmp"}
    (tmp_path / "notes.tmp").write_bytes(b"not ours")
    put(tmp_path / MARKS_DIRECTORY, {"shard.00002.mds.lock": b""})
    put(tmp_path / MARKS_DIRECTORY, {f".{SHARD}.mark.tmp-{host}-{dead.process_id}-0123456789abcdef": b""})
    with flaky(DATA) as (remote, _):
        opened(tmp_path, remote).prepare_shard(1)
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & gone
    assert stays <= left
    assert [path.name for path in (tmp_path / MARKS_DIRECTORY).glob("*shard*")] == [f"{SHARD}.mark"]


@pytest.mark.parametrize("case", ["the index, before", "the shard, after", "the shard, after, and its content is lost"])
def test_a_process_that_is_killed_as_it_renames_a_file_is_no_obstacle(tmp_path: Path, case: str) -> None:
    """A shard is used and evicted as usual if its process died as it renamed the file, unless the content is lost."""
    replace = os.replace

    def killed(source: str | Path, target: str | Path) -> None:
        is_file = Path(target).name == ("index.json" if "index" in case else SHARD)
        if is_file and "before" in case:
            os._exit(9)
        replace(source, target)
        if is_file:
            os._exit(9)

    def first() -> None:
        os.replace = killed  # type: ignore[assignment]
        opened(tmp_path, remote).prepare_shard(1)

    with flaky(DATA) as (remote, faults):
        assert in_child(first) == 9
        if "lost" in case:
            (tmp_path / SHARD).write_bytes(bytes(len(DATA[SHARD])))
        dataset = opened(tmp_path, remote, download_timeout=1)
        dataset.prepare_shard(1)
        assert faults.shards == [SHARD] * (case != "the shard, after")
        dataset.evict_coldest_shard()
        assert not (tmp_path / SHARD).exists()
        assert_whole(dataset)


def test_locking_is_not_needed_for_right_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, each process fetches for itself, and all shards are right."""

    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with web(DATA, {name: ["slow"] * 2 for name in DATA}) as (remote, _):
        assert run_all([lambda: read(tmp_path, remote)] * 2) == [0] * 2
        assert_whole(opened(tmp_path, remote))
    assert_tidy(tmp_path)
