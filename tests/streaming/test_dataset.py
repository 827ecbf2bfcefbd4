from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import FingerprintMismatchError, StreamingError
from lightning_faulttolerant.streaming import LocalDataset
from tests.streaming.shards import batches, numbers, write_numbers

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
