"""Streams in proportion, repeated, or chosen: as many samples of each as in the original."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from lightning_faulttolerant.streaming.order import Weight, batched_order, epoch_order, shares_of_streams
from lightning_faulttolerant.streaming.order.epoch import chosen_of_shards
from tests.foreign import mosaic


def their_streams(weights: list[Weight], sizes: list[list[int]], epoch_size: int | None, seed: int) -> tuple[Any, int]:
    """Return the original's streams, with the weights that it derives, and its epoch size."""
    of_streams = mosaic().Stream
    streams = [
        of_streams(local="/nowhere", proportion=weight.proportion, repeat=weight.repeat, choose=weight.choose)
        for weight in weights
    ]
    samples = np.array([sum(of_stream) for of_stream in sizes])
    return streams, of_streams.apply_weights(streams, samples, epoch_size, seed)


shards = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def weights_of(kind: str, numbers: list[float]) -> list[Weight]:
    """Return one weight of a kind for each number."""
    if kind == "choose":
        return [Weight(choose=int(number * 10) + 1) for number in numbers]
    if kind == "mixed":
        return [Weight(repeat=number + 0.5) if number > 1 else Weight() for number in numbers]
    return [Weight(**{kind: number + 0.5}) for number in numbers]


@given(
    sizes=st.lists(shards, min_size=1, max_size=4),
    kind=st.sampled_from(["proportion", "repeat", "choose", "mixed"]),
    data=st.data(),
)
@settings(max_examples=150)
def test_a_mix_has_as_many_samples_of_each_stream_as_the_original(
    sizes: list[list[int]], kind: str, data: st.DataObject
) -> None:
    """The counts, proportions, and repeats of each stream are the original's."""
    weights = weights_of(kind, data.draw(st.lists(st.floats(0, 3), min_size=len(sizes), max_size=len(sizes))))
    assume(any(int((weight.repeat or 1) * sum(of_stream)) for weight, of_stream in zip(weights, sizes, strict=True)))
    epoch_size = data.draw(st.none() | st.integers(20, 99)) if kind == "proportion" else None
    streams, num_samples = their_streams(weights, sizes, epoch_size, 7)
    shares = shares_of_streams(weights, [sum(of_stream) for of_stream in sizes], epoch_size=epoch_size, seed=7)
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
def test_the_default_order_takes_of_each_shard_its_share(
    sizes: list[int], chosen: int, granularity: int, epoch: int
) -> None:
    """Each shard comes whole as often as possible, then in proportion to its size, rounded to the grain of samples."""
    found = chosen_of_shards(np.array(sizes), chosen, granularity=granularity, draw=(1, epoch), stream=0)
    times, rest = divmod(chosen, sum(sizes))
    assert found.sum() == chosen
    parts = found - np.array(sizes) * times
    assert (parts >= 0).all()
    assert (parts <= sizes).all()
    if granularity == 1:
        assert (abs(parts - np.array(sizes) * rest / sum(sizes)) < 1).all()


@given(
    sizes=st.lists(shards, min_size=1, max_size=3),
    shuffle=st.booleans(),
    method=st.sampled_from(["balanced", "fixed"]),
    rows=st.integers(1, 4),
    data=st.data(),
)
def test_the_default_order_reads_what_was_chosen(
    sizes: list[list[int]], shuffle: bool, method: str, rows: int, data: st.DataObject
) -> None:
    """Each stream comes as often as chosen, and each of its samples as often as any other, or once more."""
    chosen = data.draw(st.lists(st.integers(0, 150), min_size=len(sizes), max_size=len(sizes)).filter(any))
    order = epoch_order(
        sizes, epoch=1, shuffle=shuffle, chosen=chosen, sampling_method=method, num_canonical_nodes=rows
    )
    counts = Counter(order.sample_ids(np.arange(order.num_positions)).tolist())
    first = 0
    for of_stream, count in zip(sizes, chosen, strict=True):
        size = sum(of_stream)
        found = [counts[sample] for sample in range(first, first + size)]
        assert sum(found) == count
        assert max(found) - min(found) <= 1
        first += size


def read(epoch: int, *, shuffle: bool, method: str) -> set[int]:
    """Return half of a stream."""
    order = epoch_order([[40, 40]], epoch=epoch, shuffle=shuffle, chosen=[40], sampling_method=method)
    return set(order.sample_ids(np.arange(40)).tolist())


