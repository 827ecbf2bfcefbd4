"""`StreamingDataset`: its samples, epochs under any loader and on any rank, and its shards."""

from __future__ import annotations

import copy
import functools
import gzip
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import FingerprintMismatchError, StreamingError
from lightning_faulttolerant.streaming import LocalDataset
from lightning_faulttolerant.streaming.world import World, current_world
from tests.processes import Child, in_child, wait_for
from tests.ranks import on_ranks
from tests.streaming.remotes import SHARD, data_of, flaky
from tests.streaming.shards import batches, numbers, shard_paths, write_numbers

DOCUMENTED = (
    *("local", "remote", "split", "shuffle", "predownload", "keep_zip", "download_retry", "download_timeout"),
    *("validate_hash", "shuffle_seed", "num_canonical_nodes", "batch_size"),
)
DEFAULTS = (None, None, False, 100_000, None, 2, 60, None, 9176, None, None)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Return a data set of 101 samples."""
    return write_numbers(tmp_path / "data" / "train", 101)


def test_the_arguments_are_the_documented_ones() -> None:
    """The first twelve have the documentation's names, order, and defaults, for use by position and by name."""
    parameters = list(inspect.signature(StreamingDataset).parameters.values())[:12]
    assert tuple(parameter.name for parameter in parameters) == DOCUMENTED
    assert tuple(parameter.default for parameter in parameters[1:]) == DEFAULTS


@pytest.mark.parametrize("kind", [StreamingDataset, LocalDataset])
def test_samples_are_had_by_number(directory: str, kind: Any) -> None:
    """A number, one from the end, a slice, a list, and arrays give samples, also of a pickled data set."""
    dataset = kind(Path(directory).parent, split="train")
    assert dataset[np.int64(3)] == dataset[torch.tensor(3)] == {"n": 3}
    assert dataset[-1] == {"n": 100}
    assert numbers(pickle.loads(pickle.dumps(dataset))[95:200:2]) == [95, 97, 99]
    assert numbers(dataset[[5, -2, 5]]) == [5, 99, 5]
    assert numbers(dataset[np.array([1, 50])]) == numbers(dataset[torch.tensor([1, 50])]) == [1, 50]
    assert dataset.size == len(dataset) == 101
    assert sorted(numbers(DataLoader(dataset, batch_size=3, shuffle=kind is LocalDataset))) == list(range(101))


def test_an_epoch_is_every_sample_once(directory: str) -> None:
    """Without shuffle each epoch is in order; with it each has another order, the same for every instance."""
    plain = StreamingDataset(directory)
    assert numbers(plain) == numbers(plain) == list(range(101))
    shuffled, again = StreamingDataset(directory, shuffle=True), StreamingDataset(directory, shuffle=True)
    first, second = numbers(shuffled), numbers(shuffled)
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second != list(range(101))
    assert [numbers(again), numbers(again)] == [first, second]
    assert numbers(StreamingDataset(directory, shuffle=True, shuffle_seed=1)) != first
    assert shuffled.next_epoch == 2


class _Broken(StreamingDataset):
    def __getitem__(self, at: Any) -> Any:
        if at == 30:
            raise KeyError("a transform's own error")
        return super().__getitem__(at)


def test_an_error_does_not_end_an_epoch(directory: str) -> None:
    """After an error, an iterator raises it again instead of appearing to finish."""
    samples = iter(_Broken(directory))
    assert len([next(samples) for _ in range(30)]) == 30
    for _ in range(2):
        with pytest.raises(KeyError, match="own error"):
            next(samples)


def test_data_sets_beside_each_other_leave_the_process_most_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All data sets of a process together keep at most a quarter of its allowed files open."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    datasets = [StreamingDataset(write_numbers(tmp_path / name, 600), shuffle=True) for name in ("a", "b", "c")]
    for dataset in datasets:
        assert sorted(numbers(dataset)) == list(range(600))
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert 40 < len([link for link in links if link.startswith(str(tmp_path))]) <= 64


def test_sizes_that_make_a_run_slow_are_warned_of(directory: str) -> None:
    """The warning comes once, at construction, and only where it matters."""
    largest = int(StreamingDataset(directory).samples_per_shard.max())
    with pytest.warns(UserWarning, match=r"predownload < batch_size \(3 < 4\)") as one:
        StreamingDataset(directory, predownload=3, batch_size=4)
    with pytest.warns(UserWarning, match=f"block size was smaller than shard size.*{largest - 1} < {largest}") as two:
        StreamingDataset(directory, shuffle=True, shuffle_block_size=largest - 1)
    assert [Path(warning.filename).name for warning in (*one, *two)] == [Path(__file__).name] * 2
    StreamingDataset(directory, predownload=4, batch_size=4, shuffle=True, shuffle_block_size=largest)
    StreamingDataset(directory, predownload=1, shuffle_block_size=1)


