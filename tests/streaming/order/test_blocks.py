"""The orders that cost nothing in advance: every sample once, a few shards at a time, the same cost at any size."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lightning_faulttolerant.streaming.order import EpochOrder, epoch_order, shuffles

MANY = [[200_000] * 5_000]  # 10^9 samples
some_sizes = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any), min_size=1, max_size=3)


def ids_of(order: EpochOrder) -> list[int]:
    """Return the samples of the whole epoch."""
    return order.sample_ids(np.arange(order.num_positions)).tolist()


@given(
    sizes=some_sizes,
    shuffle=st.booleans(),
    rows=st.integers(1, 9),
    block_size=st.none() | st.integers(1, 50),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_once_in_every_epoch(
    sizes: list[list[int]], shuffle: bool, rows: int, block_size: int | None, epoch: int
) -> None:
    """Whatever the shards, the canonical nodes, and the blocks, an epoch is a permutation of the data set."""
    order = epoch_order(sizes, epoch=epoch, shuffle=shuffle, num_canonical_nodes=rows, block_size=block_size)
    assert sorted(ids_of(order)) == list(range(sum(map(sum, sizes))))


@given(sizes=some_sizes, rows=st.integers(1, 5), data=st.data())
def test_what_stands_at_a_position_does_not_depend_on_what_was_asked_before(
    sizes: list[list[int]], rows: int, data: st.DataObject
) -> None:
    """Positions in any order, one by one or together, give the same samples."""
    order = epoch_order(sizes, epoch=1, shuffle=True, num_canonical_nodes=rows, block_size=5)
    whole = ids_of(order)
    asked = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30))
    fresh = epoch_order(sizes, epoch=1, shuffle=True, num_canonical_nodes=rows, block_size=5)
    assert fresh.sample_ids(np.array(asked, np.int64)).tolist() == [whole[position] for position in asked]


def test_an_order_is_that_of_its_seed_and_epoch() -> None:
    """Another epoch or another seed is another order; the same ones give the same order."""
    orders = [
        ids_of(epoch_order([[50] * 20], epoch=epoch, seed=seed, shuffle=True))
        for epoch, seed in ((0, 1), (1, 1), (0, 2), (1, 0), (0, 1))
    ]
    assert orders[0] == orders[4]
    assert len({tuple(order) for order in orders}) == 4


def test_the_default_order_never_changes() -> None:
    """A run that resumes with a later version of this package or of numpy must find the order it began with."""
    order = epoch_order([[3, 4, 2], [5]], epoch=1, seed=9176, shuffle=True, num_canonical_nodes=2, block_size=6)
    assert ids_of(order) == FIXED


FIXED = [8, 12, 5, 13, 7, 10, 4, 11, 6, 2, 9, 1, 3, 0]


def test_the_default_order_of_parts_and_slices_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for samples that are drawn from a shard, and for blocks that are read in slices."""
    monkeypatch.setattr(shuffles, "MAX_BLOCK_SAMPLES", 6)
    order = epoch_order([[9, 5], [7]], epoch=1, seed=3, shuffle=True, chosen=[8, 10])
    assert ids_of(order) == FIXED_PARTS


FIXED_PARTS = [19, 18, 9, 15, 20, 7, 8, 15, 17, 14, 11, 1, 20, 17, 16, 12, 6, 2]


def test_samples_drawn_from_a_shard_come_in_its_order_without_shuffle() -> None:
    """Without shuffle, drawn samples come in order, as all samples do."""
    ids = ids_of(epoch_order([[50]], epoch=0, chosen=[20]))
    assert ids == sorted(ids)


