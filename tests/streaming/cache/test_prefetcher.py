"""Shards arrive before they are needed, errors are raised at their shards, and no thread is left running."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError
from tests.streaming.children import wait_for
from tests.streaming.remotes import PER_SHARD, SHARD, assert_tidy, data_of, flaky, opened, web
from tests.streaming.shard_files import numbers

DATA = data_of(8)


def here(directory: Path) -> list[int]:
    """Return the numbers of the shards in a directory."""
    return sorted(int(path.name.split(".")[1]) for path in directory.glob("shard.*.mds"))


def threads() -> list[threading.Thread]:
    """Return the threads of all prefetchers."""
    return [thread for thread in threading.enumerate() if thread.name == "shard-prefetch"]


@pytest.mark.parametrize(("batch_size", "expected"), [(14, {1: 1, 15: 3, 43: 4}), (56, {1: 2, 57: 6})])
def test_shards_are_fetched_ahead_as_far_as_told(tmp_path: Path, batch_size: int, expected: dict[int, int]) -> None:
    """First those of the first batch, and no others; as the reader advances, those of the next samples."""
    with flaky(DATA) as (remote, faults):
        samples, read = iter(opened(tmp_path, remote, predownload=2 * PER_SHARD, batch_size=batch_size)), []
        for num_read, num_shards in expected.items():
            read += [next(samples)["n"] for _ in range(num_read - len(read))]
            wait_for(lambda num=num_shards: here(tmp_path) == list(range(num)))
            time.sleep(0.05)
            assert here(tmp_path) == list(range(num_shards))
        assert read + numbers(samples) == list(range(8 * PER_SHARD))
        assert sorted(faults.shards) == sorted(set(DATA) - {"index.json"})
    assert threads() == []


def test_what_is_not_there_in_time_is_waited_for(tmp_path: Path) -> None:
    """A reader that is faster than the downloads gets each shard complete, and none is downloaded twice."""
    with web(DATA, {name: ["slow"] for name in DATA}) as (remote, faults):
        assert numbers(opened(tmp_path, remote)) == list(range(8 * PER_SHARD))
        assert sorted(faults.shards) == sorted(set(DATA) - {"index.json"})
    assert_tidy(tmp_path)


@pytest.mark.parametrize(
    ("fault", "num_attempts", "kind"), [("missing", 1, MissingShardError), ("flip", 3, DamagedShardError)]
)
def test_an_error_is_raised_at_its_shard(tmp_path: Path, fault: str, num_attempts: int, kind: type[Exception]) -> None:
    """An error in the background is raised where its shard is needed, after all earlier shards, and comes once."""
    with flaky(DATA, {SHARD: [fault] * 9}) as (remote, faults):
        options = {"validate_hash": "sha1", "batch_size": 1, "predownload": 999}
        samples = iter(opened(tmp_path, remote, **options))
        read = [next(samples)["n"], next(samples)["n"]]
        wait_for(lambda: faults.shards.count(SHARD) == num_attempts and len(here(tmp_path)) == 7)
        with pytest.raises(kind, match=r"Shard 1 "):
            read.extend(sample["n"] for sample in samples)
        assert read == list(range(len(read)))
        assert faults.shards.count(SHARD) == num_attempts


def test_closing_gives_up_what_is_being_fetched(tmp_path: Path) -> None:
    """Neither a download that hangs nor the pause before the next attempt delays the closing."""
    with web(DATA, {f"shard.0000{number}.mds": ["hang"] * 9 for number in range(1, 5)}) as (remote, faults):
        samples = iter(opened(tmp_path, remote, batch_size=1, predownload=999))
        assert numbers([next(samples), next(samples)]) == [0, 1]
        wait_for(lambda: len(set(faults.shards)) == 5)
        assert threads()
        del samples
        assert threads() == []
        assert_tidy(tmp_path)
