"""What can't be read, resumed, or counted is refused at once, by an error that says what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import (
    CacheLimitError,
    DamagedIndexError,
    DamagedShardError,
    FingerprintMismatchError,
    IndexFileError,
    MissingIndexError,
    MissingShardError,
    StreamingError,
    UnsafeDataError,
)
from lightning_faulttolerant.streaming import LocalDataset
from lightning_faulttolerant.streaming.world import World, current_world
from tests.messages import error_of, plain
from tests.streaming.shards import shard_paths, write_numbers


@dataclass(frozen=True)
class Place:
    """Two data sets, and a directory for others."""

    one: str
    other: str
    new: Path

    def data(self, **options: Any) -> StreamingDataset:
        return StreamingDataset(self.one, **options)

    def mixed(self, one: Any = None, other: Any = None, **options: Any) -> StreamingDataset:
        streams = [Stream(local=self.one, **(one or {})), Stream(local=self.other, **(other or {}))]
        return StreamingDataset(streams=streams, shuffle=True, **options)

    def after(self, dataset: StreamingDataset, num_samples: int) -> None:
        """Continue after some samples."""
        dataset.load_state_dict({**dataset.state_dict(0, True), "sample_in_epoch": num_samples})
        next(iter(dataset))

    def pickled(self) -> Any:
        """Return a data set whose column would run code."""
        with MDSWriter(out=str(self.new), columns={"n": "pkl"}) as writer:
            writer.write({"n": 5})
        for kind in (LocalDataset, StreamingDataset):
            assert kind(str(self.new), allow_unsafe_types=True)[0] == {"n": 5}
        return StreamingDataset(str(self.new))

    def moved(self) -> None:
        """Load the place of a reader into another one, and ask the loader."""
        loader = StreamingDataLoader(self.data(), batch_size=8)
        next(iter(loader))
        elsewhere = iter(loader.dataset)
        elsewhere.load_state_dict(elsewhere.state_dict())
        loader.state_dict()

    def of_two_workers(self) -> None:
        """Load the place of one of two workers."""
        samples = iter(self.data())
        state = samples.state_dict()
        state["world"]["num_workers"] = 2
        samples.load_state_dict(state)

    def without_a_shard(self) -> None:
        shard_paths(self.one)[0].unlink()
        self.data().prepare_shard(0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return data sets of 60 and of 40 samples."""
    return Place(
        write_numbers(tmp_path / "one", 60), write_numbers(tmp_path / "other", 40, first=1000), tmp_path / "new"
    )


