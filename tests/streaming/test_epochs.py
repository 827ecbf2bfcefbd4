"""The epoch is announced by the process that begins it, and nothing of it is left when its processes are gone."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming import epochs
from lightning_faulttolerant.streaming.epochs import EpochBook
from lightning_faulttolerant.streaming.ordering import Seeding
from tests.processes import in_child
from tests.streaming.shard_files import batches, write

BIG = 2**60 + 1


def test_a_book_keeps_what_a_state_says() -> None:
    """A book keeps epoch, position, and seeding, also the large seeds of the original's first versions."""
    seeding = Seeding(seed=BIG, num_canonical_nodes=3)
    book = EpochBook(Seeding(seed=1))
    assert (book.place, book.next_epoch, book.seeding) == ((0, 0), 0, Seeding(seed=1))
    book.put(5, 7, seeding)
    assert (book.place, book.next_epoch, book.seeding, book.has_begun) == ((5, 7), 5, seeding, False)
    assert book.begin(lambda epoch, sample: (epoch, sample)) == (5, 7)
    assert (book.place, book.next_epoch, book.has_begun) == ((5, 7), 6, True)


def test_the_end_of_an_epoch_is_begun_as_the_next_one() -> None:
    """A book begins at the place that the data set derives from the state."""
    book = EpochBook(Seeding(seed=1))
    book.put(5, 7, Seeding(seed=1))
    assert book.begin(lambda epoch, sample: (epoch + 1, 0)) == (6, 0)
    assert book.next_epoch == 7


def _as_worker(worker: int, name: str, patch: pytest.MonkeyPatch) -> None:
    info = WorkerInfo(id=worker, num_workers=2, seed=0, dataset=None)
    patch.setattr(epochs, "get_worker_info", lambda: info)
    patch.setattr(multiprocessing.current_process(), "_name", name)


def _same(epoch: int, sample: int) -> tuple[int, int]:
    return epoch, sample


def test_a_worker_waits_for_worker_0_of_the_same_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What worker 0 of another iterator has announced does not count, and after a time an error names worker 0."""
    monkeypatch.setattr(epochs, "_WAIT_SECONDS", 0.05)
    first = EpochBook(Seeding(seed=1))
    _as_worker(0, "Process-4", monkeypatch)
    assert first.begin_in_worker(_same) == (0, 0)
    _as_worker(1, f"Process-{5 + epochs._SLOTS}", monkeypatch)  # it looks into the same slot
    other = _copy(first)
    with pytest.raises(StreamingError, match="worker 0 has not begun"):
        other.begin_in_worker(_same)
    _as_worker(1, "Process-5", monkeypatch)
    assert _copy(first).begin_in_worker(_same) == (0, 0)


def _copy(book: EpochBook) -> EpochBook:
    """Return a book of another process, with the same shared memory."""
    other = EpochBook(Seeding(seed=1))
    other._shared = book._shared
    return other


def test_a_worker_of_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that can't be distinguished from those of another iterator are an error, not a guess."""
    _as_worker(0, "my worker", monkeypatch)
    with pytest.raises(StreamingError, match="my worker"):
        EpochBook(Seeding(seed=1)).begin_in_worker(_same)


@pytest.mark.parametrize("make", [DataLoader, StreamingDataLoader])
def test_iterators_beside_each_other_have_whole_epochs(tmp_path: Path, make: Any) -> None:
    """Two iterators of one loader, with workers, each read a whole epoch; ours assigns them different ones."""
    directory = write(tmp_path, 61)
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
    dataset = StreamingDataset(write(tmp_path, 61), shuffle=True, batch_size=8)
    expected = [batches(StreamingDataLoader(dataset, batch_size=8)) for _ in range(2)]
    loader = make(copy.deepcopy(dataset), batch_size=8, num_workers=2, persistent_workers=True)
    copied = copy.deepcopy(loader)
    copied.dataset.load_state_dict({**dataset.state_dict(0, True), "epoch": 0})
    assert [batches(copied), batches(copied)] == expected
    assert dataset.next_epoch == loader.dataset.next_epoch == 2


def _epochs_of_rank(make: Any, dataset: StreamingDataset, num_workers: int, found: Path) -> None:
    loader = make(dataset, batch_size=8, num_workers=num_workers)
    found.write_text(repr([batches(loader), batches(loader)]))


@pytest.mark.parametrize(("make", "num_workers"), [(DataLoader, 1), (StreamingDataLoader, 0)])
def test_ranks_that_are_forked_with_a_data_set_count_their_own_epochs(
    tmp_path: Path, make: Any, num_workers: int
) -> None:
    """An epoch that one rank has read is not over for another rank, nor for the process that created the data set."""
    dataset = StreamingDataset(write(tmp_path / "data", 61), shuffle=True, batch_size=8)
    found = [tmp_path / "rank0", tmp_path / "rank1"]
    for path in found:
        rank = multiprocessing.get_context("fork").Process(
            target=_epochs_of_rank, args=(make, dataset, num_workers, path)
        )
        rank.start()
        rank.join()
    assert dataset.next_epoch == 0
    expected = [batches(StreamingDataLoader(dataset, batch_size=8)) for _ in range(2)]
    assert [path.read_text() for path in found] == [repr(expected)] * 2


@pytest.mark.slow
def test_ranks_that_are_spawned_with_a_data_set_count_their_own_epochs(tmp_path: Path) -> None:
    """A data set that was sent to ranks begins in each of them where it was, whatever was read in between."""
    dataset = StreamingDataset(write(tmp_path / "data", 61), shuffle=True, batch_size=8)
    found = tmp_path / "rank"
    rank = multiprocessing.get_context("spawn").Process(
        target=_epochs_of_rank, args=(StreamingDataLoader, dataset, 2, found)
    )
    rank.start()
    expected = [batches(StreamingDataLoader(dataset, batch_size=8)) for _ in range(2)]
    rank.join()
    assert found.read_text() == repr(expected)


def _read_and_be_killed(directory: str, process_ids: Path) -> None:
    dataset = StreamingDataset(directory, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    next(iter(loader))
    [worker] = multiprocessing.active_children()
    process_ids.write_text(f"{os.getpid()} {worker.pid}")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """A process killed by SIGKILL in an iteration leaves no shared memory and no file for the next run to find."""
    directory = write(tmp_path / "data", 61)
    files = sorted(Path(directory).rglob("*"))
    assert in_child(functools.partial(_read_and_be_killed, directory, tmp_path / "ids")) == -signal.SIGKILL
    child, worker = [int(process_id) for process_id in (tmp_path / "ids").read_text().split()]
    os.kill(worker, signal.SIGKILL)  # torch's own end follows in some seconds
    assert sorted(Path(directory).rglob("*")) == files
    assert not [name for name in os.listdir("/dev/shm") if f"_{worker}_" in name or f"_{child}_" in name]
