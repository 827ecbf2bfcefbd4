"""A file in a cache directory is used if it matches the index, and fetched again if it does not."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.errors import DamagedShardError
from lightning_faulttolerant.streaming import CSVWriter
from lightning_faulttolerant.streaming.cache import directory as cache_directory, shard_files
from tests.streaming.remotes import PER_SHARD, SHARD, assert_whole, damaged, data_of, flaky, opened, put
from tests.streaming.shards import files, numbers, write

MARKS = cache_directory.MARKS_DIRECTORY
MARK = Path(MARKS, SHARD + cache_directory.MARK_SUFFIX)


def asked_by_next_run(data: dict[str, bytes], local: Path, **options: Any) -> list[str]:
    """Return the shards that a run in another process requests from its remote, given what the earlier run left."""
    with flaky(data) as (remote, faults):
        assert_whole(opened(local, remote, **options))
        return faults.shards


def checksum(local: Path) -> str:
    """Return the checksum in the mark of the shard."""
    return str(json.loads((local / MARK).read_bytes())["files"][0]["checksum"])


def _reboot() -> None:
    for module in (cache_directory, shard_files):
        module.this_boot = lambda: "the next"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _boot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache_directory, shard_files):
        monkeypatch.setattr(module, "this_boot", module.this_boot)


def _lost(local: Path) -> None:
    """Leave zeros with the size and times of the file, as a power loss may."""
    (local / SHARD).write_bytes(bytes((local / SHARD).stat().st_size))
    mark = json.loads((local / MARK).read_bytes())
    mark["files"][0]["identity"] = cache_directory.file_identity(str(local / SHARD))
    (local / MARK).write_text(json.dumps(mark))
    _reboot()


def _damage(kind: str) -> Callable[[Path], Any]:
    return lambda local: (local / SHARD).write_bytes(damaged((local / SHARD).read_bytes(), kind))


LEFT: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "all": (lambda local: None, []),
    "a flipped bit": (_damage("flip"), [SHARD]),
    "no shard": (lambda local: (local / SHARD).unlink(), [SHARD]),
    "other times": (lambda local: os.utime(local / SHARD), []),
    **{
        f"the mark {content!r}": (lambda local, content=content: (local / MARK).write_bytes(content), [SHARD])
        for content in (b"", b"[]", b'{"files": [{}]}')
    },
    "no marks": (lambda local: shutil.rmtree(local / MARKS), []),
    "all, before a reboot": (lambda local: _reboot(), []),
    "zeros, before a power loss": (_lost, [SHARD]),
}


@pytest.mark.parametrize("case", LEFT)
def test_the_next_run_fetches_what_does_not_match(tmp_path: Path, case: str) -> None:
    """What an earlier run left is used while it is what was fetched, also after a reboot, and replaced otherwise."""
    data, (event, expected) = data_of(), LEFT[case]
    with flaky(data) as (remote, faults):
        running = opened(tmp_path, remote)
        for shard in range(3):
            running.prepare_shard(shard)
        event(tmp_path)
        if case == "no shard":  # it is noticed while a run continues, too
            assert_whole(running)
            assert faults.shards.count(SHARD) == 2
            event(tmp_path)
    assert asked_by_next_run(data, tmp_path) == expected
    assert asked_by_next_run(data, tmp_path, validate_hash="sha1") == []


def test_shards_that_were_not_checked_are_checked_when_a_hash_is_given(tmp_path: Path) -> None:
    """A shard that was kept without a hash, or was put there by somebody else, is compared with it."""
    data = data_of()
    wrong = {**data, SHARD: damaged(data[SHARD], "flip")}
    with flaky(wrong) as (remote, _):
        opened(tmp_path / "kept", remote).prepare_shard(1)
    assert SHARD in asked_by_next_run(data, tmp_path / "kept", validate_hash="sha1")
    put(tmp_path / "wrong", wrong)
    assert asked_by_next_run(data, tmp_path / "wrong", validate_hash="sha1") == [SHARD]
    put(tmp_path / "right", data)
    assert asked_by_next_run(data, tmp_path / "right", validate_hash="sha1") == []
    with flaky(data, {SHARD: ["flip"]}) as (remote, faults):  # also in a first batch
        numbers(opened(tmp_path / "first", remote, batch_size=99, validate_hash="sha1"))
        assert faults.shards.count(SHARD) == 2


def test_a_shard_that_turns_out_to_be_damaged_when_it_is_opened_is_fetched_again(tmp_path: Path) -> None:
    """Damage that only its reader can find, in a file that was not fetched, is repaired once."""
    data = data_of(hashes=())
    wrong = {**data, SHARD: data[SHARD][:8] + struct.pack("<I", 0) + data[SHARD][12:]}
    put(tmp_path / "local", wrong)
    assert asked_by_next_run(data, tmp_path / "local") == [SHARD]
    with flaky(wrong) as (remote, faults):
        with pytest.raises(DamagedShardError, match="offsets"):
            opened(tmp_path / "other", remote)[PER_SHARD]
        assert faults.shards == [SHARD] * 2


@pytest.mark.parametrize("keep_zip", [None, False, True])
@pytest.mark.parametrize("is_local", [False, True])
def test_compressed_files_are_kept_as_asked(tmp_path: Path, keep_zip: bool | None, is_local: bool) -> None:
    """``keep_zip=None`` keeps them if the remote is local, True always, False never; those of the remote stay."""
    data, local = data_of(compression="zstd"), tmp_path / "local"
    put(tmp_path / "remote", data)
    with flaky(data) as (far, _):
        assert_whole(opened(local, tmp_path / "remote" if is_local else far, keep_zip=keep_zip))
    is_kept = is_local if keep_zip is None else keep_zip
    assert {(local / name).exists() for name in data if name != "index.json"} == {is_kept}
    assert files(tmp_path / "remote") == data


@pytest.mark.parametrize("fault", ["", "short", "flip"])
def test_a_compressed_file_that_was_kept_is_used_again(tmp_path: Path, fault: str) -> None:
    """A shard is unpacked from the local compressed file, unless that file is damaged."""
    data, options, zipped = data_of(compression="zstd"), {"keep_zip": True, "validate_hash": "sha1"}, f"{SHARD}.zstd"
    asked_by_next_run(data, tmp_path, **options)
    (tmp_path / SHARD).unlink()
    (tmp_path / zipped).write_bytes(damaged(data[zipped], fault))
    assert asked_by_next_run(data, tmp_path, **options) == ([zipped] if fault else [])
    assert (tmp_path / zipped).read_bytes() == data[zipped]


def tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files of a directory, with their times."""
    return {name: (content, (directory / name).stat().st_mtime_ns) for name, content in files(directory).items()}


