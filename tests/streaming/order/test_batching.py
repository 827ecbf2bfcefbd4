"""Batches with a share of each stream, or of one stream only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_faulttolerant.streaming.order import EpochOrder, Weight, batched_deal, batched_order, shares_of_streams
from lightning_faulttolerant.streaming.order.batching import portions
from lightning_faulttolerant.streaming.world import World

SIZES = [[40, 35, 52], [60, 31], [97]]
NUM_SAMPLES = [sum(sizes) for sizes in SIZES]
METHODS = ["stratified", "per_stream"]


def batches_of(
    method: str, world: tuple[int, int, int], batch_size: int, *, start: int = 0, weights: list[Weight], **asked: Any
) -> tuple[EpochOrder, np.ndarray]:
    """Return the order, and the samples of each step of each rank from a position on: (ranks, steps, batch)."""
    nodes, ranks, _ = world
    shares = shares_of_streams(weights, NUM_SAMPLES, seed=asked.get("seed", 9176))
    of_ranks = []
    for rank in range(nodes * ranks):
        place = World(rank=rank, num_ranks=nodes * ranks, ranks_per_node=ranks)
        order = batched_order(
            SIZES, batching_method=method, shares=shares, num_samples=nodes * ranks * batch_size, **asked
        )
        deal = batched_deal(
            batching_method=method,
            num_positions=order.num_positions,
            start=start,
            world=place,
            batch_size=batch_size,
        )
        of_ranks.append([order.sample_ids(deal.positions(step)) for step in range(deal.num_steps)])
    return order, np.array(of_ranks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_global_batch_is_the_same_for_every_world(method: str, shuffle: bool) -> None:
    """The default order depends on the global batch size alone, and every sample comes once or is left out."""
    weights = [Weight()] * 3
    of_worlds = [
        np.sort(batches_of(method, world, 24 // (world[0] * world[1]), weights=weights, epoch=1, shuffle=shuffle)[1]
                .transpose(1, 0, 2).reshape(-1, 24))
        for world in [(1, 1, 1), (2, 2, 1), (3, 1, 1), (1, 8, 1)]
    ]  # fmt: skip
    assert all(np.array_equal(of_worlds[0], of_world) for of_world in of_worlds)
    assert len(np.unique(of_worlds[0])) == of_worlds[0].size
    assert of_worlds[0].shape[0] == {"stratified": 12, "per_stream": 12}[method]


def test_a_stratified_batch_has_the_share_of_each_stream() -> None:
    """Each global batch has the share of each stream and, in the default order, nearly so has each rank's batch."""
    _, found = batches_of("stratified", (1, 4, 1), 10, weights=[Weight()] * 3, epoch=0, shuffle=True)
    streams = np.searchsorted(np.cumsum(NUM_SAMPLES), found, side="right")
    shares = np.array(NUM_SAMPLES) / sum(NUM_SAMPLES)
    for stream in range(3):
        of_batches = (streams == stream).sum(2)
        assert (abs(of_batches.sum(0) - shares[stream] * 40) < 1).all()
        assert (abs(of_batches - shares[stream] * 10) < 2).all()


def test_a_batch_per_stream_is_of_one_stream_in_an_order_that_is_drawn() -> None:
    """Each global batch has one stream, the next ones have others, and another epoch has another order."""
    of_epochs = []
    for epoch in (0, 1):
        _, found = batches_of("per_stream", (1, 2, 1), 8, weights=[Weight()] * 3, epoch=epoch, shuffle=True)
        streams = np.searchsorted(np.cumsum(NUM_SAMPLES), found, side="right")
        assert (streams == streams[:1, :, :1]).all()
        of_epochs.append(streams[0, :, 0].tolist())
    assert sorted(of_epochs[0]) == sorted(of_epochs[1]) == [0] * 7 + [1] * 5 + [2] * 6
    assert of_epochs[0] != of_epochs[1]
    assert of_epochs[0] != sorted(of_epochs[0])


def test_what_can_not_be_batched_is_refused() -> None:
    """An unknown method, a position in a batch, a share without a sample, and a stream without a batch are refused."""
    weights = [Weight()] * 3
    with pytest.raises(ValueError, match="batching_method must be one of random, stratified, per_stream"):
        batches_of("device_per_stream", (1, 1, 1), 8, weights=weights, epoch=0)
    with pytest.raises(ValueError, match="can't continue from sample 12"):
        batches_of("stratified", (1, 2, 1), 4, start=12, weights=weights, epoch=0)
    with pytest.raises(ValueError, match=r"Stream 2 is 1\.00% of the epoch"):
        portions([0.5, 0.49, 0.01], 8)
    with pytest.raises(ValueError, match="Stream 1 has 91 samples"):
        batches_of("per_stream", (1, 1, 1), 95, weights=weights, epoch=0)
