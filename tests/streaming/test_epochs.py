"""The epoch is announced by the process that begins it, and nothing of it is left when its processes are gone."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from tests.processes import in_child
from tests.streaming.shards import batches, write_numbers


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
