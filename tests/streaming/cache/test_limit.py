"""Shards arrive before they are needed, and the least recently used go, never an only copy or one in use."""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
from pathlib import Path

import pytest

from lightning_faulttolerant import Stream, StreamingDataset
from lightning_faulttolerant.errors import CacheLimitError, DamagedShardError, MissingShardError
from lightning_faulttolerant.streaming.cache.directory import LOCK_SUFFIX, MARKS_DIRECTORY
from tests.processes import Child, run_all, wait_for
from tests.streaming.remotes import PER_SHARD, SHARD, assert_tidy, data_of, flaky, here, opened, put, web
from tests.streaming.shards import numbers

DATA = data_of(10)


def limit(num_shards: float, data: dict[str, bytes] = DATA) -> int:
    """Return the limit of a cache that has room for the index and so many shards."""
    return len(data["index.json"]) + int(num_shards * len(data["shard.00000.mds"]))


def fetch(dataset: StreamingDataset, *shards: int) -> None:
    """Fetch shards one after the other, at different times."""
    for shard in shards:
        dataset.prepare_shard(shard)
        time.sleep(0.002)


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    """Only as many shards stay as fit, ordered by their last use, not by their download."""
    with flaky(DATA, {"shard.00009.mds": ["missing"] * 3}) as (remote, _):
        dataset = opened(tmp_path, remote, cache_limit=limit(3.5))
        for shards, left in (((0, 1, 2, 0, 3), [0, 2, 3]), ((2, 4, 5), [2, 4, 5]), ((0,), [0, 4, 5])):
            fetch(dataset, *shards)
            assert here(tmp_path) == left
        assert_tidy(tmp_path)
        assert len(list((tmp_path / MARKS_DIRECTORY).glob("shard*"))) == 3
        for _ in range(3):  # a shard that the remote does not have costs at most its own room
            with pytest.raises(MissingShardError):
                dataset.prepare_shard(9)
        assert len(here(tmp_path)) == 2


def test_streams_share_a_limit_and_an_only_copy_is_never_evicted(tmp_path: Path) -> None:
    """A shard of one stream makes room for another's; without a remote, none counts, and what others put stays."""
    data = data_of(4)
    put(tmp_path / "local", data_of(3, first=1000))
    put(tmp_path / "b", {"shard.00000.mds": data["shard.00000.mds"]})
    with flaky({f"{name}/{file}": content for name in "ab" for file, content in data.items()}) as (remote, _):
        streams = [Stream(local=str(tmp_path / name), remote=f"{remote}/{name}") for name in "ab"]
        streams.append(Stream(local=str(tmp_path / "local")))
        room = limit(3.5, data) + len(data["index.json"])
        dataset = StreamingDataset(streams=streams, cache_limit=room)
        fetch(dataset, 0, 1, 2, 8, 9, 10, 5)
        assert [here(tmp_path / name) for name in ("a", "b", "local")] == [[2], [0, 1], [0, 1, 2]]
        fetch(dataset, 6, 7)
        assert [here(tmp_path / name) for name in ("a", "b", "local")] == [[], [0, 2, 3], [0, 1, 2]]


def test_compressed_files_count(tmp_path: Path) -> None:
    """A compressed file that is kept counts toward the limit, and is evicted with its shard."""
    data = data_of(10, compression="zstd")
    with flaky(data) as (remote, _):
        least = len(data["index.json"]) + 2 * (len(data["shard.00000.mds.zstd"]) + 520)
        fetch(opened(tmp_path, remote, keep_zip=True, cache_limit=least), 0, 1, 2)
    assert here(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("*.zstd"))) == 2


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_shards_that_are_being_fetched_count(tmp_path: Path) -> None:
    """Space that another process has reserved is waited for, not counted as free, unless that process is dead."""
    lock = tmp_path / MARKS_DIRECTORY / f"shard.00003.mds{LOCK_SUFFIX}"
    with flaky(DATA, {"shard.00003.mds": ["hang"]}) as (remote, faults):
        dataset = opened(tmp_path, remote, cache_limit=limit(1.5), download_timeout=0.1, download_retry=0)
        other = opened(tmp_path, remote, cache_limit=limit(1.5), download_timeout=60)
        with Child(lambda: other.prepare_shard(3)) as fetching:
            wait_for(lambda: lock.exists() and os.stat(lock).st_size > 500)
            with pytest.raises(CacheLimitError, match=r"Of the \d+ that are in use"):
                dataset.prepare_shard(0)
            assert faults.shards == []
            fetching.kill()
            dataset.prepare_shard(0)


def read_all(directory: Path, remote: str, seed: int) -> None:
    """Read shards in a random order, as a worker does, with a limit."""
    dataset, draws = opened(directory, remote, cache_limit=limit(4)), random.Random(seed)
    for _ in range(40):
        number = draws.randrange(dataset.size)
        assert dataset[number] == {"n": number}
        assert len(here(directory)) <= 4


