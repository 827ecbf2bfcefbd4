"""Delivered equals planned, or the consumer gets an exception: each failure of the original has a test here."""

from __future__ import annotations

import contextlib
import pickle
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
    MissingIndexError,
    MissingShardError,
    UnsafeDataError,
)
from tests.streaming.shard_files import numbers, shard_paths, write

NUM_SAMPLES = 200


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_is_missing_or_damaged_raises(tmp_path: Path, remote: str, num_workers: int) -> None:
    """The original ends the epoch silently, or hangs; ours names the shard, and doesn't keep the bad file."""
    bad, cache = shard_paths(remote)[3], tmp_path / "cache"
    good = bad.read_bytes()
    bad.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with _fails(DamagedShardError, rf"{bad.name}(.|\n)*sha1"):
        _read(cache, remote, num_workers=num_workers, validate_hash="sha1")
    assert not (cache / bad.name).exists()
    bad.unlink()
    with _fails(MissingShardError, rf"{bad.name}.*{remote}.*1 attempt"):
        _read(cache, remote, num_workers=num_workers)
    bad.write_bytes(good)
    assert _read(cache, remote, num_workers=num_workers, validate_hash="sha1") == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_are_evicted_and_fetched_again(tmp_path: Path, remote: str, num_workers: int) -> None:
    """With a limit below the size of the data, epochs are complete, and the cache stays below the limit."""
    cache = tmp_path / "cache"
    limit = sum(path.stat().st_size for path in [Path(remote, "index.json"), *shard_paths(remote)[:5]])
    dataset = StreamingDataset(str(cache), remote, shuffle=True, shuffle_block_size=30, batch_size=8, cache_limit=limit)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers)
    for _ in range(2):
        assert sorted(numbers(loader)) == list(range(NUM_SAMPLES))
        assert len(shard_paths(cache)) <= 5


def test_errors_are_also_those_of_the_original() -> None:
    """Handlers for the original library's errors catch these too, and the errors can be pickled."""
    kinds = {FileNotFoundError: (MissingIndexError, MissingShardError)}
    kinds[ValueError] = (CacheLimitError, DamagedIndexError, DamagedShardError, UnsafeDataError)
    for original, ours in kinds.items():
        for kind in ours:
            error = pickle.loads(pickle.dumps(kind("text")))
            assert isinstance(error, original)
            assert (type(error), str(error)) == (kind, "text")
