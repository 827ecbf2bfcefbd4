"""The orders of the original library match those that the original library itself computes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from lightning_faulttolerant.streaming.order import RemainingPositions, epoch_order, kept_nodes
from lightning_faulttolerant.streaming.order.originals import (
    SHUFFLES,
    default_block_size,
    default_canonical_nodes,
    shuffled,
)
from lightning_faulttolerant.streaming.order.shuffles import EvenRows, PaddedRows
from lightning_faulttolerant.streaming.world import World
from tests.foreign import mosaic

sizes_of_shards = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence the original's warnings of few samples and small blocks, which are not the subject here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def theirs(
    num_samples: int, rows: int, world: tuple[int, int, int], batch_size: int, drop: int, **more: int
) -> np.ndarray:
    """Return the original's plan: (nodes, ranks, workers, batches, batch), -1 where it is padded."""
    with silent():
        plan: np.ndarray = mosaic("streaming.base.partition").get_partitions(
            "relaxed" if more else "orig", num_samples, rows, *world, batch_size, drop, **more
        )
    return plan


def ours(
    num_samples: int, rows: int, world: tuple[int, int, int], batch_size: int, drop: int, initial: int | None = None
) -> np.ndarray:
    """Return our plan in the same shape."""
    nodes, ranks, workers = world
    layout = PaddedRows(num_samples=num_samples, num_rows=rows, num_nodes=initial or nodes)
    of_readers = []
    for rank in range(nodes * ranks):
        for worker in range(workers):
            place = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks, worker=worker, num_workers=workers)
            deal = RemainingPositions(
                num_positions=layout.num_positions,
                start=drop,
                world=place,
                batch_size=batch_size,
                initial_nodes=initial,
            )
            batches = deal.positions_of_worker(0, 10**6)
            num_batches = -(-deal.num_steps // workers)
            plan = np.full((num_batches, batch_size), -1)
            for number, batch in enumerate(batches):
                plan[number, : len(batch)] = layout.places(batch)
            of_readers.append(plan)
    return np.stack(of_readers).reshape(nodes, ranks, workers, -1, batch_size)


@given(
    num_samples=st.integers(1, 120),
    rows=st.integers(1, 9),
    world=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3)),
    batch_size=st.integers(1, 5),
    cut=st.floats(0, 1),
)
@settings(max_examples=400)
def test_a_plan_is_that_of_the_original_with_its_repeats_and_padding(
    num_samples: int, rows: int, world: tuple[int, int, int], batch_size: int, cut: float
) -> None:
    """Each batch of each worker of each rank is the original's, from any position where it can resume."""
    nodes = world[0]
    assume(rows % nodes == 0 or nodes % rows == 0)
    drop = int(cut * num_samples) // nodes * nodes
    found = ours(num_samples, rows, world, batch_size, drop)
    if rows < nodes and num_samples // rows < 2 * (nodes // rows):
        assert set(found.ravel()) >= set(range(num_samples)) or drop  # rows shorter than the padding: there it fails
    else:
        assert (found == theirs(num_samples, rows, world, batch_size, drop)).all()


@pytest.mark.parametrize(
    ("num_samples", "rows", "world"),
    [(2, 2, (4, 1, 1)), (4, 4, (4, 2, 1)), (3, 6, (2, 2, 1)), (1, 4, (2, 2, 2)), (3, 3, (1, 5, 1)), (8, 2, (4, 3, 2))],
)
def test_too_few_samples_are_repeated_as_by_the_original(
    num_samples: int, rows: int, world: tuple[int, int, int]
) -> None:
    """With no more samples than canonical nodes, or fewer than ranks, each rank has the original's samples."""
    assert (ours(num_samples, rows, world, 2, 0) == theirs(num_samples, rows, world, 2, 0)).all()


@pytest.mark.parametrize(
    ("rows", "initial", "world", "batch_size"),
    [(2, 2, (3, 2, 2), 4), (4, 4, (3, 1, 1), 8), (1, 4, (1, 2, 3), 8), (6, 2, (4, 1, 2), 6), (3, 3, (2, 2, 1), 3)],
)
def test_another_number_of_nodes_keeps_the_order_inside_a_global_batch_as_the_original_does(
    rows: int, initial: int, world: tuple[int, int, int], batch_size: int
) -> None:
    """A run of the original that continues with other nodes reads every full step as there, sample by sample."""
    num_samples, num_ranks = 397, world[0] * world[1]
    of_step = num_ranks * batch_size
    for drop in (0, 3 * of_step, 5 * of_step):
        kept = kept_nodes(num_canonical_nodes=rows, num_nodes=world[0], initial_nodes=initial)
        wanted = theirs(num_samples, rows, world, batch_size, drop, initial_physical_nodes=initial)
        found = ours(num_samples, rows, world, batch_size, drop, kept)
        full = (num_samples - drop) // of_step // world[2]
        assert full > 0
        assert (found[:, :, :, :full] == wanted[:, :, :, :full]).all()
        assert set(found.ravel()) == set(wanted.ravel())


