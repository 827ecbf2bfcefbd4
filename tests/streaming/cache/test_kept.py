"""A file in a cache directory is used if it matches the index, and fetched again if it does not."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError, ShardError
from lightning_faulttolerant.streaming.cache import checksums, directory as cache_directory, shard_files
from lightning_faulttolerant.streaming.cache.downloads import Remote
from tests.streaming.cache.remotes import (
    HASH,
    Data,
    assert_tidy,
    assert_whole,
    cache_of,
    damaged,
    flaky,
    make_data,
    write,
)

SHARD = "shard.00001.mds"
MARK = Path(cache_directory.MARKS_DIRECTORY, SHARD + cache_directory.MARK_SUFFIX)


def warm(data: Data, local: Path, **options: object) -> None:
    """Fill a cache, as an earlier run does."""
    with flaky(data.files) as (remote, _):
        assert_whole(cache_of(data, local, remote, **options), data)


def asked_by_next_run(data: Data, local: Path, **options: object) -> list[str]:
    """Return the files that a run in another process requests from its remote, given what the earlier run left."""
    with flaky(data.files) as (remote, faults):
        assert_whole(cache_of(data, local, remote, **options), data)
        return faults.asked


@pytest.mark.parametrize("validate_hash", [None, HASH])
def test_a_cache_of_an_earlier_run_is_used(tmp_path: Path, validate_hash: str | None) -> None:
    """Shards that are already in the cache are not fetched again."""
    data = make_data()
    warm(data, tmp_path, validate_hash=validate_hash)
    assert asked_by_next_run(data, tmp_path, validate_hash=validate_hash) == []


def test_shards_that_somebody_else_put_there_are_used(tmp_path: Path) -> None:
    """A directory that was filled by hand, or by the original library, is a cache."""
    data = make_data()
    write(tmp_path, data.files)
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == []


@pytest.mark.parametrize("validate_hash", [None, HASH])
@pytest.mark.parametrize("fault", ["flip", "short", "empty"])
def test_a_shard_that_was_damaged_in_the_cache_is_fetched_again(
    tmp_path: Path, fault: str, validate_hash: str | None
) -> None:
    """A cached file that differs from what was fetched is found, also without validate_hash, and replaced."""
    data = make_data()
    warm(data, tmp_path, validate_hash=validate_hash)
    (tmp_path / SHARD).write_bytes(damaged(data.raw[SHARD], fault))
    assert asked_by_next_run(data, tmp_path, validate_hash=validate_hash) == [SHARD]


def test_a_wrong_shard_that_somebody_else_put_there_is_found_by_its_hash(tmp_path: Path) -> None:
    """A file that was not fetched is compared with the hash in the index if that is requested."""
    data = make_data()
    write(tmp_path, {**data.files, SHARD: damaged(data.raw[SHARD], "flip")})
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == [SHARD]


def test_no_wrong_sample_after_a_hash_error_was_repaired(tmp_path: Path) -> None:
    """A shard that failed its hash is not taken from the cache once the remote is repaired."""
    data = make_data()
    wrong = {**data.files, SHARD: damaged(data.raw[SHARD], "flip")}
    with flaky(wrong) as (remote, _), pytest.raises(DamagedShardError) as caught:
        cache_of(data, tmp_path, remote, validate_hash=HASH).fetch(1)
    assert data.infos[1].files[0].hashes[HASH] in str(caught.value)
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == [f"shard.0000{number}.mds" for number in range(3)]


def test_a_hash_that_is_asked_for_later_is_checked_then(tmp_path: Path) -> None:
    """A shard that was kept without a hash is compared with it as soon as validate_hash is given."""
    data = make_data()
    wrong = {**data.files, SHARD: damaged(data.raw[SHARD], "flip")}
    with flaky(wrong) as (remote, _):
        cache_of(data, tmp_path, remote).fetch(1)
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == ["shard.00000.mds", SHARD, "shard.00002.mds"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_file_that_lost_its_content_with_the_power_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """After a reboot, contents are compared with what was fetched, even if size and times match."""
    data = make_data()
    warm(data, tmp_path)
    if is_lost:
        (tmp_path / SHARD).write_bytes(bytes(1000))
        mark = json.loads((tmp_path / MARK).read_bytes())
        mark["files"][0]["identity"] = cache_directory.file_identity(str(tmp_path / SHARD))
        (tmp_path / MARK).write_text(json.dumps(mark))
    for module in (cache_directory, shard_files):
        monkeypatch.setattr(module, "this_boot", lambda: "the next")
    assert asked_by_next_run(data, tmp_path) == [SHARD] * is_lost
    assert json.loads((tmp_path / MARK).read_bytes())["boot"] == "the next"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": [{}]}', b"\xff\x00"])
def test_a_mark_that_lost_its_content_vouches_for_nothing(tmp_path: Path, content: bytes) -> None:
    """A shard with an unreadable mark is fetched again: the power loss may have taken both."""
    data = make_data()
    warm(data, tmp_path)
    (tmp_path / MARK).write_bytes(content)
    assert asked_by_next_run(data, tmp_path) == [SHARD]


def test_files_that_are_unchanged_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use in a process takes two lookups in the directory if nothing has happened to a shard."""
    data = make_data()
    warm(data, tmp_path)

    def read(path: str) -> str:
        raise AssertionError(f"{path} was read")

    for module in (checksums, shard_files):
        monkeypatch.setattr(module, "crc32", read)
    assert asked_by_next_run(data, tmp_path) == []


