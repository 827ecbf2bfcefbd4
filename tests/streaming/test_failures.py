"""Delivered equals planned, or the consumer gets an exception: each failure of the original has a test here."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import (
    CacheLimitError,
    DamagedIndexError,
    DamagedShardError,
    IndexFileError,
    MissingIndexError,
    MissingShardError,
    UnsafeDataError,
)
from lightning_faulttolerant.streaming.cache import downloads
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.streaming.shard_files import numbers, shard_paths, write

NUM_SAMPLES = 200
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries follow one another without a pause."""
    monkeypatch.setattr(downloads, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """Return a data set of 200 samples."""
    return write(tmp_path / "remote", NUM_SAMPLES)


def _read(local: Path | str, remote: str | None = None, *, num_workers: int = 0, **options: Any) -> list[int]:
    dataset = StreamingDataset(str(local), remote, batch_size=8, **options)
    return numbers(StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers))


@contextlib.contextmanager
def _fails(kind: type[Exception], match: str) -> Iterator[None]:
    """Expect an error, and release the iterators in its traceback: otherwise torch takes 10 s to end their workers."""
    with pytest.raises(kind, match=match) as raised:
        yield
    traceback.clear_frames(raised.tb)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@WORKERS
def test_a_shard_that_is_missing_remotely_raises(tmp_path: Path, remote: str, num_workers: int) -> None:
    """The original ends the epoch silently, or hangs; ours names shard, address, and attempts."""
    missing = shard_paths(remote)[4]
    missing.unlink()
    with _fails(MissingShardError, rf"{missing.name}.*{remote}.*1 attempt"):
        _read(tmp_path / "cache", remote, num_workers=num_workers)


@WORKERS
def test_a_bad_hash_raises_and_is_not_served_later(tmp_path: Path, remote: str, num_workers: int) -> None:
    """A flipped bit raises with both hashes; after a repair every sample is right: the bad file was not kept."""
    bad = shard_paths(remote)[3]
    good = bad.read_bytes()
    _flip(bad)
    with _fails(DamagedShardError, rf"{bad.name}(.|\n)*sha1"):
        _read(tmp_path / "cache", remote, num_workers=num_workers, validate_hash="sha1")
    assert not (tmp_path / "cache" / bad.name).exists()
    bad.write_bytes(good)
    assert _read(tmp_path / "cache", remote, num_workers=num_workers, validate_hash="sha1") == list(range(NUM_SAMPLES))


def test_a_local_shard_that_is_truncated_raises(remote: str) -> None:
    """Without a remote, a damaged file raises and stays, since it may be the only copy."""
    path = shard_paths(remote)[2]
    os.truncate(path, 100)
    with _fails(DamagedShardError, path.name):
        _read(remote)
    assert path.stat().st_size == 100


def test_two_data_sets_share_remote_and_cache(tmp_path: Path, remote: str) -> None:
    """Two instances in one process read one directory at the same time, and a third later; the original refuses."""
    cache = str(tmp_path / "cache")
    first, second = StreamingDataset(cache, remote), StreamingDataset(cache, remote, shuffle=True)
    read = list(zip(first, second, strict=True))
    assert [one["n"] for one, _ in read] == list(range(NUM_SAMPLES))
    assert sorted(two["n"] for _, two in read) == list(range(NUM_SAMPLES))
    assert numbers(StreamingDataset(cache, remote)) == list(range(NUM_SAMPLES))


def test_a_cache_that_cannot_be_written_serves(tmp_path: Path, remote: str) -> None:
    """A complete cache is also read as a local data set, with the remote gone."""
    cache = tmp_path / "cache"
    _read(cache, remote)
    shutil.rmtree(remote)
    assert _read(cache) == list(range(NUM_SAMPLES))
    with _fails(IndexFileError, "remote"):
        _read(cache, remote)


@WORKERS
def test_shards_are_evicted_and_fetched_again(tmp_path: Path, remote: str, num_workers: int) -> None:
    """With a limit below the size of the data, epochs are complete, and the cache stays below the limit."""
    cache = tmp_path / "cache"
    limit = sum(path.stat().st_size for path in [Path(remote, "index.json"), *shard_paths(remote)[:5]])
    dataset = StreamingDataset(str(cache), remote, shuffle=True, shuffle_block_size=30, batch_size=8, cache_limit=limit)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers)
    for _ in range(2):
        assert sorted(numbers(loader)) == list(range(NUM_SAMPLES))
        assert len(shard_paths(cache)) <= 5


@pytest.mark.parametrize("is_enough", [True, False])
def test_a_limit_that_is_too_low_is_refused_at_construction(tmp_path: Path, remote: str, is_enough: bool) -> None:
    """A limit has room for four of the largest shards, and for one beside all indexes; otherwise it is refused."""
    index, largest = Path(remote, "index.json").stat().st_size, max(path.stat().st_size for path in shard_paths(remote))
    assert index > 3 * largest
    limit = index + largest - (not is_enough)
    with contextlib.nullcontext() if is_enough else pytest.raises(ValueError, match=f"too low.*at least {limit + 1}"):
        StreamingDataset(str(tmp_path / "cache"), remote, cache_limit=limit)
    StreamingDataset(remote, cache_limit=1)  # nothing is fetched, so nothing counts


def test_errors_are_also_those_of_the_original(tmp_path: Path, remote: str) -> None:
    """Handlers for the original library's errors catch these too, and the errors can be pickled."""
    with pytest.raises(FileNotFoundError, match="index"):
        StreamingDataset(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="index"):
        StreamingDataset(str(tmp_path / "cache"), str(tmp_path / "nothing"), download_retry=0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "index.json").touch()
    for place in (str(tmp_path / "empty"), str(tmp_path / "cache")):
        with pytest.raises(ValueError, match="index"):
            StreamingDataset(place, str(tmp_path / "empty"), download_retry=0)
    shard_paths(remote)[0].unlink()
    with pytest.raises(FileNotFoundError, match="shard"):
        _read(remote)
    with MDSWriter(out=str(tmp_path / "pickled"), columns={"n": "pkl"}) as writer:
        writer.write({"n": 5})
    with pytest.raises(ValueError, match="allow_unsafe_types"):
        StreamingDataset(str(tmp_path / "pickled"))
    for kind in (CacheLimitError, DamagedIndexError, DamagedShardError, UnsafeDataError):
        assert issubclass(kind, ValueError)
    for kind in (
        CacheLimitError,
        DamagedIndexError,
        DamagedShardError,
        MissingIndexError,
        MissingShardError,
        UnsafeDataError,
    ):
        error = pickle.loads(pickle.dumps(kind("text")))
        assert (type(error), str(error)) == (kind, "text")