REFUSED: dict[str, tuple[Callable[[Place], Any], type[Exception]]] = {
    "no place": (lambda p: StreamingDataset(), ValueError),
    "two places": (lambda p: StreamingDataset(p.one, streams=[Stream(local=p.other)]), ValueError),
    "batch_size": (lambda p: p.data(batch_size=0), ValueError),
    "shuffle_seed": (lambda p: p.data(shuffle_seed=-1), ValueError),
    "epoch_size": (lambda p: p.data(epoch_size="many"), ValueError),
    "batching_method": (lambda p: p.data(batching_method="per_stream"), ValueError),
    "sampling_method": (lambda p: p.data(sampling_method="some"), ValueError),
    "sampling_granularity": (lambda p: p.data(sampling_granularity=0), ValueError),
    "shuffle_block_size": (lambda p: p.data(shuffle_block_size=0), ValueError),
    "a negative epoch_size": (lambda p: p.data(epoch_size=-1), ValueError),
    "epoch_size with repeats": (lambda p: p.mixed({"repeat": 1}, epoch_size=10), ValueError),
    "no samples of any stream": (lambda p: p.mixed({"repeat": 0}, {"choose": 0}), ValueError),
    "a share without a sample": (lambda p: len(p.mixed(batching_method="stratified", batch_size=1)), ValueError),
    "a stream without a batch": (lambda p: len(p.mixed(batching_method="per_stream", batch_size=45)), ValueError),
    "inside of a batch": (lambda p: p.after(p.mixed(batching_method="stratified", batch_size=10), 15), ValueError),
    "num_canonical_nodes": (lambda p: p.data(num_canonical_nodes=0), ValueError),
    "validate_hash": (lambda p: p.data(validate_hash="md9"), ValueError),
    "cache_limit": (lambda p: p.data(cache_limit="much"), ValueError),
    "download_retry": (lambda p: StreamingDataset(str(p.new), p.one, download_retry=-1), ValueError),
    "a hash that the index lacks": (lambda p: StreamingDataset(str(p.new), p.one, validate_hash="md5"), ValueError),
    "replication": (lambda p: World(num_ranks=3).replicated(2), ValueError),
    "no index": (lambda p: StreamingDataset(str(p.new)), IndexFileError),
    "no samples": (lambda p: StreamingDataset(write_numbers(p.new, 0)), IndexFileError),
    "a sample after the end": (lambda p: p.data()[60], IndexError),
    "half a state": (lambda p: p.data().load_state_dict({"epoch": 1}), ValueError),
    "a newer state": (lambda p: p.data().load_state_dict({**p.data().state_dict(0, True), "version": 2}), ValueError),
    "more data": (
        lambda p: StreamingDataset(write_numbers(p.new, 63)).load_state_dict(p.data().state_dict(0, True)),
        FingerprintMismatchError,
    ),
    "another shuffle": (
        lambda p: p.data(shuffle=True).load_state_dict(p.data().state_dict(0, True)),
        FingerprintMismatchError,
    ),
    "other repeats": (
        lambda p: p.mixed({"repeat": 2}, {"repeat": 1}).load_state_dict(
            p.mixed({"repeat": 1}, {"repeat": 2}).state_dict(0, True)
        ),
        FingerprintMismatchError,
    ),
    "a moved iterator": (Place.moved, StreamingError),
    "another reader's place": (Place.of_two_workers, Exception),
    "one proportion": (lambda p: p.mixed({"proportion": 1}), ValueError),
    "two weights": (lambda p: Stream(local="a", repeat=1, choose=1), ValueError),
    "a negative weight": (lambda p: Stream(local="a", proportion=-1), ValueError),
    "a stream of nothing": (lambda p: Stream(), ValueError),
    "a pickled column": (Place.pickled, UnsafeDataError),
    "a shard before the first": (lambda p: p.data().prepare_shard(-1), IndexError),
    "an only copy": (lambda p: p.data().evict_shard(0), ValueError),
    "the coldest only copy": (lambda p: p.data().evict_coldest_shard(), ValueError),
    "a shard that is missing": (Place.without_a_shard, MissingShardError),
    "a loader of others": (lambda p: StreamingDataLoader(range(3)), TypeError),
    "batches of another size": (lambda p: StreamingDataLoader(p.data(batch_size=4), batch_size=8), ValueError),
    "batches in any order": (lambda p: StreamingDataLoader(p.data(), num_workers=2, in_order=False), ValueError),
    "a node of unknown size": (
        lambda p: current_world({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}),
        StreamingError,
    ),
    "a rank outside": (lambda p: World(rank=2, num_ranks=2), StreamingError),
    "nodes of unequal size": (lambda p: World(num_ranks=3, ranks_per_node=2), StreamingError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused(case: str, place: Place, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The error says what is wrong, with both values, and what to do; no shard is lost."""
    call, kind = REFUSED[case]
    before = len(shard_paths(place.one))
    assert plain(error_of(kind, lambda: call(place)), DIR=tmp_path) == snapshot
    assert len(shard_paths(place.one)) == before - (case == "a shard that is missing")


def test_errors_are_also_those_of_the_original() -> None:
    """Handlers for the original library's errors catch these too, and workers can pass the errors on."""
    kinds = {FileNotFoundError: (MissingIndexError, MissingShardError)}
    kinds[ValueError] = (CacheLimitError, DamagedIndexError, DamagedShardError, UnsafeDataError)
    for original, ours in kinds.items():
        for kind in ours:
            error = pickle.loads(pickle.dumps(kind("text")))
            assert isinstance(error, original)
            assert (type(error), str(error)) == (kind, "text")