@pytest.mark.parametrize("position", [0, 900_000_000, 999_999_744])
def test_a_billion_samples_cost_a_list_of_shards_and_a_block(position: int) -> None:
    """Building the order and reading the first batch anywhere takes no memory that grows with the number of samples."""
    tracemalloc.start()
    try:
        order = epoch_order(MANY, epoch=3, shuffle=True)
        ids = order.sample_ids(np.arange(position, position + 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(ids // 200_000)) <= 8
    assert peak < 10_000_000  # an array of all samples has 8 GB; one of the shards 40 kB, of a block 1 MB


def test_a_large_block_is_read_in_slices_of_all_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample comes once, from the same few shards as without slices, and each slice has a share of each shard."""
    monkeypatch.setattr(shuffles, "MAX_BLOCK_SAMPLES", 100)
    order = epoch_order([[50] * 40], epoch=0, shuffle=True)
    ids = ids_of(order)
    assert sorted(ids) == list(range(2000))
    for begin in range(0, 2000, 100):
        shards = np.unique(np.array(ids[begin : begin + 100]) // 50, return_counts=True)
        assert len(shards[0]) == 8
        assert set(shards[1]) <= {11, 12, 13, 14}
    groups = [set(np.array(ids[begin : begin + 400]) // 50) for begin in range(0, 2000, 400)]
    assert sorted(shard for group in groups for shard in group) == list(range(40))


@given(sizes=some_sizes, rows=st.integers(1, 4), block_size=st.none() | st.integers(1, 50), most=st.integers(1, 30))
def test_every_sample_comes_once_in_slices_too(
    sizes: list[list[int]], rows: int, block_size: int | None, most: int
) -> None:
    """Every sample comes once, however small the slices are."""
    with mock.patch.object(shuffles, "MAX_BLOCK_SAMPLES", most):
        order = epoch_order(sizes, epoch=0, shuffle=True, num_canonical_nodes=rows, block_size=block_size)
        assert sorted(ids_of(order)) == list(range(sum(map(sum, sizes))))


def test_an_order_is_freed_at_once_with_its_blocks() -> None:
    """No reference cycle keeps the blocks of past epochs until the next garbage collection."""
    order = epoch_order([[100] * 40, [50]], epoch=0, shuffle=True, chosen=[4000, 20])
    ids_of(order)
    alive = weakref.ref(order)
    gc.disable()
    try:
        del order
        assert alive() is None
    finally:
        gc.enable()


def test_reading_on_makes_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is built once, also if many canonical nodes are read side by side and a thread looks ahead."""
    made: list[int] = []
    drawn = shuffles.permutation
    monkeypatch.setattr(shuffles, "permutation", lambda key, count: made.append(key) or drawn(key, count))
    order = epoch_order([[20] * 320], epoch=0, shuffle=True, num_canonical_nodes=8)
    made.clear()
    for position in range(0, 6400, 40):
        order.sample_ids(np.arange(position, position + 40))
        ahead = min(position + 1200, 6400 - 40)
        order.sample_ids(np.arange(ahead, ahead + 40))
    assert len(made) == len(set(made)) == 40


def test_shards_are_read_block_by_block() -> None:
    """At any position the samples of one block are of at most eight shards, and a shard is never opened again."""
    sizes = np.random.default_rng(0).integers(1, 60, 100)
    order = epoch_order([sizes], epoch=0, shuffle=True)
    shards = np.searchsorted(np.cumsum(sizes), ids_of(order), side="right")
    first = np.full(100, -1)
    last = np.zeros(100, int)
    for position, shard in enumerate(shards):
        first[shard] = position if first[shard] < 0 else first[shard]
        last[shard] = position
    open_at = [int(((first <= position) & (position <= last)).sum()) for position in range(len(shards))]
    assert max(open_at) <= 8


def test_a_canonical_node_has_the_same_samples_in_every_epoch() -> None:
    """The rows share the data set the same way in each epoch, with at most one shard cut at each bound."""
    sizes = np.random.default_rng(0).integers(1, 60, 40)
    num_samples = int(sizes.sum())
    of_epochs = []
    for epoch in range(3):
        order = epoch_order([sizes], epoch=epoch, shuffle=True, num_canonical_nodes=4)
        of_epochs.append([set(order.sample_ids(np.arange(row, num_samples, 4)).tolist()) for row in range(4)])
    assert of_epochs[0] == of_epochs[1] == of_epochs[2]
    shards = [set(np.searchsorted(np.cumsum(sizes), sorted(row), side="right").tolist()) for row in of_epochs[0]]
    assert sum(map(len, shards)) <= 40 + 3


def test_without_shuffle_samples_come_in_turn_from_each_canonical_node() -> None:
    """One canonical node reads from the first sample to the last; two read their halves side by side."""
    assert ids_of(epoch_order([[2, 3], [2]], epoch=0)) == list(range(7))
    assert ids_of(epoch_order([[2, 3], [2]], epoch=5, num_canonical_nodes=2)) == [0, 4, 1, 5, 2, 6, 3]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seed", -1),
        ("epoch", -1),
        ("block_size", 0),
        ("num_canonical_nodes", 0),
        ("sampling_method", "free"),
        ("sampling_granularity", 0),
    ],
)
def test_what_makes_no_order_is_refused(argument: str, value: object) -> None:
    """Every bad argument is refused with its name."""
    with pytest.raises(ValueError, match=argument):
        epoch_order([[3]], **{"epoch": 0, argument: value})  # type: ignore[arg-type]
