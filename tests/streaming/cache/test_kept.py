"""A file in a cache directory is used if it matches the index, and fetched again if it does not."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.errors import DamagedShardError, ShardError
from lightning_faulttolerant.streaming.cache import directory as cache_directory, shard_files
from lightning_faulttolerant.streaming.cache.downloads import Remote
from tests.streaming.cache.remotes import (
    HASH,
    Data,
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


def test_a_hash_that_is_asked_for_later_is_checked_then(tmp_path: Path) -> None:
    """A shard that was kept without a hash is compared with it as soon as validate_hash is given."""
    data = make_data()
    wrong = {**data.files, SHARD: damaged(data.raw[SHARD], "flip")}
    with flaky(wrong) as (remote, _):
        cache_of(data, tmp_path, remote).fetch(1)
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == ["shard.00000.mds", SHARD, "shard.00002.mds"]


def test_shards_of_another_index_are_not_used(tmp_path: Path) -> None:
    """A shard that was kept for another index is fetched again, even if its size is the same."""
    old, new = make_data(hashes=(), salt="old"), make_data(hashes=(), salt="new")
    warm(old, tmp_path, index_digest="old")
    assert len(asked_by_next_run(new, tmp_path, index_digest="new")) == 3
    assert asked_by_next_run(new, tmp_path, index_digest="new") == []


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


def test_what_was_decompressed_is_compared_with_its_own_hash(tmp_path: Path) -> None:
    """A valid compressed file may hold an invalid shard, so both hashes are checked."""
    data, other = make_data(compression="snappy", salt="1"), make_data(compression="snappy", salt="2")
    infos = [
        dataclasses.replace(info, files=others.files) for info, others in zip(data.infos, other.infos, strict=True)
    ]
    with flaky(data.files) as (remote, _), pytest.raises(DamagedShardError, match=f"{SHARD}: its {HASH} is"):
        cache_of(dataclasses.replace(data, infos=infos), tmp_path, remote, validate_hash=HASH).fetch(1)


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


def _reboot() -> None:
    for module in (cache_directory, shard_files):
        module.this_boot = lambda: "the next"  # type: ignore[attr-defined]


def _lost(local: Path) -> None:
    """Leave zeros with the size and times of the file, as a power loss may."""
    (local / SHARD).write_bytes(bytes(1000))
    mark = json.loads((local / MARK).read_bytes())
    mark["files"][0]["identity"] = cache_directory.file_identity(str(local / SHARD))
    (local / MARK).write_text(json.dumps(mark))
    _reboot()


def _damage(kind: str) -> Callable[[Path], Any]:
    return lambda local: (local / SHARD).write_bytes(damaged(make_data().raw[SHARD], kind))


META = f"{SHARD}.meta"
LEFT: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "all": (lambda local: None, []),
    "a flipped bit": (_damage("flip"), [SHARD]),
    "half a shard": (_damage("short"), [SHARD]),
    "an empty shard": (_damage("empty"), [SHARD]),
    "no shard": (lambda local: (local / SHARD).unlink(), [SHARD]),
    "other times": (lambda local: os.utime(local / SHARD), []),
    **{
        f"the mark {content!r}": (lambda local, content=content: (local / MARK).write_bytes(content), [SHARD])
        for content in (b"", b"{", b"[]", b'{"files": [{}]}', b"\xff\x00")
    },
    "no marks": (lambda local: shutil.rmtree(local / cache_directory.MARKS_DIRECTORY), []),
    "all, before a reboot": (lambda local: _reboot(), []),
    "zeros, before a power loss": (_lost, [SHARD]),
}


@pytest.mark.parametrize("validate_hash", [None, HASH])
@pytest.mark.parametrize("case", LEFT)
def test_the_next_run_fetches_what_does_not_match(
    tmp_path: Path, case: str, validate_hash: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run left is used while it is what was fetched, also after a reboot, and replaced otherwise."""
    for module in (cache_directory, shard_files):
        monkeypatch.setattr(module, "this_boot", module.this_boot)
    data, (event, expected) = make_data(), LEFT[case]
    with flaky(data.files) as (remote, faults):
        running = cache_of(data, tmp_path, remote, validate_hash=validate_hash)
        assert_whole(running, data)
        event(tmp_path)
        if case == "no shard":  # it is noticed while a run continues, too
            assert not running.is_here(1)
            assert_whole(running, data)
            assert faults.asked.count(SHARD) == 2
            event(tmp_path)
    assert asked_by_next_run(data, tmp_path, validate_hash=validate_hash) == expected
    assert asked_by_next_run(data, tmp_path, validate_hash=validate_hash) == []


@pytest.mark.parametrize("fault", ["", "flip"])
def test_shards_that_somebody_else_put_there_are_used(tmp_path: Path, fault: str) -> None:
    """A directory that was filled by hand, or by the original library, is a cache; wrong ones are found by a hash."""
    data = make_data()
    write(tmp_path, {**data.files, SHARD: damaged(data.raw[SHARD], fault)})
    assert asked_by_next_run(data, tmp_path, validate_hash=HASH) == [SHARD] * bool(fault)


def test_a_shard_of_two_files_is_evicted_and_fetched_as_a_whole(tmp_path: Path) -> None:
    """A shard that was evicted in part is fetched again, with both files, compressed or not."""
    for number, compression in enumerate((None, "gz")):
        data, local = make_data(num_files=2, compression=compression), tmp_path / str(number)
        warm(data, local)
        assert sorted(path.name for path in local.iterdir()) == [cache_directory.MARKS_DIRECTORY, *sorted(data.raw)]
        (local / META).unlink()
        assert asked_by_next_run(data, local) == [name for name in data.stored if "00001" in name]
