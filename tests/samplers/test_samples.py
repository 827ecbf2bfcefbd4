from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import lightning_faulttolerant
from lightning_faulttolerant import (
    HasNotResetProgressError,
    InterruptibleDistributedGroupedBatchSampler,
    InterruptibleDistributedSampler,
    InterruptibleSampler,
)
from lightning_faulttolerant.samplers.order import EpochPart, SequentialOrder, SkipsIndices, drawn_permutation
from tests.samplers.made import sampler_of


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_torch_is_that_of_torchs_sampler(shuffle: bool, drop_last: bool) -> None:
    """In every epoch, every rank gets exactly what torch's DistributedSampler gives it, and as many samples."""
    for length in (1, 2, 3, 7, 10, 2000):
        for ranks in (1, 2, 3, 4, 12):
            for rank in range(ranks):
                arguments = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "drop_last": drop_last, "seed": 5}
                ours = InterruptibleDistributedSampler(range(length), **arguments)
                theirs: Any = DistributedSampler(range(length), **arguments)
                for epoch in (0, 3):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    assert list(ours) == list(theirs)
                for name in ("num_samples", "total_size", "num_replicas", "rank", "epoch", "seed", "shuffle"):
                    assert getattr(ours, name) == getattr(theirs, name)
                assert len(ours) == len(theirs)


def test_it_is_a_distributed_sampler() -> None:
    """Lightning replaces samplers that aren't, and loaders skip its beginning by the protocol."""
    assert isinstance(sampler_of(), DistributedSampler)
    assert isinstance(sampler_of(), SkipsIndices)


@pytest.mark.parametrize("name", ["InterruptableDistributedSampler", "InterruptableSampler"])
def test_the_spelling_of_the_original_names_the_same_class(name: str) -> None:
    """Both spellings are one class."""
    other = getattr(lightning_faulttolerant, name.replace("ptable", "ptible"))
    assert getattr(lightning_faulttolerant, name) is other


@pytest.mark.parametrize("order", ["torch", "feistel"])
def test_iter_from_gives_the_rest_of_iter(order: Any) -> None:
    """From every position, over several chunks, the rest is what a full iteration yields after it."""
    sampler = sampler_of(5000, ranks=2, rank=1, order=order)
    for skip in (0, 1, 1023, 1024, 1025, 2499, 2500):
        assert list(sampler.iter_from(skip)) == list(islice(iter(sampler), skip, None))


@pytest.mark.parametrize("order", ["torch", "feistel"])
def test_no_global_generator_is_touched(order: Any) -> None:
    """Creating, iterating, and seeking draw no number from Python's or torch's generators."""
    before = random.getstate(), torch.get_rng_state()
    sampler = sampler_of(3000, order=order)
    list(sampler.iter_from(100))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


# The law of a resume: the samples consumed before it and those yielded after it are the epoch, each sample once.