def test_shards_of_another_index_are_not_used(tmp_path: Path) -> None:
    """A shard that was kept for another index is fetched again, even if its size is the same."""
    old, new = make_data(hashes=(), salt="old"), make_data(hashes=(), salt="new")
    warm(old, tmp_path, index_digest="old")
    assert len(asked_by_next_run(new, tmp_path, index_digest="new")) == 3
    assert asked_by_next_run(new, tmp_path, index_digest="new") == []


def test_a_shard_that_vanishes_is_fetched_again(tmp_path: Path) -> None:
    """A shard that is removed while the run continues is fetched again."""
    data = make_data()
    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        assert_whole(cache, data)
        (tmp_path / SHARD).unlink()
        assert not cache.is_here(1)
        assert_whole(cache, data)
        assert faults.asked.count(SHARD) == 2


@pytest.mark.parametrize("validate_hash", [None, HASH])
def test_a_shard_that_vanishes_while_it_is_checked_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_hash: str | None
) -> None:
    """A shard that another process evicts between the check of its size and its reading is missing, not an error."""
    data = make_data()
    warm(data, tmp_path, validate_hash=validate_hash)
    os.utime(tmp_path / SHARD)  # its content is read, to see whether it has changed
    compute = checksums._digest

    def evicted(path: str, algorithm: str) -> str:
        os.unlink(path)
        monkeypatch.undo()
        return compute(path, algorithm)

    monkeypatch.setattr(checksums, "_digest", evicted)
    assert asked_by_next_run(data, tmp_path, validate_hash=validate_hash) == [SHARD]


def test_a_shard_that_vanishes_before_it_is_opened_is_fetched_again(tmp_path: Path) -> None:
    """``open`` fetches a shard again that another process evicts in between, and finally gives up with an error."""
    data = make_data()
    num_evictions = 0

    def evicted_first(directory: str) -> bytes:
        nonlocal num_evictions
        if num_evictions < 2:
            num_evictions += 1
            Path(directory, SHARD).unlink()
        return Path(directory, SHARD).read_bytes()

    def always_evicted(directory: str) -> bytes:
        raise FileNotFoundError(directory)

    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        assert cache.open(1, evicted_first) == data.raw[SHARD]
        assert faults.asked == [SHARD] * 3
        with pytest.raises(ShardError, match=r"Shard 1 .*was removed .*cache_limit"):
            cache.open(1, always_evicted)


def test_a_shard_that_turns_out_to_be_damaged_when_it_is_opened_is_fetched_again(tmp_path: Path) -> None:
    """Damage that only the opener can find, in a file that was not fetched, is repaired once."""
    data = make_data()
    write(tmp_path, {SHARD: damaged(data.raw[SHARD], "flip")})

    def opened(directory: str) -> bytes:
        content = Path(directory, SHARD).read_bytes()
        if content != data.raw[SHARD]:
            raise DamagedShardError("its offsets are wrong")
        return content

    with flaky(data.files) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        assert cache.open(1, opened) == data.raw[SHARD]
        assert faults.asked == [SHARD]
    with flaky({SHARD: damaged(data.raw[SHARD], "flip")}) as (remote, faults):
        cache = cache_of(data, tmp_path / "other", remote)
        with pytest.raises(DamagedShardError, match="offsets"):
            cache.open(1, opened)
        assert faults.asked == [SHARD] * 2


