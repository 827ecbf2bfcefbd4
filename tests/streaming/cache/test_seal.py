"""A shard may be used before its checksum is known. It then counts only as long as it is unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.storage import local as storage
from lightning_faulttolerant.streaming import StreamingDataset
from lightning_faulttolerant.streaming.cache import (
    CacheLimit,
    Need,
    Prefetcher,
    ShardCache,
    checksums,
    directory,
    prefetcher,
    shard_files,
)
from lightning_faulttolerant.streaming.cache.directory import LOCK_SUFFIX, MARK_SUFFIX, MARKS_DIRECTORY, locked
from tests.streaming.cache.children import child, held_by_a_thread, wait_for
from tests.streaming.cache.remotes import HASH, Data, assert_tidy, assert_whole, cache_of, flaky, make_data
from tests.streaming.shard_files import numbers, shard_paths, write

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
            assert checksum(local) == checksums.crc32(str(local / SHARD))
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


def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each file is added whose checksum is computed."""
    read: list[str] = []
    crc32 = checksums.crc32

    def noted(path: str, **options: Any) -> str:
        read.append(Path(path).name)
        return crc32(path, **options)

    for module in (checksums, shard_files):
        monkeypatch.setattr(module, "crc32", noted)
    return read


def while_sealing(monkeypatch: pytest.MonkeyPatch, event: Callable[[], object]) -> None:
    """Let something happen once the checksum of a file is computed, before it is written."""
    crc32 = checksums.crc32

    def then(path: str, **options: Any) -> str:
        checksum = crc32(path, **options)
        event()
        return checksum

    monkeypatch.setattr(checksums, "crc32", then)


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
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        while_sealing(monkeypatch, lambda: damage(tmp_path / SHARD))
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
        lock = str(tmp_path / MARK).removesuffix(MARK_SUFFIX) + LOCK_SUFFIX
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
    read = files_read(monkeypatch)
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


def test_a_use_while_a_shard_is_sealed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that was just used is not evicted as if it had last been used before."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote, limit=CacheLimit(2000))
        cache.fetch(1, is_sealed=False)
        cache.fetch(0)
        while_sealing(monkeypatch, lambda: cache.fetch(1))
        cache.seal(1)
        cache.fetch(2)
        assert [cache.is_here(shard) for shard in range(3)] == [False, True, True]
    assert checksum(tmp_path)


def test_a_shard_may_be_evicted_while_it_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get the room at once, and no mark is written without its shard."""
    data = make_data()
    freed: list[int] = []
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        last_use = cache.contents().last_uses[1]
        while_sealing(monkeypatch, lambda: freed.append(cache.evict(1, last_use)))
        assert cache.seal(1)
    assert freed == [1000]
    assert not (tmp_path / MARK).exists()


def test_a_shard_that_is_fetched_again_while_it_is_sealed_keeps_its_new_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum of the old file is not that of the new one."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)

        def fetch_again() -> None:
            cache.discard(1)
            cache.fetch(1, is_sealed=False)

        while_sealing(monkeypatch, fetch_again)
        cache.seal(1)
    assert not checksum(tmp_path)
    assert asked_by_next_run(data, tmp_path) == []


def test_a_mark_that_changes_while_it_is_sealed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has recorded of the same file is not overwritten."""
    data, path = make_data(), str(tmp_path / MARK)
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        cache.fetch(1, is_sealed=False)
        mark = directory.read_mark(path)
        assert mark is not None
        other = replace(mark, is_downloaded=False)
        while_sealing(monkeypatch, lambda: directory.write_mark(path, other))
        cache.seal(1)
    assert directory.read_mark(path) == other


def test_nothing_waits_where_the_boot_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would show there that a file is unchanged, so each process would fetch it again."""
    data = make_data()
    for module in (checksums, directory, shard_files):
        monkeypatch.setattr(module, "this_boot", str)
    with flaky(data.files) as (remote, _):
        cache_of(data, tmp_path, remote).fetch(1, is_sealed=False)
    assert checksum(tmp_path)
    assert asked_by_next_run(data, tmp_path) == []


def test_nothing_waits_where_other_machines_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine can't know that a file is unchanged. Each process asks once what the directory is on."""
    data, asked, mounts = make_data(), list[str](), tmp_path / "mounts"
    mounts.write_text(re.sub(r" - \S+ ", " - nfs4 ", storage._MOUNTS.read_text()))
    is_on_local_disk = storage.is_on_local_disk
    monkeypatch.setattr(checksums, "is_on_local_disk", lambda path: asked.append(path) or is_on_local_disk(path))
    with flaky(data.files) as (remote, _):
        here = cache_of(data, tmp_path / "cache", remote)
        for shard in range(3):
            here.fetch(shard, is_sealed=False)
        assert asked == [here.directory]
        assert not checksum(tmp_path / "cache")
        elsewhere: ShardCache = pickle.loads(pickle.dumps(here))
        monkeypatch.setattr(storage, "_MOUNTS", mounts)
        here.discard(1)
        elsewhere.fetch(1, is_sealed=False)
        assert asked == [here.directory] * 2
    assert checksum(tmp_path / "cache")
    for module in (checksums, directory, shard_files):
        monkeypatch.setattr(module, "this_boot", lambda: "another machine")
    assert asked_by_next_run(data, tmp_path / "cache") == []