@st.composite
def cut_epochs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an epoch that is cut twice, and continued by other numbers of ranks and batch sizes."""
    return {
        "length": draw(st.integers(1, 60)),
        "worlds": draw(st.tuples(*[st.integers(1, 6)] * 3)),
        "batch_sizes": draw(st.tuples(*[st.integers(1, 7)] * 3)),
        "batches": draw(st.tuples(*[st.integers(0, 5)] * 2)),
        "arguments": {
            "shuffle": draw(st.booleans()),
            "drop_last": draw(st.booleans()),
            "order": draw(st.sampled_from(["torch", "feistel"])),
            "seed": draw(st.integers(0, 3)),
        },
        "epoch": draw(st.integers(0, 2)),
    }


@settings(max_examples=250, deadline=None)
@given(cut_epochs())
def test_no_sample_is_lost_or_repeated_with_other_ranks_and_batch_sizes(case: dict[str, Any]) -> None:
    """However ranks and batch sizes change, twice in an epoch, each sample comes once, up to the last round."""
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    length, arguments = case["length"], case["arguments"]
    for part, (ranks, batch_size) in enumerate(zip(case["worlds"], case["batch_sizes"], strict=True)):
        samplers = [sampler_of(length, ranks=ranks, rank=rank, **arguments) for rank in range(ranks)]
        states = []
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(case["epoch"])
            else:
                sampler.load_state_dict(state)
            if sampler.epoch != case["epoch"]:  # the cut came at the end, or too few are left for these ranks
                states.append(sampler.state_dict())
                continue
            given = iter(sampler)
            for _ in range(case["batches"][part] if part < 2 else length):
                batch = list(islice(given, batch_size))
                seen.update(batch)
                if batch:
                    sampler.advance(batch_size if len(batch) < batch_size else len(batch))
            states.append(sampler.state_dict())
        assert all(found == states[0] for found in states)
        state = states[0]
    ranks = case["worlds"][-1]
    assert state is not None
    allowed = max(case["worlds"]) - 1
    assert sum(seen.values()) - len(seen) <= allowed
    assert length - len(seen) <= (allowed if arguments["drop_last"] else 0)
    if length >= max(case["worlds"]) or not arguments["drop_last"]:
        assert (state["epoch"], state["global_consumed"]) == (case["epoch"] + 1, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 12), st.booleans(), st.booleans())
def test_loading_gives_the_same_state(length: int, ranks: int, consumed: int, drop_last: bool, shuffle: bool) -> None:
    """The state of a sampler that loaded one is that state, and its rest is the rest of the first sampler."""
    first = sampler_of(length, ranks=ranks, rank=ranks - 1, drop_last=drop_last, shuffle=shuffle)
    first.advance(min(consumed, first.remaining()))
    again = sampler_of(length, ranks=ranks, rank=ranks - 1, drop_last=drop_last, shuffle=shuffle)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    assert list(again) == list(first)
    assert again.progress == first.progress


def test_a_state_is_plain_small_and_the_same_on_every_rank() -> None:
    """A state loads with weights_only=True, and is a copy."""
    states = []
    for rank in range(3):
        sampler = sampler_of(100, ranks=3, rank=rank)
        sampler.advance(7)
        states.append(sampler.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(pickle.dumps(states[0])) < 1000
    assert states[0]["global_consumed"] == 21
    kept = copy.deepcopy(states[0])
    states[0].clear()
    sampler_of(100, ranks=3).load_state_dict(kept)


def test_a_sampler_is_pickled_without_its_permutation() -> None:
    """A process that is started with it gets its position, and draws the order itself."""
    sampler = sampler_of(100_000)
    sampler.advance(99_990)
    expected = list(sampler)
    text = pickle.dumps(sampler)
    assert len(text) < 5000
    assert list(pickle.loads(text)) == expected


# Epochs


def test_an_epoch_that_is_under_way_can_not_be_left() -> None:
    """Another epoch is refused until this one is consumed, or its progress is reset; the same one continues."""
    sampler = sampler_of(10)
    sampler.advance(4)
    sampler.set_epoch(0)
    assert sampler.progress == 4
    with pytest.raises(HasNotResetProgressError, match="epoch 0 is in progress, at 4 of 10"):
        sampler.set_epoch(1)
    with pytest.raises(HasNotResetProgressError), sampler.in_epoch(1):
        pass
    sampler.advance(6)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.progress) == (1, 0)
    sampler.advance(4)
    sampler.reset_progress()
    assert (sampler.epoch, sampler.progress) == (1, 0)


def test_the_next_epoch_may_be_set_after_a_restored_one() -> None:
    """The next epoch may be set once the restored one is consumed, in loops that call set_epoch themselves."""
    sampler = sampler_of(10)
    sampler.load_state_dict({"progress": 4, "epoch": 0})
    sampler.set_epoch(0)
    sampler.advance(6)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.progress) == (1, 0)


def test_reset_progress_after_the_end_goes_to_the_next_epoch() -> None:
    """As the original's users do it, a state saved after it does not repeat the epoch."""
    sampler = sampler_of(10)
    sampler.advance(10)
    sampler.reset_progress()
    assert (sampler.epoch, sampler.progress) == (1, 0)


