from __future__ import annotations

import pickle
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import lightning_faulttolerant
from lightning_faulttolerant import (
    AdvancedTooFarError,
    FingerprintMismatchError,
    HasNotResetProgressError,
    InterruptibleDistributedGroupedBatchSampler,
)
from lightning_faulttolerant.samplers.order import SkipsIndices

Grouped = InterruptibleDistributedGroupedBatchSampler


def grouped(
    groups: Any = (0, 0, 0, 0, 0, 1, 2, 3, 4), batch_size: int = 4, ranks: int = 1, rank: int = 0, **arguments: Any
) -> Grouped:
    """Return a sampler of one rank, by default of the groups of 5, 1, 1, 1, 1 samples; the original loses three."""
    return Grouped(range(len(groups)), groups, batch_size, ranks, rank, **arguments)


def of_the_original(groups: list[int], batch_size: int, ranks: int, rank: int, epoch: int) -> list[list[int]]:
    """Return the full batches of one rank as the original forms them, sample by sample."""
    order: Any = DistributedSampler(range(len(groups)), ranks, rank, seed=0)
    order.set_epoch(epoch)
    buffers: dict[int, list[int]] = {}
    batches = []
    for index in order:
        buffer = buffers.setdefault(groups[index], [])
        buffer.append(index)
        if len(buffer) == batch_size:
            batches.append(buffers.pop(groups[index]))
    return batches


def test_full_batches_are_those_of_the_original() -> None:
    """With one rank, each epoch's full batches match the original's in content and order, and leftovers follow them."""
    groups = [i * i % 7 for i in range(60)]
    for epoch in range(3):
        sampler = grouped(groups)
        sampler.set_epoch(epoch)
        expected = of_the_original(groups, 4, 1, 0, epoch)
        assert list(sampler)[: len(expected)] == expected


def test_batches_are_of_one_group_and_the_same_on_all_ranks() -> None:
    """The ranks together have each batch once, plus as many as make their numbers equal."""
    groups = [i % 3 for i in range(50)]
    alone = list(grouped(groups))
    ranks = [list(grouped(groups, ranks=4, rank=rank)) for rank in range(4)]
    assert [batch for turn in zip(*ranks, strict=True) for batch in turn][: len(alone)] == alone
    assert all(len({groups[i] for i in batch}) == 1 for batch in alone)


def test_iter_from_gives_the_rest_of_iter() -> None:
    """From every position, the rest is what a full iteration yields after it."""
    sampler = grouped([i % 3 for i in range(50)], ranks=2, rank=1)
    assert isinstance(sampler, SkipsIndices)
    for skip in range(len(sampler) + 1):
        assert list(sampler.iter_from(skip)) == list(islice(iter(sampler), skip, None))


