"""An epoch that continues on other ranks: each sample once, in the order of the permutation, on whatever rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lightning_faulttolerant import InterruptibleDistributedSampler
from lightning_faulttolerant.errors import FingerprintMismatchError, NotExactError
from lightning_faulttolerant.loader.remaining import GlobalOrder, ListedIndices, RankShare, RemainingBatches, Rest
from lightning_faulttolerant.loader.resized import state_for_others
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.samplers.order import RankPlace
from tests.loader.loops import follow, seed
from tests.loader.made import Noisy
from tests.state.objects.round_trips import through_a_file

Batches = list[list[list[float]]]


class Ranks:
    """The ranks of a loop, each with its own loader, as Lightning would create it."""

    def __init__(self, num_ranks: int, batch_size: int | None, *, length: int = 22, num_workers: int = 0) -> None:
        self.trackers: list[TrackedLoader] = []
        self.loaders: list[DataLoader[Any]] = []
        for rank in range(num_ranks):
            data = Noisy(length)
            sampler = DistributedSampler(data, num_ranks, rank, seed=5) if num_ranks > 1 else None
            loader = DataLoader(data, batch_size, sampler is None, sampler, num_workers=num_workers)
            tracker, copy = follow(loader, rank_place=RankPlace(rank=rank, num_replicas=num_ranks))
            self.trackers.append(tracker)
            self.loaders.append(copy)

    def resume(self, states: Sequence[Any], *, num_left: int | None = None) -> None:
        """Continue from the states of other ranks."""
        state = through_a_file(state_for_others(states, num_left=num_left))
        for tracker in self.trackers:
            tracker.load_state_dict(state)

    def run(self, num_batches: int | None = None) -> tuple[Batches, list[Any]]:
        """Return the samples that the ranks consume together, batch by batch, and the ranks' states afterwards."""
        consumed: Batches = []
        iterators = []
        for loader in self.loaders:
            seed(1)  # the same on all ranks; a sole rank draws its permutation from it
            iterators.append(iter(loader))
        first = self.trackers[0].iteration.num_out if self.trackers[0].iteration else 0
        for batches in itertools.islice(zip(*iterators, strict=True), num_batches):
            rows = [batch.reshape(-1, 2).tolist() for batch in batches]
            consumed.append([sample for samples in zip(*rows, strict=True) for sample in samples])
        states = [through_a_file(tracker.state_dict(first + len(consumed))) for tracker in self.trackers]
        return consumed, states


def indices(batches: Batches) -> list[int]:
    """Return only the indices."""
    return [int(sample[0]) for batch in batches for sample in batch]


@pytest.mark.parametrize(("way", "batch_size"), [((2, 1), None), ((1, 2), 2), ((2, 3, 1), 2), ((1, 3, 2), None)])
def test_every_sample_once_in_order(way: tuple[int, ...], batch_size: int | None) -> None:
    """However often the number of ranks changes in an epoch, the samples are the permutation, with few repeated."""
    for num_before in (1, 3):
        consumed, states = Ranks(way[0], batch_size).run(num_before)
        for place, num_ranks in enumerate(way[1:], 2):
            ranks = Ranks(num_ranks, batch_size)
            ranks.resume(states)
            more, states = ranks.run(None if place == len(way) else 1)
            consumed += more
        expected = indices(Ranks(way[0], 1).run()[0])[:22]
        found = indices(consumed)
        assert found[: len(expected)] == expected
        assert len(found) - len(expected) < way[-1]
        assert found[len(expected) :] == expected[: len(found) - len(expected)]


def test_new_workers_draw_again() -> None:
    """The workers of new ranks draw no number that any rank drew in this epoch, and the same numbers at each resume."""
    consumed, states = Ranks(1, 2, num_workers=2).run(3)
    found = []
    for _ in range(2):
        ranks = Ranks(2, 2, num_workers=2)
        ranks.resume(states)
        found.append(ranks.run()[0])
    assert found[0] == found[1]
    draws = [sample[1] for batch in consumed + found[0] for sample in batch]
    assert len(set(draws)) == len(draws)


def samples_of(order: GlobalOrder) -> list[int]:
    """Return the samples in an order."""
    return order.samples().at(torch.arange(order.length)).tolist()


