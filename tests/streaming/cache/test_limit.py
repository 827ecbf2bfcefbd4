"""The cache stays below its limit: it evicts the least recently used shards, never an only copy or one in use."""

from __future__ import annotations

import functools
import os
import random
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import CacheLimitError, MissingShardError
from lightning_faulttolerant.streaming.cache import (
    CacheLimit,
    ShardCache,
    directory as cache_directory,
)
from lightning_faulttolerant.streaming.cache.directory import LOCK_SUFFIX, FileLock
from tests.streaming.cache.children import child, run_all, wait_for
from tests.streaming.cache.remotes import Data, assert_tidy, cache_of, flaky, make_data, web, write


def shards_in(directory: Path) -> list[int]:
    """Return the numbers of the shards in a directory."""
    return sorted(int(path.name.split(".")[1]) for path in directory.glob("shard.*.mds"))


def fetch(cache: ShardCache, *shards: int) -> None:
    """Fetch shards one after the other, at different times."""
    for shard in shards:
        cache.fetch(shard)
        time.sleep(0.002)


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    """Only as many shards stay as fit, ordered by their last use, not by their download."""
    data = make_data(6)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(3500))
        fetch(cache, 0, 1, 2, 0, 3)
        assert shards_in(tmp_path) == [0, 2, 3]
        fetch(cache, 2, 4, 5)
        assert shards_in(tmp_path) == [2, 4, 5]
        assert not cache.is_here(0)
        fetch(cache, 0)
        assert shards_in(tmp_path) == [0, 4, 5]
    assert_tidy(tmp_path)
    assert len(list((tmp_path / cache_directory.MARKS_DIRECTORY).iterdir())) == 3


def test_the_streams_of_a_data_set_share_one_limit(tmp_path: Path) -> None:
    """A shard of one stream makes room for one of another."""
    one, other = make_data(3, salt="one"), make_data(3, salt="other")
    shared = CacheLimit("3.5kb")
    with flaky({**{f"one/{name}": content for name, content in one.files.items()}, **other.files}) as (remote, _):
        first = cache_of(one, tmp_path / "one", f"{remote}/one", limit=shared)
        second = cache_of(other, tmp_path / "other", remote, limit=shared)
        fetch(first, 0, 1, 2)
        fetch(second, 0, 1)
    assert shards_in(tmp_path / "one") == [2]
    assert shards_in(tmp_path / "other") == [0, 1]


def test_what_is_held_is_not_evicted(tmp_path: Path) -> None:
    """A shard in use stays until it is released as often as it was held; if no other can go, an error comes at once."""
    data = make_data(6)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(2000), download_timeout=1000)
        fetch(cache, 0)
        cache.hold(0)
        cache.hold(0)
        fetch(cache, 1, 2, 3)
        assert shards_in(tmp_path) == [0, 3]
        cache.hold(3)
        with pytest.raises(CacheLimitError, match=r"2000 bytes.*Of the 2000.*reading 2000.*takes 1000"):
            cache.fetch(4)
        cache.release(0)
        with pytest.raises(CacheLimitError):
            cache.fetch(4)
        cache.release(0)
        cache.fetch(4)
    assert shards_in(tmp_path) == [3, 4]


def test_an_only_copy_is_never_evicted(tmp_path: Path) -> None:
    """A stream without a remote does not count, and files that others put into a cache stay there."""
    local, data = make_data(3, salt="local"), make_data(4)
    write(tmp_path / "local", local.files)
    write(tmp_path / "cache", {"shard.00000.mds": data.raw["shard.00000.mds"]})
    shared = CacheLimit(2500)
    with flaky(data.files) as (remote, _):
        only = cache_of(local, tmp_path / "local", None, limit=shared)
        cache = cache_of(data, tmp_path / "cache", remote, limit=shared)
        fetch(only, 0, 1, 2)
        fetch(cache, 0, 1, 2, 3)
        assert shards_in(tmp_path / "local") == [0, 1, 2]
        assert shards_in(tmp_path / "cache") == [0, 3]


def test_compressed_files_count(tmp_path: Path) -> None:
    """A compressed file that is kept counts toward the limit, and is evicted with its shard."""
    data = make_data(4, compression="zstd")
    num_bytes = sum(map(len, (*data.raw.values(), *data.stored.values()))) // 2
    with flaky(data.files) as (remote, _):
        fetch(cache_of(data, tmp_path, remote, keep_zip=True, limit=CacheLimit(num_bytes)), 0, 1, 2)
    assert shards_in(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("*.zip"))) == 2


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_shards_that_are_being_fetched_count(tmp_path: Path) -> None:
    """Space that another process has reserved is waited for, not counted as free, unless that process is dead."""
    data = make_data(4)
    (tmp_path / cache_directory.MARKS_DIRECTORY).mkdir()
    path = str(tmp_path / cache_directory.MARKS_DIRECTORY / f"shard.00003.mds{LOCK_SUFFIX}")

    def announce() -> None:
        lock = FileLock(path)
        lock.acquire(0)
        lock.announce(1000)
        time.sleep(60)

    with flaky(data.files) as (remote, faults), child(announce) as other:
        options = {"download_timeout": 0.1, "download_retry": 0}
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(1500), **options)
        wait_for(lambda: os.path.exists(path) and os.stat(path).st_size == 1000)
        with pytest.raises(CacheLimitError, match="Of the 1000 that are in use"):
            cache.fetch(0)
        assert faults.asked == []
        other.kill()
        cache.fetch(0)


def read_all(data: Data, directory: Path, remote: str, seed: int) -> None:
    """Read shards in a random order, as a worker does, with a limit."""
    cache = cache_of(data, directory, remote, limit=CacheLimit(4000))
    draws = random.Random(seed)
    for _ in range(40):
        shard = draws.randrange(len(data.infos))
        name = data.infos[shard].files[0].basename
        assert cache.open(shard, lambda found, name=name: Path(found, name).read_bytes()) == data.raw[name]
        assert len(shards_in(directory)) <= 4


def test_many_processes_evict_from_each_other(tmp_path: Path) -> None:
    """Four processes that need ten shards where four fit read all their shards, and never exceed the limit."""
    data = make_data(10)
    write(tmp_path / "remote", data.files)
    remote = str(tmp_path / "remote")
    readers = [functools.partial(read_all, data, tmp_path / "local", remote, seed) for seed in range(4)]
    assert run_all(readers) == [0] * 4
    assert_tidy(tmp_path / "local")


def test_a_shard_that_another_process_has_just_used_is_kept(tmp_path: Path) -> None:
    """A shard that was used between the check and the eviction is not evicted."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(10_000))
        fetch(cache, 0)
        last_use = cache.contents().last_uses[0]
        fetch(cache, 0)
        assert cache.evict(0, last_use) == 0
        assert cache.evict(0, cache.contents().last_uses[0]) == 1000


def test_nothing_is_evicted_before_it_is_asked_for_in_vain(tmp_path: Path) -> None:
    """A shard that the remote does not have costs at most the space that it would have taken."""
    data = make_data(4)
    with web(data.stored, {"shard.00003.mds": ["404"] * 5}) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(3000))
        fetch(cache, 0, 1, 2)
        for _ in range(3):
            with pytest.raises(MissingShardError):
                cache.fetch(3)
    assert len(shards_in(tmp_path)) == 2