def opened_for_a_first_batch(data: Data, local: Path, remote: str) -> Prefetcher:
    """Return a prefetcher whose reader has waited for the shard, and has not reached the end of its first batch."""
    ahead = Prefetcher([cache_of(data, local, remote)], iter(()), predownload=99, first=20)
    ahead.wait(0, 1)
    return ahead


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_reader_of_one_batch_seals_at_its_end(tmp_path: Path, error: type[BaseException] | None) -> None:
    """Its shards have their checksums, also if reading fails. Only Ctrl-C does not wait."""
    data = make_data()
    with flaky(data.files) as (remote, _):
        with contextlib.suppress(ValueError, KeyboardInterrupt), opened_for_a_first_batch(data, tmp_path, remote):
            if error is not None:
                raise error
        assert bool(checksum(tmp_path)) == (error is not KeyboardInterrupt)


def test_a_reader_that_is_dropped_does_not_seal(tmp_path: Path) -> None:
    """A finalizer reads no files."""
    data = make_data()

    def samples() -> Iterator[None]:
        with opened_for_a_first_batch(data, tmp_path, remote):
            yield

    with flaky(data.files) as (remote, _):
        reader = samples()
        next(reader)
        del reader
        assert not checksum(tmp_path)
        ahead = opened_for_a_first_batch(data, tmp_path, remote)
        ahead._finalizer()
        assert not checksum(tmp_path)


def test_a_forked_child_does_not_seal(tmp_path: Path) -> None:
    """The shards of a parent's first batch are the parent's, and so may be the lock at the time of the fork."""
    data = make_data()
    with flaky(data.files) as (remote, _), opened_for_a_first_batch(data, tmp_path, remote) as ahead:
        with held_by_a_thread(ahead._work._unsealed._lock), child(ahead.close) as process:
            assert process.wait() == 0
        with child(ahead.close) as process:
            assert process.wait() == 0
        assert not checksum(tmp_path)
    assert checksum(tmp_path)


def test_closing_computes_checksums_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a shard is, the reader leaves in time."""
    monkeypatch.setattr(prefetcher, "_SEAL_SECONDS", 0.1)
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(checksums.zlib, "crc32", lambda *_: time.sleep(0.01) or 0)
    data = make_data()
    with flaky(data.files) as (remote, _):
        ahead = opened_for_a_first_batch(data, tmp_path, remote)
        began = time.monotonic()
        ahead.close()
        assert 0.1 <= time.monotonic() - began < 5  # the whole file takes 10 s
    assert not checksum(tmp_path)


def test_closing_does_not_wait_for_a_checksum_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread gives up the checksum that it computes, and the closing computes it, if there is time."""
    data, is_reading, crc32 = make_data(), threading.Event(), zlib.crc32

    def slow(block: bytes, begin: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            is_reading.set()
            time.sleep(0.01)  # the whole file takes 10 s
        return crc32(block, begin)

    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(checksums.zlib, "crc32", slow)
    with flaky(data.files) as (remote, _):
        ahead = opened_for_a_first_batch(data, tmp_path, remote)
        ahead.advance(20)
        is_reading.wait()
        ahead.close()
    monkeypatch.undo()
    assert checksum(tmp_path) == checksums.crc32(str(tmp_path / SHARD))


def test_an_epoch_of_one_batch_is_sealed(tmp_path: Path) -> None:
    """A data set that ends with its first batch leaves no shard without a checksum."""
    remote, local = write(tmp_path / "remote", 40), tmp_path / "local"
    data = StreamingDataset(local=str(local), remote=remote, batch_size=64, shuffle=False)
    assert numbers(data) == list(range(40))
    marks = [json.loads(path.read_bytes()) for path in local.rglob("*" + MARK_SUFFIX)]
    assert len(marks) == len(shard_paths(remote))
    assert all(file["checksum"] for mark in marks for file in mark["files"])