def test_a_loader_that_drops_its_last_batch_ends_its_epochs() -> None:
    """in_epoch ends each epoch; a state after the last full batch yields no batch, and continues with the next one."""
    sampler = sampler_of(10)
    loader = DataLoader(range(10), sampler=sampler, batch_size=4, drop_last=True)  # type: ignore[arg-type]
    states = []
    for epoch in range(2):
        with sampler.in_epoch(epoch):
            for _ in loader:
                sampler.advance(4)
                states.append(sampler.state_dict())
    assert [(state["epoch"], state["progress"]) for state in states] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    sampler.load_state_dict(states[1])
    counts = []
    for epoch in range(sampler.epoch, 2):
        with sampler.in_epoch(epoch):
            counts.append(len(list(loader)))
    assert counts == [0, 2]


def test_in_epoch_gives_up_the_rest_if_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """With strict=False this is logged."""
    sampler = sampler_of(10)
    sampler.advance(4)
    with sampler.in_epoch(1, strict=False):
        assert sampler.progress == 0
    assert "is discarded" in caplog.text


def test_an_exception_keeps_the_position() -> None:
    """The samples consumed before it can still be saved."""
    sampler = sampler_of(10)

    def fail() -> None:
        with sampler.in_epoch(1):
            sampler.advance(4)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (sampler.epoch, sampler.progress) == (1, 4)


def test_iterating_after_the_end_begins_the_next_epoch() -> None:
    """A loop without set_epoch goes through epochs 0, 1, 2 in their orders."""
    sampler, expected = sampler_of(10), sampler_of(10)
    for epoch in range(3):
        found = list(sampler)
        sampler.advance(len(found))
        expected.set_epoch(epoch)
        assert found == list(expected)


def test_no_samples_are_no_epochs_end() -> None:
    """An empty data set, or one too small for the ranks with drop_last, does not end one epoch after another."""
    for sampler in (sampler_of(0), sampler_of(2, ranks=3, drop_last=True)):
        assert list(sampler) == []
        assert sampler.state_dict()["epoch"] == 0


# Ranks


def test_ranks_are_asked_for_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that is created before the ranks are known still deals to them, also under Lightning's launcher."""
    sampler = InterruptibleDistributedSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "0")
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.advance(2)
    monkeypatch.delenv("WORLD_SIZE")
    assert sampler.global_consumed == 4
    assert (sampler.rank, sampler.num_replicas) == (1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 2, "num_replicas": 2},
        {"rank": -1, "num_replicas": 2},
        {"order": "random"},
        {"len_mode": "half"},
        {"on_world_size_change": "shrug"},
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any]) -> None:
    """An argument without a meaning is a ValueError of the constructor."""
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        InterruptibleDistributedSampler(range(10), **arguments)


def make_grouped(**arguments: Any) -> Any:
    """Return a batch sampler of two groups."""
    return InterruptibleDistributedGroupedBatchSampler(10, [0, 1] * 5, 2, 1, 0, **arguments)


@pytest.mark.parametrize("make", [sampler_of, lambda **arguments: InterruptibleSampler(10, **arguments), make_grouped])
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, None])
def test_a_seed_that_torch_does_not_take_is_refused_at_once(make: Any, seed: Any) -> None:
    """A seed that torch does not take would fail while iterating; the computed order takes any whole number."""
    with pytest.raises(ValueError, match=f"seed={seed}: .*{'an integer' if seed in (None, 1.5) else '2[*][*]64 - 1'}"):
        make(seed=seed)
    if isinstance(seed, int):
        assert len(list(make(seed=seed, order="feistel")))


