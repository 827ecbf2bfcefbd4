"""The cache stays below its limit: it evicts the least recently used shards, never an only copy or one in use."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant import Stream, StreamingDataset
from lightning_faulttolerant.errors import CacheLimitError, MissingShardError
from lightning_faulttolerant.streaming.cache import CacheLimit, Need, Prefetcher, ShardCache
from lightning_faulttolerant.streaming.cache.directory import LOCK_SUFFIX, MARKS_DIRECTORY
from lightning_faulttolerant.streaming.format.index import parse_index
from tests.streaming.children import child, run_all, wait_for
from tests.streaming.remotes import assert_tidy, data_of, flaky, opened, put

DATA = data_of(10)


def limit(num_shards: float, data: dict[str, bytes] = DATA) -> int:
    """Return the limit of a cache that has room for the index and so many shards."""
    return len(data["index.json"]) + int(num_shards * len(data["shard.00000.mds"]))


def here(directory: Path) -> list[int]:
    """Return the numbers of the shards in a directory."""
    return sorted(int(path.name.split(".")[1]) for path in directory.glob("shard.*.mds"))


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
        with child(lambda: other.prepare_shard(3)) as fetching:
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


SIZE = len(DATA["shard.00000.mds"])


def cache_of(local: Path, remote: str, num_shards: int) -> ShardCache:
    """Return a cache with room for so many shards."""
    shards, room = parse_index(DATA["index.json"], source="s"), CacheLimit(num_shards * SIZE)
    return ShardCache(local=str(local), remote=remote, shards=shards, limit=room)


def needs(num_shards: int) -> Iterator[Need]:
    """Yield shards 0, 1, 2, ... of one stream, one every 10 samples."""
    return (Need(number * 10, 0, number) for number in range(num_shards))


@pytest.mark.parametrize(("num_readers", "num_ahead"), [(1, 3), (3, 1)])
def test_shards_that_are_fetched_ahead_keep_within_their_part_of_the_limit(
    tmp_path: Path, num_readers: int, num_ahead: int
) -> None:
    """Half the limit, divided among the readers, is fetched ahead; the rest follows as the reader advances, once."""
    with flaky(DATA) as (remote, faults):
        cache = cache_of(tmp_path, remote, 6)
        with Prefetcher([cache], needs(8), predownload=1000, num_readers=num_readers) as ahead:
            wait_for(lambda: len(here(tmp_path)) == num_ahead)
            time.sleep(0.1)
            assert here(tmp_path) == list(range(num_ahead))
            for number in range(8):
                ahead.advance(10 * number)
                wait_for(lambda number=number: number in here(tmp_path))  # otherwise this thread may be the first
                ahead.wait(0, number)
        assert sorted(faults.shards) == [f"shard.0000{number}.mds" for number in range(8)]


def test_what_is_needed_now_goes_before_what_will_be(tmp_path: Path) -> None:
    """A shard outside the plan finds room beside those fetched ahead; a reader that fills all gets an error."""
    with flaky(DATA) as (remote, _):
        cache = cache_of(tmp_path, remote, 2)
        with Prefetcher([cache], needs(1), predownload=1000) as ahead:
            wait_for(lambda: here(tmp_path) == [0])
            cache.fetch(5)
            cache.hold(5)
            ahead.wait(0, 7)
            assert here(tmp_path) == [5, 7]
            cache.hold(7)
            with pytest.raises(CacheLimitError, match=f"reading {2 * SIZE}"):
                ahead.wait(0, 8)
        cache.release(7)
        last_use = cache.contents().last_uses[7]
        time.sleep(0.002)
        cache.fetch(7)
        assert cache.evict(7, last_use) == 0  # it was used between the look and the eviction
        assert cache.evict(7, cache.contents().last_uses[7]) == SIZE