@st.composite
def cut_epochs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an epoch that is cut twice, and continued by other numbers of ranks and batch sizes."""
    length = draw(st.integers(1, 50))
    return {
        "groups": draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)),
        "worlds": draw(st.tuples(*[st.integers(1, 4)] * 3)),
        "batch_sizes": draw(st.tuples(*[st.sampled_from([1, 2, 4, 5])] * 3)),
        "batches": draw(st.tuples(*[st.integers(0, 4)] * 2)),
        "arguments": {
            "shuffle": draw(st.booleans()),
            "drop_last": draw(st.booleans()),
            "leftover": draw(st.sampled_from(["pad", "mixed", "drop"])),
            "order": draw(st.sampled_from(["torch", "feistel"])),
        },
    }


@settings(max_examples=200, deadline=None)
@given(cut_epochs())
def test_no_sample_is_lost_with_other_ranks_and_batch_sizes(case: dict[str, Any]) -> None:
    """However ranks and batch sizes change twice in an epoch, each sample comes; repeats fill a batch or last round."""
    groups, arguments = case["groups"], case["arguments"]
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for part, (ranks, size) in enumerate(zip(case["worlds"], case["batch_sizes"], strict=True)):
        states = []
        for rank in range(ranks):
            sampler = grouped(groups, size, ranks, rank, **arguments)
            if state is not None:
                sampler.load_state_dict(state)
                assert sampler.epoch == 1 or sampler.state_dict()["epoch"] == 0
            if sampler.epoch == 0:
                batches = list(islice(iter(sampler), case["batches"][part] if part < 2 else len(groups)))
                for batch in batches:
                    is_mixed = arguments["leftover"] == "mixed"
                    assert len(batch) == size or (is_mixed and not arguments["drop_last"])
                    assert is_mixed or len({groups[i] for i in batch}) == 1
                    seen.update(batch)
                sampler.advance(len(batches))
            states.append(sampler.state_dict())
        assert all(found == states[0] for found in states)
        state = states[0]
    lost = len(groups) - len(seen)
    most_ranks, most_size = max(case["worlds"]), max(case["batch_sizes"])
    if arguments["leftover"] != "drop" and not arguments["drop_last"]:
        assert lost == 0
    else:
        assert lost <= 5 * (most_size - 1) + (most_ranks - 1) * most_size
    if arguments["leftover"] != "pad":
        assert sum(seen.values()) - len(seen) <= (most_ranks - 1) * most_size


@settings(max_examples=60, deadline=None)
@given(cut_epochs())
def test_loading_gives_the_same_state(case: dict[str, Any]) -> None:
    """The state of a sampler that loaded one is that state, and its rest is that of the first sampler."""
    first = grouped(case["groups"], 2, 2, 1, **case["arguments"])
    first.advance(min(case["batches"][0], first.remaining()))
    again = grouped(case["groups"], 2, 2, 1, **case["arguments"])
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    assert list(again) == list(first)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_originals_state_continues_here(ranks: int) -> None:
    """The samples that its ranks consumed, in batches that each formed from its own part, do not come again."""
    groups = [i * i % 5 for i in range(48)]
    consumed: set[int] = set()
    for rank in range(ranks):
        batches = of_the_original(groups, 4, ranks, rank, 2)
        consumed |= {index for batch in batches[:2] for index in batch}
    rest: set[int] = set()
    for rank in range(ranks):
        sampler = grouped(groups, 4, ranks, rank, leftover="mixed")
        sampler.load_state_dict({"progress": 2, "epoch": 2})
        rest |= {index for batch in sampler for index in batch}
        again = grouped(groups, 4, ranks, rank, leftover="mixed")
        again.load_state_dict(sampler.state_dict())
        assert list(again) == list(sampler)
    assert consumed | rest == set(range(48))
    assert ranks == 3 or not consumed & rest  # 3 ranks pad the last round


def test_a_state_is_plain_and_small() -> None:
    """A state holds numbers, strings, and lists of them, also after two other batch sizes."""
    sampler = grouped([i % 5 for i in range(100)], 4)
    for size in (3, 2, 5):
        sampler.advance(2)
        state = sampler.state_dict()
        sampler = grouped([i % 5 for i in range(100)], size)
        sampler.load_state_dict(state)
    assert len(sampler.state_dict()["consumed_before"]) == 3
    assert len(pickle.dumps(sampler.state_dict())) < 1000
    assert len(pickle.dumps(sampler)) < 5000


def test_a_loader_takes_it_as_its_batch_sampler() -> None:
    """The documented loop runs, also with workers, and advance without a number counts one batch."""
    sampler = grouped([i % 3 for i in range(20)])
    loader = DataLoader(torch.arange(20), batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    with sampler.in_epoch(1):
        for batch in islice(loader, 3):
            assert len(batch) == 4
            sampler.advance()
        assert sampler.progress == 3
        assert len(list(sampler)) == len(sampler) - 3


def test_lightning_finds_set_epoch() -> None:
    """Lightning looks for it on a batch sampler's sampler."""
    loader = DataLoader(range(9), batch_sampler=grouped())  # type: ignore[arg-type]
    loader.batch_sampler.sampler.set_epoch(3)  # type: ignore[union-attr]
    assert loader.batch_sampler.epoch == 3  # type: ignore[union-attr]


def test_it_has_the_spelling_of_the_original_too() -> None:
    """Both spellings are one class."""
    assert lightning_faulttolerant.InterruptableDistributedGroupedBatchSampler is Grouped


# Faults of the original library that this one does not have.


def test_fault_len_and_load_fail_before_the_first_epoch() -> None:
    """A sampler has its length, and loads a state, as soon as it is created."""
    sampler = grouped()
    assert len(sampler) == sampler.num_batches == 6
    sampler.load_state_dict({"progress": 1, "epoch": 0})
    assert sampler.epoch == 0
    assert len(list(sampler)) == sampler.remaining() == 5


def test_fault_an_epoch_can_be_left_in_its_middle() -> None:
    """The guard against it works, and so does set_epoch."""
    sampler = grouped()
    sampler.set_epoch(1)
    sampler.advance()
    with pytest.raises(HasNotResetProgressError, match="at 1 of 6 batches"):
        sampler.set_epoch(2)
    with pytest.raises(HasNotResetProgressError), sampler.in_epoch(2):
        pass


