"""Order and deal together: the samples of an epoch that the ranks of changing worlds read."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.streaming.order import EpochOrder, RemainingPositions, epoch_order
from lightning_faulttolerant.streaming.world import World

SIZES = [[13, 0, 22, 9, 17], [5, 30]]
NUM_SAMPLES = 96

worlds = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def read(order: EpochOrder, start: int, world: tuple[int, int, int], batch_size: int) -> list[list[list[int]]]:
    """Return the samples of each rank in each step from a position on."""
    nodes, ranks, workers = world
    steps: list[list[list[int]]] = []
    for rank in range(nodes * ranks):
        for worker in range(workers):
            place = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks, worker=worker, num_workers=workers)
            deal = RemainingPositions(
                num_positions=order.num_positions, start=start, world=place, batch_size=batch_size
            )
            for number, positions in enumerate(deal.positions_of_worker(0, 10**6)):
                step = worker + number * workers
                steps += [[] for _ in range(step + 1 - len(steps))]
                steps[step].append(order.sample_ids(positions).tolist())
    return steps


@given(
    shuffle=st.booleans(),
    rows=st.integers(1, 5),
    parts=st.lists(st.tuples(worlds, st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
@settings(max_examples=50)
def test_nothing_is_lost_however_often_world_and_batch_size_change_in_an_epoch(
    shuffle: bool, rows: int, parts: list[tuple[tuple[int, int, int], int, int]]
) -> None:
    """Every sample is read once; only the last step repeats some."""
    order = epoch_order(SIZES, epoch=2, shuffle=shuffle, num_canonical_nodes=rows)
    found: Counter[int] = Counter()
    start = 0
    for number, (world, batch_size, taken) in enumerate(parts):
        steps = read(order, start, world, batch_size)
        full = (order.num_positions - start) // (world[0] * world[1] * batch_size)
        taken = len(steps) if number == len(parts) - 1 else min(taken, full)
        found.update(sample for of_ranks in steps[:taken] for batch in of_ranks for sample in batch)
        start += taken * world[0] * world[1] * batch_size
    assert set(found) == set(range(NUM_SAMPLES))
    assert found.total() - NUM_SAMPLES < parts[-1][0][0] * parts[-1][0][1]


@pytest.mark.parametrize(("nodes", "rows"), [(2, 2), (2, 4), (4, 4), (3, 6)])
def test_a_node_needs_only_its_own_shards_in_every_epoch(nodes: int, rows: int) -> None:
    """Nodes share the shards among them, but for one at each bound of a canonical node, from any cut on."""
    sizes = np.full(48, 20)
    of_nodes: list[set[int]] = [set() for _ in range(nodes)]
    for epoch in range(3):
        order = epoch_order([sizes], epoch=epoch, shuffle=True, num_canonical_nodes=rows)
        for of_ranks in read(order, 7, (nodes, 2, 1), 5):
            for rank, batch in enumerate(of_ranks):
                of_nodes[rank // 2] |= {sample // 20 for sample in batch}
    assert sum(map(len, of_nodes)) <= 48 + rows - 1


@pytest.mark.parametrize("world", [(1, 1, 1), (1, 4, 2), (2, 2, 1)])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.9])
def test_a_start_or_a_resume_needs_the_shards_of_one_block_of_each_node(world: tuple[int, int, int], at: float) -> None:
    """The first global batch has samples of at most eight shards of each node, of sixteen where a block ends."""
    order = epoch_order([[500] * 64], epoch=1, shuffle=True, num_canonical_nodes=world[0])
    start = int(32_000 * at)
    first = read(order, start, world, 64)[0]
    shards = {sample // 500 for batch in first for sample in batch}
    assert len(shards) <= 8 * world[0]
