"""Orders and their deal to ranks: every sample once, a few shards at a time, whatever the world and its changes."""

from __future__ import annotations

import gc
import hashlib
import itertools
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.streaming.order import (
    EpochOrder,
    RemainingPositions,
    Weight,
    batched_deal,
    batched_order,
    epoch_order,
    normalised,
    shares_of_streams,
)
from lightning_faulttolerant.streaming.order.epoch import chosen_of_shards
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
    """Another epoch or another seed is another order; unshuffled, canonical nodes take turns; an end is a beginning."""
    seeds = ((0, 1), (1, 1), (0, 2), (1, 0), (0, 1))
    orders = [tuple(ids_of(epoch_order([[50] * 20], epoch=epoch, seed=seed, shuffle=True))) for epoch, seed in seeds]
    assert orders[0] == orders[4]
    assert len(set(orders)) == 4
    assert ids_of(epoch_order([[2, 3], [2]], epoch=0)) == list(range(7))
    assert ids_of(epoch_order([[2, 3], [2]], epoch=5, num_canonical_nodes=2)) == [0, 4, 1, 5, 2, 6, 3]
    drawn = ids_of(epoch_order([[50]], epoch=0, chosen=[20]))
    assert drawn == sorted(drawn)
    assert [normalised(3, position, num_positions=10) for position in (9, 10, 12)] == [(3, 9), (4, 0), (4, 0)]


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
        for method in METHODS
    ]
    sliced = np.array(ids_of(epoch_order(LARGE, epoch=1, seed=3, shuffle=True)), np.int64)
    drawn = [chosen_of_shards(np.full(5, 10), 2, granularity=1, draw=(1, 7), stream=0).tolist()]
    digest = hashlib.sha1(sliced.tobytes()).hexdigest()
    assert [str(ids_of(parts)), *map(str, map(ids_of, batched)), str(drawn), digest] == snapshot


def test_shards_are_read_block_by_block() -> None:
    """At any position the samples of one block are of at most eight shards, and a shard is never opened again."""
    sizes = np.random.default_rng(0).integers(1, 60, 100)
    shards = np.searchsorted(np.cumsum(sizes), ids_of(epoch_order([sizes], epoch=0, shuffle=True)), side="right")
    first = {shard: position for position, shard in reversed(list(enumerate(shards)))}
    last = {shard: position for position, shard in enumerate(shards)}
    opened = [sum(first[shard] <= position <= last[shard] for shard in first) for position in range(0, len(shards), 7)]
    assert max(opened) <= 8