def test_a_state_counts_from_the_beginning_or_from_the_resume(directory: str) -> None:
    """Samples count from where this iteration began or from the epoch's beginning; its end is the next one's."""
    dataset = StreamingDataset(directory)
    state = dataset.state_dict(0, True)
    dataset.load_state_dict({**state, "epoch": 2, "sample_in_epoch": 10})
    assert dataset.state_dict(0, False)["sample_in_epoch"] == 10
    next(iter(dataset))
    for place, expected in (((5, False), (2, 15)), ((5, True), (2, 5)), ((101, True), (3, 0))):
        found = dataset.state_dict(*place)
        assert (found["epoch"], found["sample_in_epoch"]) == expected
    dataset.load_state_dict({**state, "epoch": 0, "sample_in_epoch": 101})  # as the original says it
    assert len(numbers(dataset)) == 101
    assert dataset.next_epoch == 2


def test_the_state_of_other_data_of_the_same_size_is_refused_by_its_hash(tmp_path: Path, directory: str) -> None:
    """Samples of one size make equal shards that only the hashes of the index distinguish, if both have one."""
    state = StreamingDataset(directory).state_dict(0, True)
    other = StreamingDataset(write_numbers(tmp_path / "other", 101, first=1000))
    with pytest.raises(FingerprintMismatchError, match="sha1 of the files: "):
        other.load_state_dict(state)
    index = Path(directory, "index.json")
    entries = json.loads(index.read_text())
    for shard in entries["shards"]:
        shard["raw_data"]["hashes"] = {}
    index.write_text(json.dumps(entries))
    StreamingDataset(directory).load_state_dict(state)


OPTIONS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}
"""Spawned workers inherit nothing."""