@pytest.mark.parametrize(("leftover", "num_batches", "num_lost"), [("pad", 6, 0), ("mixed", 3, 0), ("drop", 1, 5)])
def test_fault_samples_left_over_of_small_groups_are_lost(leftover: Any, num_batches: int, num_lost: int) -> None:
    """Of groups of 5, 1, 1, 1, 1 samples, none is lost by default, and other treatments can be chosen."""
    sampler = grouped(leftover=leftover)
    batches = list(sampler)
    assert len(batches) == len(sampler) == num_batches
    assert 9 - len({index for batch in batches for index in batch}) == num_lost


def test_what_is_left_over_comes_in_order() -> None:
    """Mixed batches follow the epoch's order, and of the batches that are filled up, the fullest come first."""
    assert list(grouped((1, 0, 1, 0, 2), 3, shuffle=False, leftover="mixed")) == [[0, 1, 2], [3, 4]]
    assert list(grouped((0, 1, 1), 4, shuffle=False)) == [[1, 2, 1, 2], [0, 0, 0, 0]]


def test_drop_last_holds_for_batches_of_another_size_too() -> None:
    """The batches that are formed again from the rest are full."""
    groups = (0, 1, 2, 3, 0, 1, 2, 3, 4)
    saved = grouped(groups, 2, shuffle=False, leftover="mixed", drop_last=True)
    saved.advance(1)
    sampler = grouped(groups, 4, shuffle=False, leftover="mixed", drop_last=True)
    sampler.load_state_dict(saved.state_dict())
    assert list(sampler) == [[1, 2, 3, 5]]


def test_whoever_keeps_positions_keeps_what_other_batch_sizes_consumed() -> None:
    """The saved position is plain data, and a newly created sampler continues from it."""
    groups = [i % 3 for i in range(30)]
    saved = grouped(groups, 2)
    saved.advance(4)
    sampler = grouped(groups, 5)
    sampler.load_state_dict(saved.state_dict())
    again = grouped(groups, 5)
    again.load_progress_state(sampler.progress_state())
    assert list(again) == list(sampler)
    assert again.state_dict() == sampler.state_dict()


def test_fault_drop_last_keeps_batches_that_are_not_full() -> None:
    """With drop_last every batch is full of distinct samples, and the ranks have equally many batches."""
    groups = [i % 3 for i in range(32)]
    for rank in range(3):
        batches = list(grouped(groups, ranks=3, rank=rank, drop_last=True))
        assert len(batches) == 2
        assert all(len(set(batch)) == 4 for batch in batches)
    [mixed, *_] = list(grouped([0, 1, 2, 3, 4, 5], drop_last=True, leftover="mixed"))
    assert len(mixed) == 4


def test_fault_the_length_of_group_ids_is_not_looked_at() -> None:
    """Fewer or more groups than samples are refused immediately."""
    with pytest.raises(ValueError, match="group_ids has 2 entries, but the data set has 3"):
        Grouped(range(3), [0, 1], 2, 1, 0)


def test_fault_a_rejected_state_is_half_loaded() -> None:
    """A state that is refused leaves the sampler as it was."""
    sampler = grouped()
    sampler.advance(2)
    before = sampler.state_dict()
    for state in (
        {"progress": 4, "epoch": 3},
        {**before, "epoch": 3, "global_consumed": 7},
        {**before, "epoch": 3, "seed": 1},
        {**before, "epoch": 3, "kind": "distributed"},
    ):
        with pytest.raises((AdvancedTooFarError, FingerprintMismatchError, ValueError)):
            sampler.load_state_dict(state)
        assert sampler.state_dict() == before


def test_other_groups_are_refused_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    """Batches would hold other samples; with strict=False the position is kept, with a warning."""
    saved = grouped()
    saved.advance(2)
    sampler = grouped((0, 0, 0, 0, 1, 1, 2, 3, 4))
    with pytest.raises(FingerprintMismatchError, match=r"groups was '\w+' and is now '\w+'"):
        sampler.load_state_dict(saved.state_dict())
    sampler.load_state_dict(saved.state_dict(), strict=False)
    assert "groups was" in caplog.text
    assert sampler.progress == 2


def test_groups_may_be_anything_that_can_be_distinguished() -> None:
    """Strings, numbers, and tensors of them give the same batches."""
    expected = list(grouped([0, 1, 0, 1, 0], 2))
    assert list(grouped(["a", "b", "a", "b", "a"], 2)) == expected
    assert list(grouped(torch.tensor([7, 5, 7, 5, 7]), 2)) == expected


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"leftover": "keep"}, {"order": "random"}])
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any]) -> None:
    """An argument without a meaning is a ValueError of the constructor."""
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        grouped(**arguments)