def test_a_large_block_is_read_in_slices_of_all_its_shards() -> None:
    """Every sample comes once, from eight shards at a time, and each slice has a share of each of them."""
    ids = np.array(ids_of(epoch_order(LARGE, epoch=0, shuffle=True)))
    assert (np.bincount(ids) == 1).all()
    for slice_ in np.array_split(ids, 9):  # three blocks, in three slices each
        shards, counts = np.unique(slice_ // 40_000, return_counts=True)
        assert len(shards[counts > 9]) == 8
        assert counts[counts > 9].max() - counts[counts > 9].min() < 40


@pytest.mark.parametrize("position", [0, 900_000_000, 999_999_744])
def test_a_billion_samples_cost_a_list_of_shards_and_a_block(position: int) -> None:
    """Building the order and reading the first batch anywhere takes no memory that grows with the number of samples."""
    tracemalloc.start()
    try:
        order = epoch_order([[200_000] * 5_000], epoch=3, shuffle=True)
        ids = order.sample_ids(np.arange(position, position + 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(ids // 200_000)) <= 8
    assert peak < 10_000_000  # an array of all samples has 8 GB; one of the shards 40 kB, of a block 1 MB
    alive = weakref.ref(order)
    gc.disable()
    try:
        del order  # no reference cycle keeps the blocks of past epochs
        assert alive() is None
    finally:
        gc.enable()


def test_a_canonical_node_has_the_same_samples_in_every_epoch() -> None:
    """The rows share the data set the same way in each epoch, with at most one shard cut at each bound."""
    sizes = np.random.default_rng(0).integers(1, 60, 40)
    of_epochs = []
    for epoch in range(3):
        ids = ids_of(epoch_order([sizes], epoch=epoch, shuffle=True, num_canonical_nodes=4))
        of_epochs.append([set(ids[row::4]) for row in range(4)])
    assert of_epochs[0] == of_epochs[1] == of_epochs[2]
    shards = [set(np.searchsorted(np.cumsum(sizes), sorted(row), side="right").tolist()) for row in of_epochs[0]]
    assert sum(map(len, shards)) <= 40 + 3


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


@settings(max_examples=40)
@given(
    shuffle=st.booleans(),
    rows=st.integers(1, 5),
    is_equal=st.booleans(),
    parts=st.lists(st.tuples(worlds, st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_nothing_is_lost_however_often_the_world_changes_in_an_epoch(
    shuffle: bool, rows: int, is_equal: bool, parts: list[tuple[tuple[int, int, int], int, int]]
) -> None:
    """Every sample is read once, only the last step repeats some, and at an equal global batch steps are the same."""
    order = epoch_order([[13, 0, 22, 9, 17], [5, 30]], epoch=2, shuffle=shuffle, num_canonical_nodes=rows)
    whole = [set(np.ravel(of_ranks)) for of_ranks in steps(96, 0, (1, 1, 1), 36)]
    seen: list[int] = []
    start = 0
    for number, (world, batch_size, taken) in enumerate(parts):
        num_ranks = world[0] * world[1]
        batch_size = 36 // num_ranks if is_equal else batch_size
        read = steps(96, start, world, batch_size)
        full = (96 - start) // (num_ranks * batch_size)
        taken = len(read) if number == len(parts) - 1 else min(taken, full)
        for of_ranks in read[:taken]:
            found = {position for batch in of_ranks for position in batch}
            if is_equal and 36 % num_ranks == 0 and start < 72 and start % 36 == 0:
                assert found == whole[start // 36]
            seen += [position for batch in of_ranks for position in batch]
            start = min(start + num_ranks * batch_size, 96)
    assert set(order.sample_ids(np.array(seen, np.int64)).tolist()) == set(range(96))
    assert len(seen) - 96 < num_ranks


# Mixtures of streams

shards = st.lists(st.integers(1, 12), min_size=1, max_size=8)


WEIGHTS: dict[str, Callable[[float], Weight]] = {
    "choose": lambda number: Weight(choose=int(number * 10) + 1),
    "mixed": lambda number: Weight(repeat=number + 0.5) if number > 1 else Weight(),
    "proportion": lambda number: Weight(proportion=number + 0.5),
    "repeat": lambda number: Weight(repeat=number + 0.5),
    "": lambda number: Weight(),
}


@given(
    sizes=st.lists(shards, min_size=1, max_size=4),
    kind=st.sampled_from(sorted(WEIGHTS)),
    data=st.data(),
)
def test_a_mix_has_as_many_samples_of_each_stream_as_the_original(
    sizes: list[list[int]], kind: str, data: st.DataObject
) -> None:
    """The counts, proportions, and repeats of each stream are the original's."""
    drawn = data.draw(st.lists(st.floats(0, 3), min_size=len(sizes), max_size=len(sizes)))
    weights = [WEIGHTS[kind](number) for number in drawn]
    samples = [sum(of_stream) for of_stream in sizes]
    assume(any(int((weight.repeat or 1) * size) for weight, size in zip(weights, samples, strict=True)))
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
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    chosen=st.integers(1, 300),
    granularity=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_an_order_takes_of_each_shard_its_share(sizes: list[int], chosen: int, granularity: int, epoch: int) -> None:
    """Each shard comes whole as often as possible, then in proportion to its size, rounded to the grain of samples."""
    found = chosen_of_shards(np.array(sizes), chosen, granularity=granularity, draw=(1, epoch), stream=0)
    times, rest = divmod(chosen, sum(sizes))
    assert found.sum() == chosen
    parts = found - np.array(sizes) * times
    assert ((parts >= 0) & (parts <= sizes)).all()
    if granularity == 1:
        assert (abs(parts - np.array(sizes) * rest / sum(sizes)) < 1).all()


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


def test_which_samples_and_shards_are_drawn() -> None:
    """Each shard gets the extra sample as often as others, a grain keeps them few; "fixed" samples stay."""
    for shuffle, (method, is_same) in itertools.product((False, True), (("balanced", False), ("fixed", True))):
        options = {"shuffle": shuffle, "chosen": [40], "sampling_method": method}
        first, second = (set(ids_of(epoch_order([[40, 40]], epoch=epoch, **options))) for epoch in (0, 1))
        assert (first == second) is is_same
    found = [chosen_of_shards(np.full(5, 10), 2, granularity=1, draw=(1, epoch), stream=0) for epoch in range(200)]
    assert np.sum(found, axis=0).min() > 60  # 80 on average
    assert len({tuple(of_epoch.tolist()) for of_epoch in found}) == 10
    sizes = np.full(1000, 1000)
    for grain, num_shards in ((1, 1000), (100, 100)):
        assert (chosen_of_shards(sizes, 10_000, granularity=grain, draw=(0,), stream=0) > 0).sum() == num_shards


# Batches with a share of each stream, or of one stream only

SIZES = [[40, 35, 52], [60, 31], [97]]
NUM_SAMPLES = [sum(sizes) for sizes in SIZES]
METHODS = ["stratified", "per_stream"]


def batches_of(method: str, world: tuple[int, int], batch_size: int, *, start: int = 0, **asked: Any) -> np.ndarray:
    """Return the samples of each step of each rank from a position on: (ranks, steps, batch)."""
    nodes, ranks = world
    shares = shares_of_streams([Weight()] * 3, NUM_SAMPLES, seed=9176)
    asked = {"epoch": 1, "shuffle": True, "num_samples": nodes * ranks * batch_size, **asked}
    order = batched_order(SIZES, batching_method=method, shares=shares, **asked)
    of_ranks = []
    for rank in range(nodes * ranks):
        place = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks)
        deal = batched_deal(
            batching_method=method,
            num_positions=order.num_positions,
            start=start,
            world=place,
            batch_size=batch_size,
        )
        of_ranks.append([order.sample_ids(deal.positions(step)) for step in range(deal.num_steps)])
    return np.array(of_ranks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_global_batch_is_the_same_for_every_world(method: str, shuffle: bool) -> None:
    """The order depends on the global batch size alone, and every sample comes once or is left out."""
    alone, *others = (
        np.sort(batches_of(method, world, 24 // (world[0] * world[1]), shuffle=shuffle).swapaxes(0, 1).reshape(-1, 24))
        for world in [(1, 1), (2, 2), (3, 1), (1, 8)]
    )
    assert all(np.array_equal(alone, other) for other in others)
    assert len(np.unique(alone)) == alone.size
    assert len(alone) == 12


def test_a_stratified_batch_has_the_share_of_each_stream() -> None:
    """Each global batch has the share of each stream, and nearly so has each rank's batch."""
    streams = np.searchsorted(np.cumsum(NUM_SAMPLES), batches_of("stratified", (1, 4), 10), side="right")
    for stream, share in enumerate(np.array(NUM_SAMPLES) / sum(NUM_SAMPLES)):
        of_batches = (streams == stream).sum(2)
        assert (abs(of_batches.sum(0) - share * 40) < 1).all()
        assert (abs(of_batches - share * 10) < 2).all()


def test_a_batch_per_stream_is_of_one_stream_in_an_order_that_is_drawn() -> None:
    """Each global batch has one stream, the next ones have others, and another epoch has another order."""
    of_epochs = []
    for epoch in (0, 1):
        found = batches_of("per_stream", (1, 2), 8, epoch=epoch)
        streams = np.searchsorted(np.cumsum(NUM_SAMPLES), found, side="right")
        assert (streams == streams[:1, :, :1]).all()
        of_epochs.append(streams[0, :, 0].tolist())
    assert sorted(of_epochs[0]) == sorted(of_epochs[1]) == [0] * 7 + [1] * 5 + [2] * 6
    assert of_epochs[0] != of_epochs[1]
    assert of_epochs[0] != sorted(of_epochs[0])


@pytest.mark.parametrize(("method", "batch_size"), [("random", 1), ("stratified", 7), ("per_stream", 4)])
def test_every_sample_of_a_stream_that_is_read_in_part_comes(method: str, batch_size: int) -> None:
    """Over the epochs each sample is read, also without shuffle; no batch is left out here."""
    shares = shares_of_streams([Weight(choose=16), Weight(choose=12)], [40, 30], seed=1)
    found: set[int] = set()
    for epoch in range(40):
        options: dict[str, Any] = {"epoch": epoch, "seed": 1, "shuffle": False}
        if method == "random":
            order = epoch_order([[20, 20], [30]], chosen=shares.chosen, **options)
        else:
            options |= {"batching_method": method, "shares": shares, "num_samples": batch_size}
            order = batched_order([[20, 20], [30]], **options)
        found.update(ids_of(order))
    assert found - {-1} == set(range(70))


def shared(*weights: Weight, sizes: tuple[int, ...] = (5, 6), epoch_size: int | None = None) -> Any:
    """Ask for the shares of streams."""
    return shares_of_streams(list(weights), list(sizes), epoch_size=epoch_size, seed=0)


REFUSED: dict[str, Callable[[], Any]] = {
    "seed": lambda: epoch_order([[3]], epoch=0, seed=-1),
    "epoch": lambda: epoch_order([[3]], epoch=-1),
    "block_size": lambda: epoch_order([[3]], epoch=0, block_size=0),
    "num_canonical_nodes": lambda: epoch_order([[3]], epoch=0, num_canonical_nodes=0),
    "sampling_method": lambda: epoch_order([[3]], epoch=0, sampling_method="free"),
    "sampling_granularity": lambda: epoch_order([[3]], epoch=0, sampling_granularity=0),
    "a position after the end": lambda: steps(10, 11, (1, 1, 1), 1),
    "an empty batch": lambda: steps(10, 0, (1, 1, 1), 0),
    "one proportion": lambda: shared(Weight(proportion=1), Weight(repeat=2)),
    "an epoch's size with repeats": lambda: shared(Weight(repeat=1), Weight(), epoch_size=10),
    "nothing": lambda: shared(Weight(repeat=0), Weight(choose=0)),
    "proportions of nothing": lambda: shared(Weight(proportion=0), Weight(proportion=0)),
    "a negative epoch's size": lambda: shared(Weight(), Weight(), epoch_size=-1),
    "two weights": lambda: Weight(proportion=1, repeat=1),
    "a negative weight": lambda: Weight(choose=-1),
    "a stream without samples": lambda: shared(Weight(), Weight(), sizes=(3, 0)),
    "a batching method": lambda: batches_of("device_per_stream", (1, 1), 8),
    "a position in a batch": lambda: batches_of("stratified", (1, 2), 4, start=12),
    "a share without a sample": lambda: batches_of("stratified", (1, 1), 2),
    "a stream without a batch": lambda: batches_of("per_stream", (1, 1), 95),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_order_is_refused(case: str, snapshot: SnapshotAssertion) -> None:
    """The error names the argument or the streams, and what to change."""
    with pytest.raises(ValueError, match=r".") as caught:
        REFUSED[case]()
    assert str(caught.value) == snapshot
