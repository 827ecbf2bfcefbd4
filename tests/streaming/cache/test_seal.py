"""A shard may be used before its checksum is known. It then counts only as long as it is unchanged."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.streaming import StreamingDataset
from lightning_faulttolerant.streaming.cache import (
    CacheLimit,
    Need,
    Prefetcher,
    checksums,
    directory,
    shard_files,
)
from lightning_faulttolerant.streaming.cache.directory import MARK_SUFFIX, MARKS_DIRECTORY
from tests.streaming.cache.children import child, wait_for
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


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run be that of another boot."""
    for module in (directory, shard_files):
        monkeypatch.setattr(module, "this_boot", lambda: "the next")


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
    reboot(monkeypatch)
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


def test_a_hash_of_the_index_is_checked_immediately(tmp_path: Path) -> None:
    """What is compared with the index is never left for later."""
    data = make_data()
    with flaky(data.files, {SHARD: ["flip"]}) as (remote, faults):
        cache_of(data, tmp_path, remote, validate_hash=HASH).fetch(1, is_sealed=False)
        assert faults.asked == [SHARD] * 2
    assert checksum(tmp_path) == data.infos[1].files[0].hashes[HASH]


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


def test_a_forked_child_does_not_seal(tmp_path: Path) -> None:
    """The shards of a parent's first batch are the parent's, and so may be the lock at the time of the fork."""
    data = make_data()
    with flaky(data.files) as (remote, _), opened_for_a_first_batch(data, tmp_path, remote) as ahead:
        with child(ahead.close) as process:
            assert process.wait() == 0
        assert not checksum(tmp_path)
    assert checksum(tmp_path)


def test_an_epoch_of_one_batch_is_sealed(tmp_path: Path) -> None:
    """A data set that ends with its first batch leaves no shard without a checksum."""
    remote, local = write(tmp_path / "remote", 40), tmp_path / "local"
    data = StreamingDataset(local=str(local), remote=remote, batch_size=64, shuffle=False)
    assert numbers(data) == list(range(40))
    marks = [json.loads(path.read_bytes()) for path in local.rglob("*" + MARK_SUFFIX)]
    assert len(marks) == len(shard_paths(remote))
    assert all(file["checksum"] for mark in marks for file in mark["files"])


def test_checksums_wait_for_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the reader is past its first samples, no checksum is computed. Then all are, also at the end of a plan."""
    data = make_data(4)
    needs = (Need(number * 10, 0, number) for number in range(4))
    with flaky(data.files) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        with Prefetcher([cache], needs, predownload=99, first=20) as ahead:
            ahead.wait(0, 0)
            ahead.wait(0, 1)
            ahead.advance(10)
            time.sleep(0.05)
            assert checksum(tmp_path) == ""
            ahead.advance(20)
            ahead.wait(0, 3)  # fetched after the first batch
            wait_for(lambda: checksum(tmp_path))
        reboot(monkeypatch)
        assert_whole(cache_of(data, tmp_path, remote), data)
