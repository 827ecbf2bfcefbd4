"""The view of a sharded data set on its shards, and the operations on them, by the original library's names."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lightning_faulttolerant import StreamingDataset
from tests.processes import Child, wait_for
from tests.streaming.remotes import SHARD, data_of, flaky
from tests.streaming.shards import numbers, shard_paths, write_numbers

NUM_SAMPLES = 101


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """Return a data set of some shards."""
    return write_numbers(tmp_path / "remote", NUM_SAMPLES)


@pytest.fixture
def cached(tmp_path: Path, remote: str) -> tuple[StreamingDataset, Path]:
    """Return a data set that is fetched from the remote, and its cache directory."""
    return StreamingDataset(str(tmp_path / "cache"), remote), tmp_path / "cache"


def test_shards_are_sequences_of_their_samples(cached: tuple[StreamingDataset, Path]) -> None:
    """Together the shards have each sample once, in order, and a shard is fetched when a sample of it is requested."""
    dataset, cache = cached
    assert dataset.num_shards == len(dataset.shards) == len(dataset.samples_per_shard) > 3
    assert [shard.samples for shard in dataset.shards] == dataset.samples_per_shard.tolist()
    assert not shard_paths(cache)
    last = dataset.shards[-1]
    assert last[-1] == {"n": NUM_SAMPLES - 1}
    assert len(shard_paths(cache)) == 1
    assert numbers(sample for shard in dataset.shards for sample in shard) == list(range(NUM_SAMPLES))


def test_a_shard_says_what_the_index_says_of_it(tmp_path: Path) -> None:
    """A shard gives its columns, its compression, and the sizes of its files."""
    assert StreamingDataset(write_numbers(tmp_path / "plain", 30)).shards[0].get_zip_size() is None
    zipped = StreamingDataset(write_numbers(tmp_path / "zipped", 30, compression="gz:1")).shards[0]
    stored = shard_paths(tmp_path / "zipped")[0].read_bytes()
    size, zip_size = len(gzip.decompress(stored)), len(stored)
    assert (zipped.get_raw_size(), zipped.get_zip_size(), zipped.get_max_size()) == (size, zip_size, size + zip_size)
    assert (zipped.column_names, zipped.column_encodings, zipped.compression) == (("n",), ("int",), "gz:1")


def test_shards_are_prepared_and_evicted_by_hand(cached: tuple[StreamingDataset, Path], remote: str) -> None:
    """A prepared shard is local without being read, an evicted one is fetched again; the coldest is the first one."""
    dataset, cache = cached
    empty = dataset.cache_usage
    for shard in range(dataset.num_shards):
        dataset.prepare_shard(shard)
    assert len(shard_paths(cache)) == dataset.num_shards
    assert dataset.cache_usage == empty + sum(shard.get_raw_size() for shard in dataset.shards)
    for shard in range(dataset.num_shards):
        dataset.evict_shard(shard)
    assert not shard_paths(cache)
    assert dataset.cache_usage == empty
    assert dataset[0] == {"n": 0}
    for shard in (2, 1):
        dataset.prepare_shard(shard)
    for shard in (0, 2, 1):
        dataset.evict_coldest_shard()
        assert not (cache / shard_paths(remote)[shard].name).exists()
    with pytest.raises(ValueError, match="no shard to evict"):
        dataset.evict_coldest_shard()


def test_a_shard_that_another_process_fetches_is_left_to_it(tmp_path: Path) -> None:
    """With `blocking=False`, nothing is waited for, and nothing is fetched twice."""
    with flaky(data_of(), {SHARD: ["hang"]}) as (remote, faults):
        dataset = StreamingDataset(str(tmp_path), remote)
        with Child(lambda: dataset.prepare_shard(1)):
            wait_for(lambda: any(tmp_path.rglob("*.lock")))
            dataset.prepare_shard(1, blocking=False)
            assert faults.shards == []
            dataset.prepare_shard(2, blocking=False)
            assert faults.shards == ["shard.00002.mds"]


def test_arguments_can_be_read_again(tmp_path: Path, remote: str) -> None:
    """The arguments of a data set are available under the same names, with the values that it derives."""
    given = {"shuffle": True, "shuffle_seed": 7, "shuffle_block_size": 64, "num_canonical_nodes": 2}
    given |= {"sampling_method": "fixed", "sampling_granularity": 2}
    dataset = StreamingDataset(str(tmp_path / "cache"), remote, epoch_size="0.05k", cache_limit="1mb", **given)
    expected = {**given, "epoch_size": 50, "cache_limit": 1 << 20, "batching_method": "random"}
    assert {name: getattr(dataset, name) for name in expected} == expected
    plain = StreamingDataset(remote)
    assert (plain.num_canonical_nodes, plain.epoch_size, plain.allow_unsafe_types) == (1, NUM_SAMPLES, False)