def test_many_processes_evict_from_each_other(tmp_path: Path) -> None:
    """Four processes that need ten shards where four fit read all their shards, and never exceed the limit."""
    put(tmp_path / "remote", DATA)
    remote = str(tmp_path / "remote")
    assert run_all([functools.partial(read_all, tmp_path / "local", remote, seed) for seed in range(4)]) == [0] * 4
    assert_tidy(tmp_path / "local")


def test_a_limit_that_is_too_low_is_refused_at_construction(tmp_path: Path) -> None:
    """A limit has room for four of the largest shards, and for one beside all indexes; otherwise it is refused."""
    for number, (data, least) in enumerate(((DATA, limit(1)), (data_of(2), 4 * len(DATA["shard.00000.mds"])))):
        with flaky(data) as (remote, _):
            opened(tmp_path / str(number), remote, cache_limit=least)
            with pytest.raises(ValueError, match=f"too low.*at least {least}"):
                opened(tmp_path / str(number), remote, cache_limit=least - 1)
    put(tmp_path / "local", DATA)
    opened(tmp_path / "local", None, cache_limit=1)  # nothing is fetched, so nothing counts


def test_shards_that_are_fetched_ahead_keep_within_half_of_the_limit(tmp_path: Path) -> None:
    """The rest follows as the reader advances, and each shard is fetched once."""
    with flaky(DATA) as (remote, faults):
        samples = iter(opened(tmp_path, remote, cache_limit=limit(6), predownload=1000, batch_size=1))
        read = numbers(itertools.islice(samples, 2))
        wait_for(lambda: len(here(tmp_path)) > 2)
        time.sleep(0.1)
        assert (len(here(tmp_path)) - 1) * len(DATA["shard.00000.mds"]) < limit(6) / 2
        assert read + numbers(samples) == list(range(10 * PER_SHARD))
        assert sorted(faults.shards) == sorted(set(DATA) - {"index.json"})


# What is fetched ahead


def threads() -> list[threading.Thread]:
    """Return the threads of all prefetchers."""
    return [thread for thread in threading.enumerate() if thread.name == "shard-prefetch"]


@pytest.mark.parametrize(("batch_size", "expected"), [(14, {1: 1, 15: 3, 43: 4}), (56, {1: 2, 57: 6})])
def test_shards_are_fetched_ahead_as_far_as_told(tmp_path: Path, batch_size: int, expected: dict[int, int]) -> None:
    """First those of the first batch, and no others; as the reader advances, those of the next samples."""
    with flaky(DATA) as (remote, faults):
        samples, read = iter(opened(tmp_path, remote, predownload=2 * PER_SHARD, batch_size=batch_size)), []
        for num_read, num_shards in expected.items():
            read += [next(samples)["n"] for _ in range(num_read - len(read))]
            wait_for(lambda num=num_shards: here(tmp_path) == list(range(num)))
            time.sleep(0.05)
            assert here(tmp_path) == list(range(num_shards))
        assert read + numbers(samples) == list(range(10 * PER_SHARD))
        assert sorted(faults.shards) == sorted(set(DATA) - {"index.json"})
    assert threads() == []


@pytest.mark.parametrize(
    ("fault", "num_attempts", "kind"), [("missing", 1, MissingShardError), ("flip", 3, DamagedShardError)]
)
def test_an_error_is_raised_at_its_shard(tmp_path: Path, fault: str, num_attempts: int, kind: type[Exception]) -> None:
    """An error in the background is raised where its shard is needed, after all earlier shards, and comes once."""
    with flaky(DATA, {SHARD: [fault] * 9}) as (remote, faults):
        options = {"validate_hash": "sha1", "batch_size": 1, "predownload": 999}
        samples = iter(opened(tmp_path, remote, **options))
        read = [next(samples)["n"], next(samples)["n"]]
        wait_for(lambda: faults.shards.count(SHARD) == num_attempts and len(here(tmp_path)) == 9)
        with pytest.raises(kind, match=r"Shard 1 "):
            read.extend(sample["n"] for sample in samples)
        assert read == list(range(len(read)))
        assert faults.shards.count(SHARD) == num_attempts


def test_closing_gives_up_what_is_being_fetched(tmp_path: Path) -> None:
    """Neither a download that hangs nor the pause before the next attempt delays the closing."""
    with web(DATA, {f"shard.0000{number}.mds": ["hang"] * 9 for number in range(1, 5)}) as (remote, faults):
        samples = iter(opened(tmp_path, remote, batch_size=1, predownload=999))
        assert numbers([next(samples), next(samples)]) == [0, 1]
        wait_for(lambda: len(set(faults.shards)) == 5)
        assert threads()
        del samples
        assert threads() == []
        assert_tidy(tmp_path)