@pytest.mark.parametrize(
    ("rows", "nodes", "initial", "kept"),
    [(2, 3, 2, 2), (4, 2, 4, None), (2, 4, 2, None), (2, 3, None, None), (3, 3, 1, None)],
)
def test_nodes_are_kept_only_where_they_do_not_divide(
    rows: int, nodes: int, initial: int | None, kept: int | None
) -> None:
    """If the canonical nodes divide over the nodes, or the reverse, the closed form holds."""
    assert kept_nodes(num_canonical_nodes=rows, num_nodes=nodes, initial_nodes=initial) == kept


@pytest.mark.parametrize("algorithm", sorted(SHUFFLES))
@given(
    sizes=sizes_of_shards,
    rows=st.integers(1, 9),
    seed=st.integers(0, 2**60),
    epoch=st.integers(0, 5),
    block_size=st.integers(4, 200),
)
@settings(max_examples=60)
def test_a_shuffle_is_that_of_the_original(
    algorithm: str, sizes: list[int], rows: int, seed: int, epoch: int, block_size: int
) -> None:
    """A shuffle matches bit for bit, for any shards, canonical nodes, seed, epoch, and block size."""
    assume(algorithm != "py1e" or sum(sizes) >= rows)
    asked = {"num_canonical_nodes": rows, "seed": seed, "epoch": epoch, "block_size": block_size}
    with silent():
        wanted = mosaic("streaming.base.shuffle").get_shuffle(algorithm, np.array(sizes), **asked)
    assert shuffled(algorithm, np.array(sizes), **asked).tolist() == wanted.tolist()  # type: ignore[arg-type]


def test_py1e_refuses_more_canonical_nodes_than_samples_as_the_original_does() -> None:
    """py1e moves samples inside each canonical node, so a node without a sample is an error."""
    with pytest.raises(ValueError, match="samples assigned to a canonical node is 0"):
        mosaic("streaming.base.shuffle").get_shuffle("py1e", np.array([2]), 3, 0, 0)
    with pytest.raises(ValueError, match="smaller num_canonical_nodes"):
        epoch_order([[2]], epoch=0, shuffle=True, algorithm="py1e", num_canonical_nodes=3)


@pytest.mark.parametrize("algorithm", sorted(SHUFFLES))
@pytest.mark.parametrize("rows", [1, 3])
def test_an_epoch_is_the_shuffle_laid_out_in_rows(algorithm: str, rows: int) -> None:
    """Without a block size, the original's own is used, computed from the number of canonical nodes."""
    sizes = np.array([7, 5, 9, 1, 8])
    order = epoch_order([sizes[:2], sizes[2:]], epoch=2, shuffle=True, algorithm=algorithm, num_canonical_nodes=rows)
    shuffle = mosaic("streaming.base.shuffle").get_shuffle(
        algorithm, sizes, rows, 9176, 2, max(4_000_000 // rows, 1 << 18)
    )
    wanted = shuffle[theirs(30, rows, (1, 1, 1), 1, 0).ravel()]
    assert order.sample_ids(np.arange(order.num_positions)).tolist() == wanted.tolist()


def test_without_shuffle_the_name_of_an_algorithm_asks_for_the_repeats_of_the_original() -> None:
    """In rows of 4 and 3 samples, the original reads the last one of the shorter row twice, the default once."""
    repeating = epoch_order([[4, 3]], epoch=0, algorithm="py1e", num_canonical_nodes=2)
    assert repeating.sample_ids(np.arange(repeating.num_positions)).tolist() == [0, 3, 1, 4, 2, 5, 2, 6]
    once = epoch_order([[4, 3]], epoch=0, num_canonical_nodes=2)
    assert once.sample_ids(np.arange(once.num_positions)).tolist() == [0, 3, 1, 4, 2, 5, 6]


@given(num_samples=st.integers(1, 200), rows=st.integers(1, 20))
def test_the_order_without_shuffle_is_that_of_the_original_but_for_its_repeats(num_samples: int, rows: int) -> None:
    """All columns but the last are the same, so a state of the original continues with the same sample."""
    even, padded = EvenRows(num_samples=num_samples, num_rows=rows), PaddedRows(num_samples=num_samples, num_rows=rows)
    whole = np.arange(num_samples // rows * rows)
    assert (even.places(whole) == padded.places(whole)).all() or num_samples < rows
    assert sorted(even.places(np.arange(num_samples))) == list(range(num_samples))


def test_defaults_are_those_of_the_original() -> None:
    """64 canonical nodes per node for py1s and py2s, else one; blocks of 4,000,000 samples over them, or 262,144."""
    assert [default_canonical_nodes(name, 3) for name in ("py1s", "py2s", "py1e", "naive", None)] == [192, 192, 3, 3, 3]
    assert [default_block_size(rows) for rows in (1, 10, 64)] == [4_000_000, 400_000, 262_144]