@pytest.mark.parametrize("make", [sampler_of, lambda **arguments: InterruptibleSampler(10, **arguments), make_grouped])
def test_a_seed_at_the_limit_gives_every_epoch(make: Any) -> None:
    """Seed and epoch together may exceed torch's range; they continue from 0, as torch counts negative seeds."""
    for seed, same in ((2**64 - 1, -1), (-(2**63), 2**63)):
        ours, other = make(seed=seed), make(seed=same)
        for epoch in range(3):
            ours.set_epoch(epoch)
            other.set_epoch(epoch)
            assert list(ours) == list(other)


def test_a_seed_of_numpys_becomes_pythons() -> None:
    """A state holds plain values, which load with weights_only=True."""
    assert type(sampler_of(seed=np.int64(3)).state_dict()["seed"]) is int


# States of the original


def test_the_originals_state_continues_here() -> None:
    """The original's progress is that of this rank among the current number of ranks."""
    for rank in range(3):
        sampler = sampler_of(20, ranks=3, rank=rank)
        sampler.load_state_dict({"progress": 4, "epoch": 0})
        assert list(sampler) == list(sampler_of(20, ranks=3, rank=rank))[4:]
        assert sampler.state_dict()["progress"] == 4


def test_the_originals_order_of_later_epochs_is_announced() -> None:
    """A warning comes: the original's versions disagree on the order, and its state doesn't distinguish them."""
    sampler = sampler_of(20)
    with pytest.warns(UserWarning, match="order of epoch 0"):
        sampler.load_state_dict({"progress": 4, "epoch": 2})
    assert (sampler.epoch, sampler.progress) == (2, 4)
    sampler_of(20, shuffle=False).load_state_dict({"progress": 4, "epoch": 2})


# The sampler of one rank


def test_single_gives_torchs_order_and_continues() -> None:
    """Each epoch is that of a DistributedSampler of one rank, and a state continues in it, also one of the original."""
    sampler = InterruptibleSampler(range(10), seed=3)
    expected: Any = DistributedSampler(range(10), 1, 0, seed=3)
    expected.set_epoch(4)
    sampler.set_epoch(4)
    assert list(sampler) == list(expected)
    sampler.advance(3)
    for state in (sampler.state_dict(), {"progress": 3, "epoch": 4}):
        again = InterruptibleSampler(range(10), seed=3)
        again.load_state_dict(state)
        assert list(again) == list(expected)[3:]


def test_states_are_not_taken_from_one_kind_for_the_other() -> None:
    """One kind counts its own samples, the other those of all ranks."""
    with pytest.raises(ValueError, match="'single', but this one is 'distributed'"):
        sampler_of(10).load_state_dict(InterruptibleSampler(range(10)).state_dict())


def test_a_deal_is_padded_from_the_beginning_of_the_order() -> None:
    """If there are more ranks than samples, the samples repeat, as torch pads."""
    order = SequentialOrder(3)
    deals = [EpochPart(length=3, rank=rank, num_replicas=8, drop_last=False) for rank in range(8)]
    assert [order.at(deal.positions(0, deal.num_own)).tolist() for deal in deals] == [[i % 3] for i in range(8)]


@pytest.mark.parametrize("make", [sampler_of, make_grouped])
def test_nothing_is_no_state(make: Any) -> None:
    """The error names the value."""
    with pytest.raises(ValueError, match="This is not a state of a sampler: it is None"):
        make().load_state_dict(None)


@pytest.mark.parametrize("length", [0, 1, 2, 1000, 70_000])
def test_permutation_has_the_numbers_of_torch(length: int) -> None:
    """In half the memory, it has the numbers that torch's samplers draw, and the generator is where they leave it."""
    own, torchs = (torch.Generator().manual_seed(5) for _ in range(2))
    found = drawn_permutation(length, own)
    assert found.dtype == torch.int32
    assert found.tolist() == torch.randperm(length, generator=torchs).tolist()
    assert torch.equal(own.get_state(), torchs.get_state())