@pytest.mark.parametrize("options", [*OPTIONS, pytest.param(SPAWNED, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("make", [DataLoader, StreamingDataLoader])
def test_each_iteration_is_the_next_epoch_under_any_loader(directory: str, options: Any, make: Any) -> None:
    """Whole epochs follow one after the other, also after a resume, however workers are started."""
    dataset, other = (StreamingDataset(directory, shuffle=True, batch_size=8) for _ in range(2))
    whole = DataLoader(other, batch_size=8)
    expected = [batches(whole) for _ in range(3)]
    loader = make(dataset, batch_size=8, **options)
    assert [batches(loader), batches(loader)] == expected[:2]
    assert dataset.next_epoch == 2
    dataset.load_state_dict(dataset.state_dict(48, from_beginning=True))
    assert [batches(loader), batches(loader)] == [expected[1][6:], expected[2]]


def test_workers_that_take_turns_at_unknown_batches_cannot_be_counted(directory: str) -> None:
    """Without a batch size, two workers read every sample once, but the consumed ones can't be counted: an error."""
    dataset = StreamingDataset(directory)
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    assert sorted(numbers(loader)) == list(range(101))
    with pytest.raises(StreamingError, match="batch_size="):
        dataset.state_dict(8, from_beginning=True)
    one = DataLoader(dataset, batch_size=8, num_workers=1)
    assert len(batches(one)) == 13
    assert dataset.state_dict(8, from_beginning=True)["sample_in_epoch"] == 8


def test_the_iterator_can_be_brought_to_a_place(directory: str) -> None:
    """The iterator's state is loaded into one of a new data set, which continues with the next sample, then epoch."""
    dataset = StreamingDataset(directory, shuffle=True, batch_size=8)
    numbers(dataset)
    samples = iter(dataset)
    numbers(itertools.islice(samples, 21))
    state = samples.state_dict()
    again = StreamingDataset(directory, shuffle=True, batch_size=8)
    resumed = iter(again)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert numbers(resumed) == numbers(samples)
    assert numbers(again) == numbers(dataset)


# An epoch is announced by the process that begins it, and nothing of it is left when its processes are gone.


@pytest.mark.parametrize("make", [DataLoader, StreamingDataLoader])
def test_iterators_beside_each_other_have_whole_epochs(tmp_path: Path, make: Any) -> None:
    """Two iterators of one loader, with workers, each read a whole epoch; ours assigns them different ones."""
    directory = write_numbers(tmp_path, 61)
    whole = StreamingDataLoader(StreamingDataset(directory, shuffle=True, batch_size=8), batch_size=8)
    expected = [batches(whole), batches(whole)]
    loader = make(StreamingDataset(directory, shuffle=True, batch_size=8), batch_size=8, num_workers=2)
    pairs = [(one["n"].tolist(), other["n"].tolist()) for one, other in zip(loader, loader, strict=True)]
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    assert first in expected
    assert second in expected
    if make is StreamingDataLoader:
        assert [first, second] == expected


@pytest.mark.parametrize("make", [DataLoader, StreamingDataLoader])
def test_a_copy_tells_its_own_workers(tmp_path: Path, make: Any) -> None:
    """A loader that was copied with its data set reads its epochs one after the other, with persistent workers."""
    dataset = StreamingDataset(write_numbers(tmp_path, 61), shuffle=True, batch_size=8)
    expected = [batches(StreamingDataLoader(dataset, batch_size=8)) for _ in range(2)]
    loader = make(pickle.loads(pickle.dumps(dataset)), batch_size=8, num_workers=2, persistent_workers=True)
    copied = copy.deepcopy(loader)
    copied.dataset.load_state_dict({**dataset.state_dict(0, True), "epoch": 0})
    assert [batches(copied), batches(copied)] == expected
    assert dataset.next_epoch == loader.dataset.next_epoch == 2


@pytest.mark.parametrize(("make", "num_workers"), [(DataLoader, 1), (StreamingDataLoader, 0)])
def test_ranks_that_are_forked_with_a_data_set_count_their_own_epochs(
    tmp_path: Path, make: Any, num_workers: int
) -> None:
    """An epoch that one rank has read is not over for another rank, nor for the process that created the data set."""
    dataset = StreamingDataset(write_numbers(tmp_path / "data", 61), shuffle=True, batch_size=8)
    found = [tmp_path / "rank0", tmp_path / "rank1"]
    for path in found:

        def read(path: Path = path) -> None:
            loader = make(dataset, batch_size=8, num_workers=num_workers)
            path.write_text(repr([batches(loader), batches(loader)]))

        assert in_child(read) == 0
    assert dataset.next_epoch == 0
    expected = [batches(StreamingDataLoader(dataset, batch_size=8)) for _ in range(2)]
    assert [path.read_text() for path in found] == [repr(expected)] * 2


def _read_and_be_killed(directory: str, process_ids: Path) -> None:
    dataset = StreamingDataset(directory, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    next(iter(loader))
    [worker] = multiprocessing.active_children()
    process_ids.write_text(f"{os.getpid()} {worker.pid}")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """A process killed by SIGKILL in an iteration leaves no shared memory and no file for the next run to find."""
    directory = write_numbers(tmp_path / "data", 61)
    files = sorted(Path(directory).rglob("*"))
    assert in_child(functools.partial(_read_and_be_killed, directory, tmp_path / "ids")) == -signal.SIGKILL
    child, worker = [int(process_id) for process_id in (tmp_path / "ids").read_text().split()]
    os.kill(worker, signal.SIGKILL)  # torch's own end follows in some seconds
    assert sorted(Path(directory).rglob("*")) == files
    assert not [name for name in os.listdir("/dev/shm") if f"_{worker}_" in name or f"_{child}_" in name]


# Ranks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
LIGHTNING = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
CASES = {
    "alone": ({}, World()),
    "torchrun": (TORCHRUN, World(rank=5, num_ranks=8, ranks_per_node=4)),
    "Lightning's launcher": (LIGHTNING, World(rank=1, num_ranks=2, ranks_per_node=2)),
    "its second node, told the size of a node": (
        {**LIGHTNING, "WORLD_SIZE": "4", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        World(rank=3, num_ranks=4, ranks_per_node=2),
    ),
    "srun": (SLURM, World(rank=3, num_ranks=4, ranks_per_node=2)),
    "a batch script of SLURM, not by srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
        World(),
    ),
}


def test_the_rank_is_what_the_launcher_says() -> None:
    """The environment of each launcher gives this rank; `replication` ranks are one reader, on its node."""
    for case, (environment, expected) in CASES.items():
        assert current_world(environment) == expected, case
    for rank in range(8):
        world = World(rank=rank, num_ranks=8, ranks_per_node=4).replicated(2)
        assert world == World(rank=rank // 2, num_ranks=4, ranks_per_node=2)


def _read(directory: str, rank: int) -> list[Any]:
    dataset = StreamingDataset(directory, shuffle=True)
    samples = numbers(dataset)
    state = dataset.state_dict(len(samples) * dist.get_world_size(), from_beginning=True)
    return [len(dataset), samples, state, numbers(StreamingDataset(directory, shuffle=True, replication=2))]


def test_the_ranks_of_a_process_group_share_an_epoch(tmp_path: Path) -> None:
    """Each rank reads its part, all samples are read, the state is the same; with replication, they read the same."""
    directory = write_numbers(tmp_path / "data", 101)
    answers = on_ranks(functools.partial(_read, directory), tmp_path / "ranks")
    (len_0, samples_0, state_0, same_0), (len_1, samples_1, state_1, same_1) = answers
    assert len_0 == len_1 == len(samples_0) == len(samples_1) == 51
    assert set(samples_0) | set(samples_1) == set(range(101)) == set(same_0)
    assert (state_0, same_0) == (state_1, same_1)
    assert (state_0["epoch"], state_0["sample_in_epoch"], len(same_0)) == (1, 0, 101)


def test_the_rank_is_asked_for_when_an_iteration_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set created before the launcher has set anything still reads its part."""
    dataset = StreamingDataset(write_numbers(tmp_path / "data", 40))
    for name, value in LIGHTNING.items():
        monkeypatch.setenv(name, value)
    assert len(dataset) == 20
    assert numbers(dataset) == list(range(1, 40, 2))


# The view on the shards, by the original library's names

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