@pytest.mark.parametrize("algorithm", ["br", "bz2", "gz", "snappy", "zstd"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_compressed_shards_are_decompressed(tmp_path: Path, algorithm: str, num_files: int) -> None:
    """Each compression is unpacked, also for formats with two files; the compressed file of a true remote goes."""
    data = make_data(compression=algorithm, num_files=num_files)
    warm(data, tmp_path, validate_hash=HASH)
    assert sorted(path.name for path in tmp_path.iterdir()) == [cache_directory.MARKS_DIRECTORY, *sorted(data.raw)]


@pytest.mark.parametrize("keep_zip", [None, False, True])
@pytest.mark.parametrize("is_local", [False, True])
def test_compressed_files_are_kept_as_asked(tmp_path: Path, keep_zip: bool | None, is_local: bool) -> None:
    """``keep_zip=None`` keeps them if the remote is local, True always, False never; those of the remote stay."""
    data = make_data(compression="zstd")
    write(tmp_path / "remote", data.files)
    with flaky(data.files) as (far, _):
        cache = cache_of(data, tmp_path / "local", str(tmp_path / "remote") if is_local else far, keep_zip=keep_zip)
        assert_whole(cache, data)
    is_kept = is_local if keep_zip is None else keep_zip
    assert {name: (tmp_path / "local" / name).exists() for name in data.stored} == dict.fromkeys(data.stored, is_kept)
    assert all((tmp_path / "remote" / name).exists() for name in data.stored)


@pytest.mark.parametrize("fault", ["", "short", "flip"])
def test_a_compressed_file_that_was_kept_is_used_again(tmp_path: Path, fault: str) -> None:
    """A shard is unpacked from the local compressed file, unless that file is damaged."""
    data = make_data(compression="zstd")
    warm(data, tmp_path, keep_zip=True, validate_hash=HASH)
    (tmp_path / SHARD).unlink()
    (tmp_path / f"{SHARD}.zip").write_bytes(damaged(data.stored[f"{SHARD}.zip"], fault))
    asked = asked_by_next_run(data, tmp_path, keep_zip=True, validate_hash=HASH)
    assert asked == ([f"{SHARD}.zip"] if fault else [])
    assert (tmp_path / f"{SHARD}.zip").read_bytes() == data.stored[f"{SHARD}.zip"]


def test_a_compressed_file_of_another_index_is_not_used(tmp_path: Path) -> None:
    """A compressed file that was kept for another index does not become a shard of this one."""
    old, new = (
        make_data(compression="snappy", hashes=(), salt="1"),
        make_data(compression="snappy", hashes=(), salt="2"),
    )
    assert [len(content) for content in old.stored.values()] == [len(content) for content in new.stored.values()]
    warm(old, tmp_path, keep_zip=True, index_digest="1")
    assert len(asked_by_next_run(new, tmp_path, keep_zip=True, index_digest="2")) == 3


def test_a_compressed_file_that_is_damaged_far_away_is_an_error(tmp_path: Path) -> None:
    """A file that can't be decompressed is a damaged shard, and nothing of it stays."""
    data = make_data(compression="zstd", hashes=())
    stored = data.stored[f"{SHARD}.zip"]
    with flaky({f"{SHARD}.zip": b"x" * len(stored)}) as (remote, faults):
        with pytest.raises(DamagedShardError, match=rf"Shard 1 .*{SHARD}.zip: 3 attempts"):
            cache_of(data, tmp_path, remote).fetch(1)
        assert len(faults.asked) == 3
    assert [path.name for path in tmp_path.iterdir()] == [cache_directory.MARKS_DIRECTORY]


def test_what_was_decompressed_is_compared_with_its_own_hash(tmp_path: Path) -> None:
    """A valid compressed file may hold an invalid shard, so both hashes are checked."""
    data, other = make_data(compression="snappy", salt="1"), make_data(compression="snappy", salt="2")
    infos = [
        dataclasses.replace(info, files=others.files) for info, others in zip(data.infos, other.infos, strict=True)
    ]
    with flaky(data.files) as (remote, _), pytest.raises(DamagedShardError, match=f"{SHARD}: its {HASH} is"):
        cache_of(dataclasses.replace(data, infos=infos), tmp_path, remote, validate_hash=HASH).fetch(1)


def test_a_package_that_a_compression_needs_is_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is not a failed download: there is no retry, and the error is Python's own."""
    data = make_data(compression="br")
    monkeypatch.setitem(__import__("sys").modules, "brotli", None)
    with flaky(data.files) as (remote, faults):
        with pytest.raises(ImportError, match="streaming"):
            cache_of(data, tmp_path, remote).fetch(1)
        assert faults.asked == [f"{SHARD}.zip"]


def tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files of a directory, with their times."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("validate_hash", [None, HASH])
@pytest.mark.parametrize("is_remote_the_same", [False, True])
def test_a_local_data_set_is_only_read(tmp_path: Path, validate_hash: str | None, is_remote_the_same: bool) -> None:
    """Without a remote, or with the directory itself as the remote, nothing is written, whatever the files are like."""
    data = make_data()
    write(tmp_path, {**data.files, SHARD: damaged(data.raw[SHARD], "flip")})
    before = tree(tmp_path)
    remote = f"file://{tmp_path}" if is_remote_the_same else None
    cache = cache_of(data, tmp_path, remote, validate_hash=validate_hash)
    assert not cache.has_remote
    cache.fetch(0)
    if validate_hash:
        with pytest.raises(DamagedShardError, match=f"Shard 1 .*its {HASH} is .*the index says"):
            cache.fetch(1)
    else:
        cache.fetch(1)
    assert tree(tmp_path) == before


def test_a_shard_that_a_local_data_set_lacks_is_missing(tmp_path: Path) -> None:
    """Without a remote, a shard that is missing or too short is an error that names it."""
    data = make_data()
    write(tmp_path, {"shard.00000.mds": data.raw["shard.00000.mds"][:10]})
    cache = cache_of(data, tmp_path, None)
    with pytest.raises(DamagedShardError, match="it has 10 bytes, but the index says 1000"):
        cache.fetch(0)
    with pytest.raises(MissingShardError, match=f"{SHARD}: it does not exist.*remote="):
        cache.fetch(1)


def test_a_compressed_local_data_set_is_decompressed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a remote, the raw files are created beside the compressed ones and stay, and nothing else is touched."""
    data = make_data(compression="gz")
    write(tmp_path, data.files)
    before = tree(tmp_path)
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    assert_whole(cache_of(data, tmp_path, None, validate_hash=HASH, keep_zip=False), data)
    assert {path: entry for path, entry in tree(tmp_path).items() if path in before} == before
    assert len(synced) == 3  # no mark would reveal a power loss
    (tmp_path / SHARD).unlink()
    (tmp_path / f"{SHARD}.zip").write_bytes(b"")
    with pytest.raises(DamagedShardError, match=SHARD):
        cache_of(data, tmp_path, None, validate_hash=HASH).fetch(1)
    assert (tmp_path / f"{SHARD}.zip").exists()


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    """A shard that can't be written is an error that says where."""
    data = make_data()
    local = tmp_path / "local"
    local.write_bytes(b"")  # not even root can create a directory there
    with flaky(data.files) as (remote, _), pytest.raises(ShardError, match=f"can't be written to {local}"):
        cache_of(data, local, remote).fetch(1)


def test_a_cache_that_can_not_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The existing shards are used, though nothing can be recorded about them."""
    data = make_data()
    write(tmp_path, data.files)
    monkeypatch.setattr(os, "makedirs", _refuse)
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == []
    assert not (tmp_path / cache_directory.MARKS_DIRECTORY).exists()


def _refuse(*args: object, **options: object) -> None:
    raise PermissionError("read-only file system")


def test_a_full_disk_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, the next attempt would find no space either."""
    attempts = []

    def download(*args: object, **options: object) -> None:
        attempts.append(args)
        raise OSError(28, "No space left on device")

    data = make_data()
    monkeypatch.setattr(Remote, "download", download)
    with pytest.raises(ShardError, match="No space left"):
        cache_of(data, tmp_path, "memory://x").fetch(1)
    assert len(attempts) == 1


def test_a_mark_without_its_shard_is_no_shard(tmp_path: Path) -> None:
    """A shard that was evicted in part is fetched as a whole."""
    data = make_data(num_files=2)
    warm(data, tmp_path)
    (tmp_path / f"{SHARD}.meta").unlink()
    assert asked_by_next_run(data, tmp_path) == [SHARD, f"{SHARD}.meta"]
    shutil.rmtree(tmp_path / cache_directory.MARKS_DIRECTORY)
    assert asked_by_next_run(data, tmp_path) == []
    assert_tidy(tmp_path)
