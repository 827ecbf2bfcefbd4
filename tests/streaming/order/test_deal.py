"""Each global step has the same samples for every world, no sample is lost, and only a few at the end repeat."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lightning_faulttolerant.streaming.order import RemainingPositions, normalised, positions_of_step
from lightning_faulttolerant.streaming.world import World

worlds = st.builds(
    lambda nodes, ranks, workers: (nodes, ranks, workers), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)
)


def deals(
    num_positions: int, start: int, world: tuple[int, int, int], batch_size: int
) -> list[list[RemainingPositions]]:
    """Return the deal of each worker of each rank."""
    nodes, ranks, workers = world
    return [
        [
            RemainingPositions(
                num_positions=num_positions,
                start=start,
                world=World(
                    rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks, worker=worker, num_workers=workers
                ),
                batch_size=batch_size,
            )
            for worker in range(workers)
        ]
        for rank in range(nodes * ranks)
    ]


def steps(num_positions: int, start: int, world: tuple[int, int, int], batch_size: int) -> list[list[list[int]]]:
    """Return the samples each rank reads in each step, from the worker whose turn it is."""
    of_ranks = []
    for of_workers in deals(num_positions, start, world, batch_size):
        read = [deal.positions_of_worker(0, 10**6) for deal in of_workers]
        total = of_workers[0].num_steps
        assert sum(map(len, read)) == total
        of_ranks.append([read[step % len(read)][step // len(read)].tolist() for step in range(total)])
    return [list(of_step) for of_step in zip(*of_ranks, strict=True)]


@given(
    num_positions=st.integers(1, 200), cut=st.floats(0, 1), world=worlds, batch_size=st.integers(1, 7), data=st.data()
)
def test_every_position_comes_in_its_step_and_the_last_step_is_filled_by_repeats(
    num_positions: int, cut: float, world: tuple[int, int, int], batch_size: int, data: st.DataObject
) -> None:
    """From any cut on, step t has the next positions, equally many for every rank, and fewer repeats than ranks."""
    start = int(cut * num_positions)
    num_ranks = world[0] * world[1]
    read = steps(num_positions, start, world, batch_size)
    of_step = num_ranks * batch_size
    for number, of_ranks in enumerate(read):
        assert len({len(batch) for batch in of_ranks}) == 1
        wanted = set(range(start + number * of_step, min(start + (number + 1) * of_step, num_positions)))
        found = [position for batch in of_ranks for position in batch]
        assert wanted <= set(found)
        if number < len(read) - 1:
            assert len(found) == len(wanted)
    everything = Counter(position for of_ranks in read for batch in of_ranks for position in batch)
    assert set(everything) == set(range(start, num_positions))
    assert sum(everything.values()) - len(everything) < num_ranks


@given(
    num_positions=st.integers(1, 200),
    first=worlds,
    second=worlds,
    third=worlds,
    cuts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_each_global_step_is_the_same_after_two_changes_of_the_world(
    num_positions: int,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    third: tuple[int, int, int],
    cuts: tuple[int, int],
) -> None:
    """At an equal global batch, in any world, a full step has the same samples as in the uninterrupted epoch."""
    of_step = 144  # a multiple of each number of ranks here
    whole = [
        set(np.ravel(of_ranks)) for of_ranks in steps(num_positions * 10, 0, first, of_step // (first[0] * first[1]))
    ]
    step = 0
    for world, taken in ((first, cuts[0]), (second, cuts[1]), (third, len(whole))):
        start = min(step * of_step, num_positions * 10)
        read = steps(num_positions * 10, start, world, of_step // (world[0] * world[1]))[:taken]
        for of_ranks in read:
            found = {position for batch in of_ranks for position in batch}
            assert found == whole[step] or step == len(whole) - 1
            step += 1
    assert step == len(whole)


@given(nodes=st.integers(1, 4), ranks=st.integers(1, 4), steps_done=st.integers(0, 5), batch_size=st.integers(1, 5))
def test_a_node_reads_the_rows_that_are_its_own_after_any_cut(
    nodes: int, ranks: int, steps_done: int, batch_size: int
) -> None:
    """After any number of consumed samples, a node gets the positions with its own number as the remainder."""
    start = steps_done * 7
    for rank in range(nodes * ranks):
        world = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks)
        read = positions_of_step(3, start=start, world=world, batch_size=batch_size)
        assert (read % nodes == rank // ranks).all()


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    """A state at or after the last position means the next epoch, with or without its repeats counted."""
    assert normalised(3, 9, num_positions=10) == (3, 9)
    assert normalised(3, 10, num_positions=10) == (4, 0)
    assert normalised(3, 12, num_positions=10) == (4, 0)


def test_a_position_after_the_end_is_refused() -> None:
    """A deal can't begin after the end, nor with empty batches."""
    with pytest.raises(ValueError, match="can't continue from position 11"):
        RemainingPositions(num_positions=10, start=11, world=World(), batch_size=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        RemainingPositions(num_positions=10, world=World(), batch_size=0)
