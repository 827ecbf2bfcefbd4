"""Shards arrive before they are needed, errors are raised at their shards, and no thread is left running."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import CacheLimitError, DamagedShardError, MissingShardError, ShardError
from lightning_faulttolerant.streaming.cache import CacheLimit, Need, Prefetcher
from lightning_faulttolerant.testing.processes import fork_and_run
from tests.streaming.cache.children import child, wait_for
from tests.streaming.cache.remotes import HASH, Data, assert_tidy, cache_of, flaky, make_data, web


def needs(num_shards: int, *, step: int = 10) -> Iterator[Need]:
    """Return shards 0, 1, 2, ... of one stream, one every `step` samples."""
    return (Need(number * step, 0, number) for number in range(num_shards))


def threads() -> list[threading.Thread]:
    """Return the threads of all prefetchers."""
    return [thread for thread in threading.enumerate() if thread.name == "shard-prefetch"]


def here(data: Data, directory: Path) -> list[int]:
    """Return the numbers of the shards in the directory."""
    return [number for number, info in enumerate(data.infos) if (directory / info.files[0].basename).exists()]


def test_shards_are_fetched_ahead_as_far_as_told(tmp_path: Path) -> None:
    """As the reader advances, the shards of the next samples are fetched, and no others."""
    data = make_data(8)
    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs(8), predownload=20) as ahead:
            wait_for(lambda: here(data, tmp_path) == [0, 1, 2])
            time.sleep(0.05)
            assert here(data, tmp_path) == [0, 1, 2]
            assert cache.is_held(0)
            assert ahead.wait(0, 0) == str(tmp_path)
            assert not cache.is_held(0)
            ahead.advance(9)
            time.sleep(0.05)
            assert here(data, tmp_path) == [0, 1, 2]
            ahead.advance(10)
            wait_for(lambda: here(data, tmp_path) == [0, 1, 2, 3])
            ahead.advance(40)
            wait_for(lambda: here(data, tmp_path) == [0, 1, 2, 3, 4, 5, 6])
            ahead.advance(70)
            wait_for(lambda: here(data, tmp_path) == list(range(8)))
        assert sorted(faults.asked) == sorted(data.stored)
    assert threads() == []


def test_what_is_not_there_in_time_is_waited_for(tmp_path: Path) -> None:
    """A reader that is faster than the downloads gets each shard complete, and none is downloaded twice."""
    data = make_data(6)
    with web(data.stored, {name: ["slow"] for name in data.stored}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs(6), predownload=100) as ahead:
            for number, info in enumerate(data.infos):
                path = Path(ahead.wait(0, number), info.files[0].basename)
                assert path.read_bytes() == data.raw[info.files[0].basename]
        assert sorted(faults.asked) == sorted(data.stored)
    assert_tidy(tmp_path)


def test_a_shard_that_is_not_in_the_plan_is_fetched_too(tmp_path: Path) -> None:
    """A reader that requests a shard outside the plan, or after its end, gets it."""
    data = make_data(3)
    with flaky(data.files) as (remote, _):
        ahead = Prefetcher([cache_of(data, tmp_path, remote)], needs(0), predownload=10)
        ahead.wait(0, 2)
        ahead.close()
        ahead.wait(0, 1)
    assert here(data, tmp_path) == [1, 2]


@pytest.mark.parametrize(("fault", "kind"), [("missing", MissingShardError), ("flip", DamagedShardError)])
def test_an_error_is_raised_at_its_shard(tmp_path: Path, fault: str, kind: type[Exception]) -> None:
    """An error in the background is raised where its shard is needed, after all earlier shards, and is not an end."""
    data = make_data(6)
    num_attempts = 1 if fault == "missing" else 3
    with flaky(data.files, {"shard.00003.mds": [fault] * num_attempts}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote, validate_hash=HASH)
        with Prefetcher([cache], needs(6), predownload=100) as ahead:
            wait_for(lambda: here(data, tmp_path) == [0, 1, 2, 4, 5])
            wait_for(lambda: not cache.is_held(3))
            for number in (0, 1, 2):
                ahead.wait(0, number)
            with pytest.raises(kind, match=r"Shard 3 "):
                ahead.wait(0, 3)
            assert faults.asked.count("shard.00003.mds") == num_attempts
            ahead.wait(0, 3)  # it exists now
            ahead.wait(0, 5)


def test_an_error_to_come_is_waited_for(tmp_path: Path) -> None:
    """A reader that needs a shard being fetched gets the error of that fetch, and does not repeat all attempts."""
    data = make_data(3)
    with flaky(data.files, {"shard.00000.mds": ["hang"] * 9}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote, download_timeout=0.2, download_retry=0)
        with Prefetcher([cache], needs(1), predownload=100) as ahead:
            wait_for(lambda: faults.asked)
            with pytest.raises(ShardError, match=r"Shard 0 .*1 attempt"):
                ahead.wait(0, 0)
            assert faults.asked == ["shard.00000.mds"]


def test_an_error_of_the_plan_is_raised(tmp_path: Path) -> None:
    """A plan that fails is not the end of the epoch."""

    def broken() -> Iterator[Need]:
        yield Need(0, 0, 0)
        raise ZeroDivisionError("the plan")

    data = make_data(3)
    with flaky(data.files) as (remote, _):
        ahead = Prefetcher([cache_of(data, tmp_path, remote)], broken(), predownload=10)
        wait_for(lambda: not any(thread.is_alive() for thread in threads()))
        with pytest.raises(ZeroDivisionError, match="the plan"):
            ahead.wait(0, 1)
        ahead.close()


def test_closing_gives_up_what_is_being_fetched(tmp_path: Path) -> None:
    """Neither a download that hangs nor the pause before the next attempt delays the closing."""
    data = make_data(4)
    kinds = {name: ["hang"] * 9 for name in data.stored}
    with web(data.stored, kinds) as (remote, faults):
        ahead = Prefetcher([cache_of(data, tmp_path, remote)], needs(4), predownload=100)
        wait_for(lambda: len(faults.asked) == 4)
        ahead.close()
        assert threads() == []
        assert_tidy(tmp_path)


def test_a_forked_child_fetches_for_itself(tmp_path: Path) -> None:
    """A prefetcher inherited through a fork has no threads, and neither its use nor its closing blocks."""
    data = make_data(4)
    with web(data.stored, {"shard.00000.mds": ["hang"]}) as (remote, faults):
        ahead = Prefetcher([cache_of(data, tmp_path, remote, download_timeout=9)], needs(4), predownload=0)
        wait_for(lambda: faults.asked)

        def worker() -> None:
            ahead.advance(100)
            ahead.wait(0, 2)
            ahead.close()

        with child(worker) as process:
            assert process.wait() == 0
        ahead.close()
    assert here(data, tmp_path) == [2]


def test_a_process_ends_with_a_download_that_hangs(tmp_path: Path) -> None:
    """A thread that is stuck in a client does not keep a process from ending."""
    data = make_data(3)

    def main() -> None:
        with flaky(data.files, {"shard.00000.mds": ["hang"] * 9, "shard.00001.mds": ["hang"] * 9}) as (remote, faults):
            Prefetcher([cache_of(data, tmp_path, remote)], needs(3), predownload=100)
            ahead = Prefetcher([cache_of(data, tmp_path, remote)], needs(3), predownload=100)
            wait_for(lambda: faults.asked)
            del ahead
            threading._shutdown()  # Python waits for this at exit

    process_id = fork_and_run(main, output=tmp_path / "output.txt", seed=1)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 0


@pytest.mark.parametrize(("num_readers", "num_ahead"), [(1, 3), (3, 1)])
def test_shards_that_are_fetched_ahead_keep_within_their_part_of_the_limit(
    tmp_path: Path, num_readers: int, num_ahead: int
) -> None:
    """Half the limit, divided among the readers, is fetched ahead; the rest follows as the reader advances, once."""
    data = make_data(8)
    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(6000))
        with Prefetcher([cache], needs(8), predownload=1000, num_readers=num_readers) as ahead:
            wait_for(lambda: len(here(data, tmp_path)) == num_ahead)
            time.sleep(0.1)
            assert here(data, tmp_path) == list(range(num_ahead))
            for number in range(8):
                ahead.advance(10 * number)
                wait_for(lambda number=number: number in here(data, tmp_path))  # otherwise this thread may be the first
                ahead.wait(0, number)
                # One shard may go and another arrive between two looks at the directory, so both may be seen.
                wait_for(lambda: len(here(data, tmp_path)) <= 6)
                assert number in here(data, tmp_path)
        assert sorted(faults.asked) == sorted(data.stored)


def test_what_was_passed_is_not_fetched_any_more(tmp_path: Path) -> None:
    """Threads that fall behind a reader that fetches for itself continue the plan where the reader is."""
    data = make_data(8)
    is_asked = threading.Event()

    def late() -> Iterator[Need]:
        is_asked.wait()
        yield from needs(8)

    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], late(), predownload=1000) as ahead:
            ahead.advance(60)
            is_asked.set()
            wait_for(lambda: len(here(data, tmp_path)) == 2)
            wait_for(lambda: not any(thread.is_alive() for thread in threads()))
        assert sorted(faults.asked) == ["shard.00006.mds", "shard.00007.mds"]


def test_what_is_needed_now_goes_before_what_will_be(tmp_path: Path) -> None:
    """A shard outside the plan finds room even if shards that were fetched ahead fill the cache."""
    data = make_data(8)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(2000))
        with Prefetcher([cache], needs(1), predownload=1000) as ahead:
            wait_for(lambda: here(data, tmp_path) == [0])
            cache.fetch(5)
            cache.hold(5)
            ahead.wait(0, 7)
            assert here(data, tmp_path) == [5, 7]


def test_a_limit_that_the_reader_fills_itself_is_an_error(tmp_path: Path) -> None:
    """A reader that holds all that fits gets an error at the next shard, and does not wait forever."""
    data = make_data(8)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(2000))
        with Prefetcher([cache], needs(8), predownload=1000) as ahead:
            for number in (0, 1):
                ahead.wait(0, number)
                cache.hold(number)
                ahead.advance(10 * number + 1)  # otherwise shard 0, found by a late thread, counts as still to come
            wait_for(lambda: cache.is_held(2))  # an attempt is running
            with pytest.raises(CacheLimitError, match="2000"):
                ahead.wait(0, 2)


def test_a_killed_reader_leaves_a_cache_that_the_next_one_uses(tmp_path: Path) -> None:
    """A process that is killed while it fetches ahead does not block the next one."""
    data = make_data(6)

    def read() -> None:
        with Prefetcher([cache_of(data, tmp_path, remote)], needs(6), predownload=100):
            time.sleep(60)

    kinds = {"shard.00004.mds": ["hang"], "shard.00005.mds": ["hang"]}
    with web(data.stored, kinds) as (remote, faults):
        with child(read) as reader:
            wait_for(lambda: len(faults.asked) == 6 and here(data, tmp_path) == [0, 1, 2, 3])
            os.kill(reader.process_id, signal.SIGKILL)
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs(6), predownload=100) as ahead:
            for number in range(6):
                ahead.wait(0, number)
        assert len(faults.asked) == 8
    assert_tidy(tmp_path)


def test_what_is_needed_first_is_not_delayed(tmp_path: Path) -> None:
    """Until the reader is past its first samples, nothing else is fetched; then as far ahead as configured."""
    data = make_data(6)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs(6), predownload=30, first=20) as ahead:
            wait_for(lambda: here(data, tmp_path) == [0, 1])
            ahead.advance(19)
            time.sleep(0.05)
            assert here(data, tmp_path) == [0, 1]
            ahead.advance(20)
            wait_for(lambda: here(data, tmp_path) == list(range(6)))