@pytest.mark.parametrize("has_itself_as_remote", [False, True])
def test_a_local_data_set_is_only_read(tmp_path: Path, has_itself_as_remote: bool) -> None:
    """Without a remote, or with the directory itself as the remote, nothing is written, whatever the files are like."""
    data = data_of()
    put(tmp_path, {**data, SHARD: damaged(data[SHARD], "flip")})
    before, remote = tree(tmp_path), f"file://{tmp_path}" if has_itself_as_remote else None
    opened(tmp_path, remote).prepare_shard(1)
    assert opened(tmp_path, remote, validate_hash="sha1")[0] == {"n": 0}
    with pytest.raises(DamagedShardError, match=r"Shard 1 .*its sha1 is .*the index says"):
        opened(tmp_path, remote, validate_hash="sha1").prepare_shard(1)
    assert tree(tmp_path) == before


def test_a_compressed_local_data_set_is_decompressed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a remote, the raw files are created beside the compressed ones and stay, and nothing else is touched."""
    put(tmp_path, data_of(compression="gz"))
    before, synced, options = tree(tmp_path), [], {"validate_hash": "sha1", "keep_zip": False}
    monkeypatch.setattr(os, "fsync", synced.append)
    assert_whole(opened(tmp_path, None, **options))
    assert {name: entry for name, entry in tree(tmp_path).items() if name in before} == before
    assert len(synced) == 3  # no mark would reveal a power loss
    (tmp_path / SHARD).unlink()
    (tmp_path / f"{SHARD}.gz").write_bytes(b"")
    with pytest.raises(DamagedShardError, match=SHARD):
        opened(tmp_path, None, **options).prepare_shard(1)
    assert (tmp_path / f"{SHARD}.gz").exists()


@pytest.mark.parametrize("event", ["none", "damage", "reboot", "damage before the seal"])
@pytest.mark.parametrize("is_past", [False, True])
def test_checksums_wait_for_the_first_batch(tmp_path: Path, event: str, is_past: bool) -> None:
    """A shard has its checksum once the first batch is over; until then, it counts while it is the same and no boot."""
    data = data_of()
    with flaky(data) as (remote, _):
        samples = iter(opened(tmp_path, remote, batch_size=PER_SHARD + 9))
        assert [next(samples)["n"] for _ in range(PER_SHARD + 1)] == list(range(PER_SHARD + 1))
        assert checksum(tmp_path) == ""
        if event == "damage before the seal":
            _damage("flip")(tmp_path)
        if is_past:
            list(samples)
            assert bool(checksum(tmp_path)) == (event != "damage before the seal")
        del samples
        if event == "damage":
            _damage("flip")(tmp_path)
        if event == "reboot":
            _reboot()
    is_lost = event.startswith("damage") or (event == "reboot" and not is_past)
    with flaky(data) as (remote, faults):
        opened(tmp_path, remote).prepare_shard(1)
        assert faults.shards == [SHARD] * is_lost
        assert (tmp_path / SHARD).read_bytes() == data[SHARD]


def test_a_shard_of_two_files_is_fetched_as_a_whole(tmp_path: Path) -> None:
    """A shard that was evicted in part is fetched again, with both files."""
    samples, local = [{"n": n} for n in range(99)], tmp_path / "local"
    data = files(write(CSVWriter, tmp_path / "made", {"n": "int"}, samples, size_limit=99, compression="gz"))
    assert asked_by_next_run(data, local)
    (local / "shard.00001.csv.meta").unlink()
    assert asked_by_next_run(data, local) == [name for name in data if "00001" in name]