def test_a_part_of_a_stream_is_drawn_again_only_if_balanced() -> None:
    """Samples that are "balanced" differ in each epoch, with and without shuffle; "fixed" ones are the same."""
    for shuffle in (False, True):
        assert read(0, shuffle=shuffle, method="balanced") != read(1, shuffle=shuffle, method="balanced")
        assert read(0, shuffle=shuffle, method="fixed") == read(1, shuffle=shuffle, method="fixed")


@pytest.mark.parametrize(("batching_method", "batch_size"), [("random", 1), ("stratified", 7), ("per_stream", 4)])
def test_every_sample_of_a_stream_that_is_read_in_part_comes(batching_method: str, batch_size: int) -> None:
    """Over the epochs each sample is read, also without shuffle; no batch is left out here."""
    sizes, weights = [[20, 20], [30]], [Weight(choose=16), Weight(choose=12)]
    shares = shares_of_streams(weights, [40, 30], seed=1)
    settings = {"seed": 1, "shuffle": False}
    found: set[int] = set()
    for epoch in range(40):
        if batching_method == "random":
            order = epoch_order(sizes, epoch=epoch, chosen=shares.chosen, **settings)
        else:
            batching = {"batching_method": batching_method, "shares": shares, "num_samples": batch_size}
            order = batched_order(sizes, epoch=epoch, **batching, **settings)
        found.update(order.sample_ids(np.arange(order.num_positions)).tolist())
    assert found - {-1} == set(range(70))


def test_which_shards_have_a_sample_more_is_drawn() -> None:
    """Over the epochs each shard gets the extra sample as often as the others, and an epoch's draw never changes."""
    found = [chosen_of_shards(np.full(5, 10), 2, granularity=1, draw=(1, epoch), stream=0) for epoch in range(200)]
    assert found[7].tolist() == SHARES
    times = np.sum(found, axis=0)
    assert times.min() > 60  # 80 on average
    pairs = Counter(tuple(np.flatnonzero(of_shard).tolist()) for of_shard in found)
    assert len(pairs) == 10


SHARES = [1, 0, 1, 0, 0]


def test_a_grain_keeps_the_number_of_shards_small() -> None:
    """A hundredth of the stream, a hundred samples at a time, comes from a hundred shards, not from all."""
    sizes = np.full(1000, 1000)
    fine = chosen_of_shards(sizes, 10_000, granularity=1, draw=(0,), stream=0)
    coarse = chosen_of_shards(sizes, 10_000, granularity=100, draw=(0,), stream=0)
    assert (fine > 0).sum() == 1000
    assert (coarse > 0).sum() == 100


@pytest.mark.parametrize(
    ("weights", "epoch_size", "message"),
    [
        ([Weight(proportion=1), Weight(repeat=2)], None, "stream 1 has none"),
        ([Weight(repeat=1), Weight()], 10, "epoch_size is 10, but repeat and choose"),
        ([Weight(repeat=0), Weight(choose=0)], None, "The epoch is empty"),
        ([Weight(proportion=0), Weight(proportion=0)], None, "The proportions of all streams are 0"),
        ([Weight(), Weight()], -1, "epoch_size must be at least 0"),
    ],
)
def test_weights_that_do_not_go_together_are_refused(
    weights: list[Weight], epoch_size: int | None, message: str
) -> None:
    """The error says which streams, and what to change."""
    with pytest.raises(ValueError, match=message):
        shares_of_streams(weights, [5, 6], epoch_size=epoch_size, seed=0)


def test_a_weight_is_one_of_three() -> None:
    """Two weights at once contradict each other, none is negative, and a stream has samples."""
    with pytest.raises(ValueError, match="at most one"):
        Weight(proportion=1, repeat=1)
    with pytest.raises(ValueError, match="choose of a stream must be at least 0"):
        Weight(choose=-1)
    with pytest.raises(ValueError, match="Stream 1 has no samples"):
        shares_of_streams([Weight(), Weight()], [3, 0], seed=0)


def test_an_epoch_size_without_weights_takes_of_each_stream_in_proportion_to_its_size() -> None:
    """The number of samples of each stream is the original's, remainders included."""
    streams, num_samples = their_streams([Weight()] * 3, [[3], [5], [9]], 100, 4)
    shares = shares_of_streams([Weight()] * 3, [3, 5, 9], epoch_size=100, seed=4)
    assert (shares.chosen, shares.epoch_size) == (tuple(stream.choose for stream in streams), num_samples)