@given(
    length=st.integers(1, 40),
    begin=st.integers(0, 40),
    num_ranks=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    cuts=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_ranks_shares_are_the_rest(
    length: int, begin: int, num_ranks: int, batch_size: int, drop_last: bool, cuts: bool
) -> None:
    """All ranks have equally many batches; together they are the rest, padded or cut to a round number as requested."""
    order = GlobalOrder(length=length, shuffles=True, seed=2)
    begin = min(begin, length)
    deals = [
        RemainingBatches(
            order=order,
            begin=begin,
            end=length,
            share=RankShare(rank=r, num_ranks=num_ranks, batch_size=batch_size, drop_last=drop_last, cuts=cuts),
        )
        for r in range(num_ranks)
    ]
    batches = [list(deal.batches()) for deal in deals]
    assert {len(own) for own in batches} == {deals[0].num_batches}
    assert deals[0].first_batch >= 0
    found = [index for batch in zip(*batches, strict=True) for row in zip(*batch, strict=True) for index in row]
    rest = samples_of(order)[begin:]
    if cuts or drop_last:
        assert found == rest[: len(found)] or (not cuts and found[: len(rest)] == rest)
        assert len(rest) - len(found) < num_ranks * batch_size
    else:
        assert found[: len(rest)] == rest
        assert 0 <= len(found) - len(rest) < num_ranks
    assert [batch for deal in deals for batch in deal.batches(skip=1)] == [b for own in batches for b in own[1:]]


def test_limited_batches_end_where_they_would_have() -> None:
    """With a limited number of batches, the new ranks consume the samples that the old ones would have consumed."""
    expected, _ = Ranks(2, 2).run(3)
    consumed, states = Ranks(2, 2).run(1)
    ranks = Ranks(1, 2)
    ranks.resume(states, num_left=2)
    assert indices(consumed + ranks.run()[0]) == indices(expected)


def test_other_data_is_refused() -> None:
    """The rest of an epoch is not dealt to a data set of another length."""
    _, states = Ranks(2, 2).run(1)
    with pytest.raises(FingerprintMismatchError, match="22"):
        Ranks(1, 2, length=20).resume(states)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"own": 1}, "keeps its own position"),
        ({"record": None, "iterable": {}, "consumed": 3}, "decides on each rank"),
        ({"record": None, "dataset": {}, "consumed": 3}, "keeps its own state"),
    ],
)
def test_a_position_of_one_rank_is_refused(state: dict[str, Any], reason: str) -> None:
    """A loader whose position is known only to one rank's state can't continue on a different number of ranks."""
    with pytest.raises(NotExactError, match=reason):
        state_for_others([state, state], num_left=None)


def test_a_seed_and_an_epoch_may_be_more_than_torch_takes() -> None:
    """Such values continue from 0, as in the sampler whose order it is."""
    beyond = GlobalOrder(length=9, shuffles=True, seed=2**64 + 3)
    assert samples_of(beyond) == samples_of(GlobalOrder(length=9, shuffles=True, seed=3))


# What is left of a loader after any ranks: with what they consumed, it is the whole loader, each sample once.


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 60), data=st.data())
def test_each_sample_once(length: int, data: st.DataObject) -> None:
    """Whatever each of several numbers of ranks has consumed, together with the rest it is each sample once."""
    rest, consumed = Rest(length=length), list[int]()
    for num_ranks in data.draw(st.lists(st.integers(1, 5), max_size=4)):
        own = [rest.of_rank(rank, num_ranks).tolist() for rank in range(num_ranks)]
        assert sorted(index for of_rank in own for index in of_rank) == rest.positions().tolist()
        assert max(map(len, own)) - min(map(len, own)) <= 1
        nums = [data.draw(st.integers(0, len(of_rank))) for of_rank in own]
        consumed += [index for of_rank, num in zip(own, nums, strict=True) for index in of_rank[:num]]
        rest = Rest(length=length, consumed=(*rest.consumed, tuple(nums)))
        assert sorted([*consumed, *rest.positions().tolist()]) == list(range(length))


@settings(max_examples=25, deadline=None)
@given(length=st.integers(0, 30), num_ranks=st.integers(1, 4), num=st.integers(0, 8))
def test_begin(length: int, num_ranks: int, num: int) -> None:
    """Ranks that are together have consumed the beginning of the order; those that are apart have consumed none."""
    num = min(num, length // num_ranks)
    assert Rest(length=length, consumed=((num,) * num_ranks,)).begin == num * num_ranks
    assert [Rest(length=6, consumed=(nums,)).begin for nums in ((2, 1), (2, 0), (3, 3))] == [3, None, 6]


def test_listed_indices() -> None:
    """The sampler yields its indices as numbers, each time, over the ends of its chunks; so does a computed order."""
    sampler = ListedIndices(Rest(length=40_000).of_rank(1, 2))
    assert list(sampler) == list(sampler) == list(range(1, 40_000, 2))
    assert len(sampler) == 20_000
    computed = list(InterruptibleDistributedSampler(40_000, 1, 0, seed=2, order="feistel"))
    order = GlobalOrder(length=40_000, shuffles=True, seed=2, epoch=0)
    share = RankShare(rank=1, num_ranks=2, batch_size=None)
    rest = RemainingBatches(order=order, begin=7, end=40_000, share=share)
    assert list(rest.batches()) == [*computed[8::2], computed[0]]
