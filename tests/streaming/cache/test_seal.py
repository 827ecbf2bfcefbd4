"""A shard may be used before its checksum is known. It then counts only as long as it is unchanged."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.streaming.cache import CacheLimit, Need, Prefetcher, directory, shard_files
from lightning_faulttolerant.streaming.cache.directory import MARK_SUFFIX, MARKS_DIRECTORY, locked
from tests.streaming.cache.children import wait_for
from tests.streaming.cache.remotes import HASH, Data, assert_tidy, assert_whole, cache_of, flaky, make_data

SHARD = "shard.00001.mds"
MARK = Path(MARKS_DIRECTORY, SHARD + MARK_SUFFIX)


def checksum(directory: Path) -> str:
    """Return the checksum in the mark of the shard."""
    return str(json.loads((directory / MARK).read_bytes())["files"][0]["checksum"])


def fetch(data: Data, local: Path, *, is_sealed: bool = False, is_sealed_later: bool = False) -> None:
    """Fetch the shard, as an earlier run does."""
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, local, remote)
        cache.fetch(1, is_sealed=is_sealed)
        assert bool(checksum(local)) == is_sealed
        if is_sealed_later:
            cache.seal(1)
            assert checksum(local) == shard_files.crc32(str(local / SHARD))
    assert_tidy(local)


def asked_by_next_run(data: Data, local: Path) -> list[str]:
    """Return the files that a run in another process requests from its remote."""
    with flaky(data.files) as (remote, faults):
        cache_of(data, local, remote).fetch(1)
        assert (local / SHARD).read_bytes() == data.raw[SHARD]
        return faults.asked


def damage(path: Path) -> None:
    """Flip a byte."""
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("is_sealed_later", [False, True])
def test_a_shard_without_a_checksum_is_used_while_it_is_unchanged(tmp_path: Path, is_sealed_later: bool) -> None:
    """Another process trusts the file that was fetched, and fetches it again once it has changed."""
    data = make_data()
    fetch(data, tmp_path, is_sealed_later=is_sealed_later)
    assert asked_by_next_run(data, tmp_path) == []
    damage(tmp_path / SHARD)
    assert asked_by_next_run(data, tmp_path) == [SHARD]


@pytest.mark.parametrize("is_sealed_later", [False, True])
def test_a_shard_without_a_checksum_does_not_outlive_a_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sealed_later: bool
) -> None:
    """After a reboot, nothing could show that its content was lost, so it is fetched again."""
    data = make_data()
    fetch(data, tmp_path, is_sealed_later=is_sealed_later)
    monkeypatch.setattr(directory, "this_boot", lambda: "the next")
    assert asked_by_next_run(data, tmp_path) == [SHARD] * (not is_sealed_later)


def test_a_shard_that_changed_since_its_fetch_is_not_sealed(tmp_path: Path) -> None:
    """The checksum of a damaged file would make it look right."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        damage(tmp_path / SHARD)
        cache.seal(1)
    assert checksum(tmp_path) == ""
    assert asked_by_next_run(data, tmp_path) == [SHARD]


def test_a_shard_that_changes_while_it_is_sealed_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is that of the file that was fetched, or there is none."""
    data = make_data()
    crc32 = shard_files.crc32

    def meanwhile(path: str) -> str:
        damage(Path(path))
        return crc32(path)

    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        monkeypatch.setattr(shard_files, "crc32", meanwhile)
        cache.seal(1)
    assert checksum(tmp_path) == ""


def test_a_seal_is_no_use(tmp_path: Path) -> None:
    """The shard that was used least recently is evicted first, whatever was sealed since."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(2000))
        cache.fetch(1, is_sealed=False)
        time.sleep(0.01)
        cache.fetch(0)
        cache.seal(1)
        cache.fetch(2)
        assert [cache.is_here(shard) for shard in range(3)] == [True, False, True]


def test_nothing_is_sealed_that_another_process_is_replacing(tmp_path: Path) -> None:
    """The mark belongs to the process that has the lock."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        lock = str(tmp_path / MARK).removesuffix(MARK_SUFFIX) + shard_files.LOCK_SUFFIX
        with locked(lock, 0):
            cache.seal(1)
        assert checksum(tmp_path) == ""
        os.unlink(tmp_path / SHARD)
        cache.seal(1)
        assert checksum(tmp_path) == ""


def test_a_hash_of_the_index_is_checked_immediately(tmp_path: Path) -> None:
    """What is compared with the index is never left for later."""
    data = make_data()
    with flaky(data.files, {SHARD: ["flip"]}) as (remote, faults):
        cache_of(data, tmp_path, remote, validate_hash=HASH).fetch(1, is_sealed=False)
        assert faults.asked == [SHARD] * 2
    assert checksum(tmp_path) == data.infos[1].files[0].hashes[HASH]


@pytest.mark.parametrize("num_shards", [2, 4])
def test_checksums_wait_for_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int) -> None:
    """Until the reader is past its first samples, no checksum is computed. Then all are, also at the end of a plan."""
    data = make_data(num_shards)
    read: list[str] = []
    crc32 = shard_files.crc32
    monkeypatch.setattr(shard_files, "crc32", lambda path: read.append(Path(path).name) or crc32(path))
    needs = (Need(number * 10, 0, number) for number in range(num_shards))
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs, predownload=99, first=20) as ahead:
            ahead.wait(0, 0)
            ahead.wait(0, 1)
            ahead.advance(10)
            time.sleep(0.05)
            assert read == []
            ahead.advance(20)
            wait_for(lambda: len(read) == num_shards)
            wait_for(lambda: checksum(tmp_path))
        monkeypatch.undo()
        monkeypatch.setattr(directory, "this_boot", lambda: "the next")
        assert_whole(cache_of(data, tmp_path, remote), data)


def test_a_shard_that_is_fetched_after_the_first_batch_is_sealed(tmp_path: Path) -> None:
    """No thread may be left to do it later."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        with Prefetcher([cache_of(data, tmp_path, remote)], iter(()), predownload=99, first=20) as ahead:
            ahead.advance(20)
            ahead.wait(0, 1)
        assert checksum(tmp_path)


def test_a_prefetcher_that_is_closed_before_the_first_batch_ends(tmp_path: Path) -> None:
    """Its threads don't wait for a reader that has left."""
    data = make_data(2)
    with flaky(data.files) as (remote, _):
        ahead = Prefetcher(
            [cache_of(data, tmp_path, remote)], (Need(0, 0, shard) for shard in (0, 1)), predownload=99, first=20
        )
        ahead.wait(0, 1)
        began = time.monotonic()
        ahead.close()
        assert time.monotonic() - began < 0.9
        assert not any(thread.is_alive() for thread in ahead._threads)
