"""Orders and their deal to ranks: every sample once, a few shards at a time, whatever the world and its changes."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given, strategies as st
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.streaming.order.batching import RemainingPositions, batched_order
from lightning_faulttolerant.streaming.order.epoch import (
    EpochOrder,
    Weight,
    chosen_of_shards,
    epoch_order,
    shares_of_streams,
)
from lightning_faulttolerant.streaming.world import World
from tests.foreign import mosaic

some_sizes = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any), min_size=1, max_size=3)
worlds = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
"""Nodes, ranks of each, and workers of each rank."""


def ids_of(order: EpochOrder) -> list[int]:
    """Return the samples of the whole epoch."""
    return order.sample_ids(np.arange(order.num_positions)).tolist()


@given(
    sizes=some_sizes,
    shuffle=st.booleans(),
    rows=st.integers(1, 9),
    block_size=st.none() | st.integers(1, 50),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_every_sample_comes_once_in_every_epoch(
    sizes: list[list[int]], shuffle: bool, rows: int, block_size: int | None, epoch: int, data: st.DataObject
) -> None:
    """An epoch is a permutation of the data set, and what stands at a position depends on nothing asked before."""

    def order() -> EpochOrder:
        return epoch_order(sizes, epoch=epoch, shuffle=shuffle, num_canonical_nodes=rows, block_size=block_size)

    whole = ids_of(order())
    assert sorted(whole) == list(range(sum(map(sum, sizes))))
    asked = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30))
    assert order().sample_ids(np.array(asked, np.int64)).tolist() == [whole[position] for position in asked]


def test_an_order_is_that_of_its_seed_and_epoch() -> None:
    """Another epoch or another seed is another order; unshuffled, canonical nodes take turns."""
    seeds = ((0, 1), (1, 1), (0, 2), (1, 0), (0, 1))
    orders = [tuple(ids_of(epoch_order([[50] * 20], epoch=epoch, seed=seed, shuffle=True))) for epoch, seed in seeds]
    assert orders[0] == orders[4]
    assert len(set(orders)) == 4
    assert ids_of(epoch_order([[2, 3], [2]], epoch=0)) == list(range(7))
    assert ids_of(epoch_order([[2, 3], [2]], epoch=5, num_canonical_nodes=2)) == [0, 4, 1, 5, 2, 6, 3]


FIXED = [8, 12, 5, 13, 7, 10, 4, 11, 6, 2, 9, 1, 3, 0]
LARGE = [[40_000] * 24]
"""Blocks that are read in slices."""


def test_the_default_order_never_changes(snapshot: SnapshotAssertion) -> None:
    """A run that resumes with a later version of this package or of numpy must find the order it began with."""
    order = epoch_order([[3, 4, 2], [5]], epoch=1, seed=9176, shuffle=True, num_canonical_nodes=2, block_size=6)
    assert ids_of(order) == FIXED
    parts = epoch_order([[9, 5], [7]], epoch=1, seed=3, shuffle=True, chosen=[8, 10])
    batched = [
        batched_order(
            [[9, 5], [7]],
            epoch=1,
            shuffle=True,
            batching_method=method,
            shares=shares_of_streams([Weight()] * 2, [14, 7], seed=1),
            num_samples=3,
        )
        for method in ("stratified", "per_stream")
    ]
    sliced = np.array(ids_of(epoch_order(LARGE, epoch=1, seed=3, shuffle=True)), np.int64)
    drawn = [chosen_of_shards(np.full(5, 10), 2, granularity=1, draw=(1, 7), stream=0).tolist()]
    digest = hashlib.sha1(sliced.tobytes()).hexdigest()
    assert [str(ids_of(parts)), *map(str, map(ids_of, batched)), str(drawn), digest] == snapshot


def test_a_billion_samples_cost_a_list_of_shards_and_a_block() -> None:
    """Building the order and reading the first batch anywhere takes no memory that grows with the number of samples."""
    position = 999_999_744
    tracemalloc.start()
    try:
        order = epoch_order([[200_000] * 5_000], epoch=3, shuffle=True)
        ids = order.sample_ids(np.arange(position, position + 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(ids // 200_000)) <= 8
    assert peak < 10_000_000  # an array of all samples has 8 GB; one of the shards 40 kB, of a block 1 MB


# The deal of positions to ranks and their workers


def steps(num_positions: int, start: int, world: tuple[int, int, int], batch_size: int) -> list[list[list[int]]]:
    """Return the positions each rank reads in each step, from the worker whose turn it is."""
    nodes, ranks, workers = world
    of_ranks = []
    for rank in range(nodes * ranks):
        read = []
        for worker in range(workers):
            place = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks, worker=worker, num_workers=workers)
            deal = RemainingPositions(num_positions=num_positions, start=start, world=place, batch_size=batch_size)
            read.append(deal.positions_of_worker(0, 10**6))
        assert sum(map(len, read)) == deal.num_steps
        of_ranks.append([read[step % workers][step // workers].tolist() for step in range(deal.num_steps)])
    return [list(of_step) for of_step in zip(*of_ranks, strict=True)]


@given(num_positions=st.integers(1, 200), cut=st.floats(0, 1), world=worlds, batch_size=st.integers(1, 7))
def test_every_position_comes_in_its_step_and_the_last_step_is_filled_by_repeats(
    num_positions: int, cut: float, world: tuple[int, int, int], batch_size: int
) -> None:
    """From any cut on, step t has the next positions, equally many for every rank, and fewer repeats than ranks."""
    start, num_ranks = int(cut * num_positions), world[0] * world[1]
    read, of_step = steps(num_positions, start, world, batch_size), world[0] * world[1] * batch_size
    for number, of_ranks in enumerate(read):
        assert len({len(batch) for batch in of_ranks}) == 1
        wanted = range(start + number * of_step, min(start + (number + 1) * of_step, num_positions))
        found = [position for batch in of_ranks for position in batch]
        assert set(wanted) <= set(found)
        assert len(found) == len(wanted) or number == len(read) - 1
        if start % world[0] == 0 and number < len(read) - 1:  # a node reads the rows that are its own
            assert all(n % world[0] == rank // world[1] for rank, batch in enumerate(of_ranks) for n in batch)
    everything = Counter(position for of_ranks in read for batch in of_ranks for position in batch)
    assert set(everything) == set(range(start, num_positions))
    assert everything.total() - len(everything) < num_ranks


# Mixtures of streams

shards = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(
    samples=st.lists(st.integers(1, 96), min_size=1, max_size=4),
    kind=st.sampled_from(["proportion", "repeat", "choose", ""]),
    data=st.data(),
)
def test_a_mix_has_as_many_samples_of_each_stream_as_the_original(
    samples: list[int], kind: str, data: st.DataObject
) -> None:
    """The counts, proportions, and repeats of each stream are the original's."""
    numbers = st.integers(1, 30) if kind == "choose" else st.floats(1, 3)
    weights = [Weight(**({kind: data.draw(numbers)} if kind else {})) for _ in samples]
    epoch_size = data.draw(st.none() | st.integers(20, 99)) if kind in ("proportion", "") else None
    theirs = mosaic().Stream
    streams = [theirs(local="/no", proportion=w.proportion, repeat=w.repeat, choose=w.choose) for w in weights]
    num_samples = theirs.apply_weights(streams, np.array(samples), epoch_size, 7)
    shares = shares_of_streams(weights, samples, epoch_size=epoch_size, seed=7)
    assert shares.epoch_size == num_samples
    assert shares.chosen == tuple(stream.choose for stream in streams)
    assert shares.proportions == tuple(stream.proportion for stream in streams)
    assert shares.repeats == tuple(stream.repeat for stream in streams)


@given(
    sizes=st.lists(shards, min_size=1, max_size=3),
    shuffle=st.booleans(),
    method=st.sampled_from(["balanced", "fixed"]),
    rows=st.integers(1, 4),
    data=st.data(),
)
def test_an_order_reads_what_was_chosen(
    sizes: list[list[int]], shuffle: bool, method: str, rows: int, data: st.DataObject
) -> None:
    """Each stream comes as often as chosen, and each of its samples as often as any other, or once more."""
    numbers = st.lists(st.integers(0, 150), min_size=len(sizes), max_size=len(sizes)).filter(any)
    chosen = data.draw(numbers)
    options = {"shuffle": shuffle, "sampling_method": method, "num_canonical_nodes": rows}
    counts = Counter(ids_of(epoch_order(sizes, epoch=1, chosen=chosen, **options)))
    first = 0
    for of_stream, count in zip(sizes, chosen, strict=True):
        found = [counts[sample] for sample in range(first, first + sum(of_stream))]
        assert sum(found) == count
        assert max(found) - min(found) <= 1
        first += sum(of_stream)
