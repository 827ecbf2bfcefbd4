"""The law of a resume: the samples consumed before it and those yielded after it are the epoch, each sample once."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import DataLoader, DistributedSampler

import lightning_faulttolerant
from lightning_faulttolerant import (
    AdvancedTooFarError,
    FingerprintMismatchError,
    HasNotResetProgressError,
    InterruptibleDistributedGroupedBatchSampler,
    InterruptibleDistributedSampler,
    InterruptibleSampler,
)

SMALL_GROUPS = (0, 0, 0, 0, 0, 1, 2, 3, 4)
"""5, 1, 1, 1, 1 samples: the original loses three."""


def of_ranks(length: int = 10, *, ranks: int = 1, rank: int = 0, **arguments: Any) -> InterruptibleDistributedSampler:
    """Return a sampler of one rank."""
    return InterruptibleDistributedSampler(range(length), ranks, rank, **arguments)


def single(length: int = 10, **arguments: Any) -> InterruptibleSampler:
    """Return the sampler of a run with one rank."""
    return InterruptibleSampler(range(length), **arguments)


def grouped(
    groups: Any = SMALL_GROUPS, batch_size: int = 4, ranks: int = 1, rank: int = 0, **arguments: Any
) -> InterruptibleDistributedGroupedBatchSampler:
    """Return a batch sampler of one rank."""
    groups_of = InterruptibleDistributedGroupedBatchSampler
    return groups_of(range(len(groups)), groups, batch_size, ranks, rank, **arguments)


def advanced(sampler: Any, number: int) -> Any:
    """Return the sampler, some samples or batches later."""
    sampler.advance(number)
    return sampler


def loaded(sampler: Any, state: Any, **arguments: Any) -> Any:
    """Return the sampler, with a state."""
    sampler.load_state_dict(state, **arguments)
    return sampler


worlds = st.tuples(*[st.integers(1, 5)] * 3)
orders = st.fixed_dictionaries(
    {"shuffle": st.booleans(), "drop_last": st.booleans(), "order": st.sampled_from(["torch", "feistel"])}
)
cuts = st.tuples(*[st.integers(0, 5)] * 2)


def consumed(make: Callable[..., Any], counts: tuple[int, ...], world: tuple[int, ...], epoch: int) -> list[list[Any]]:
    """Return what each part of an epoch yields, cut after so many advances, and check that the ranks' states agree."""
    parts: list[list[Any]] = []
    state: dict[str, Any] | None = None
    for part, ranks in enumerate(world):
        parts.append([])
        states = []
        for rank in range(ranks):
            sampler = make(part, ranks, rank)
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
            if sampler.epoch == epoch:  # otherwise the cut came at the end, or too few are left for these ranks
                given = list(islice(iter(sampler), counts[part] if part < 2 else None))
                parts[-1] += given
                sampler.advance(len(given))
            states.append(sampler.state_dict())
        assert all(found == states[0] for found in states)
        state = states[0]
    return parts


@settings(max_examples=60)
@given(st.integers(1, 60), worlds, cuts, orders, st.integers(0, 2), st.integers(0, 3))
def test_no_sample_is_lost_or_repeated_with_other_ranks(
    length: int, world: tuple[int, ...], cut: tuple[int, ...], order: dict[str, Any], epoch: int, seed: int
) -> None:
    """However the number of ranks changes, twice in an epoch, each sample comes once, up to the last round."""

    def make(part: int, ranks: int, rank: int) -> Any:
        return of_ranks(length, ranks=ranks, rank=rank, seed=seed, **order)

    seen = Counter(sample for part in consumed(make, cut, world, epoch) for sample in part)
    most = max(world) - 1
    assert seen.total() - len(seen) <= most
    assert length - len(seen) <= (most if order["drop_last"] else 0)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=50),
    st.tuples(*[st.sampled_from([1, 2, 4, 5])] * 3),
    worlds,
    cuts,
    orders,
    st.sampled_from(["pad", "mixed", "drop"]),
)
def test_no_sample_of_a_group_is_lost_with_other_ranks_and_batch_sizes(
    groups: list[int],
    sizes: tuple[int, ...],
    world: tuple[int, ...],
    cut: tuple[int, ...],
    order: dict[str, Any],
    leftover: str,
) -> None:
    """Batches are of one group or mixed as asked, each sample comes, and repeats only fill a batch or last round."""

    def make(part: int, ranks: int, rank: int) -> Any:
        return grouped(groups, sizes[part], ranks, rank, leftover=leftover, **order)

    seen: Counter[int] = Counter()
    for size, part in zip(sizes, consumed(make, cut, world, 0), strict=True):
        for batch in part:
            assert len(batch) == size or (leftover == "mixed" and not order["drop_last"])
            assert leftover == "mixed" or len({groups[i] for i in batch}) == 1
            seen.update(batch)
    lost, most_size = len(groups) - len(seen), max(sizes)
    is_whole = leftover != "drop" and not order["drop_last"]
    assert lost <= (0 if is_whole else 5 * (most_size - 1) + (max(world) - 1) * most_size)
    assert leftover == "pad" or seen.total() - len(seen) <= (max(world) - 1) * most_size


KINDS: dict[str, Callable[[], Any]] = {
    "ranks": lambda: of_ranks(5000, ranks=2, rank=1),
    "ranks, computed": lambda: of_ranks(5000, ranks=2, rank=1, order="feistel"),
    "single": lambda: single(100, seed=3),
    "grouped": lambda: grouped([i % 3 for i in range(50)], ranks=2, rank=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_an_epoch_is_that_of_the_whole(kind: str) -> None:
    """From any position, the rest is what a full iteration yields after it, also if loaded from a small state."""
    sampler = KINDS[kind]()
    whole = list(sampler)
    for skip in {0, 1, 3, min(1023, len(whole)), min(1024, len(whole)), len(whole) - 1, len(whole)}:
        assert list(sampler.iter_from(skip)) == whole[skip:]
        if skip < len(whole):
            saved = advanced(KINDS[kind](), skip)
            state = saved.state_dict()
            again = loaded(KINDS[kind](), state)
            assert list(again) == list(saved) == list(pickle.loads(pickle.dumps(saved))) == whole[skip:]
            assert again.progress == skip
            assert len(pickle.dumps(state)) < 1000
            assert len(pickle.dumps(saved)) < 5000  # no permutation
            assert again.state_dict() == state
    assert type(of_ranks(seed=np.int64(3)).state_dict()["seed"]) is int


def test_a_state_after_other_batch_sizes_continues_from_plain_progress() -> None:
    """It lists what each size consumed, and `progress_state` is enough to continue."""
    groups = [i % 5 for i in range(100)]
    sampler = loaded(grouped(groups, 3), advanced(grouped(groups, 4), 2).state_dict())
    assert len(sampler.state_dict()["consumed_before"]) == 1
    again = grouped(groups, 3)
    again.load_progress_state(sampler.progress_state())
    assert list(again) == list(sampler)
    assert again.state_dict() == sampler.state_dict()


# Epochs


def test_an_epoch_is_left_when_it_is_consumed() -> None:
    """Entered, or iterated again, each epoch has its own order, and begins at its first sample."""
    sampler, plain, orders = of_ranks(50), of_ranks(50), []
    for epoch in range(3):
        with sampler.in_epoch(epoch):
            orders.append(tuple(sampler))
            sampler.advance(50)
            assert sampler.progress == 50
        assert tuple(plain) == orders[-1]
        plain.advance(50)
    assert len(set(orders)) == 3
    sampler = advanced(of_ranks(), 10)
    for num_advanced in (0, 4):
        sampler.advance(num_advanced)
        sampler.reset_progress()  # after the end, it goes to the next epoch
        assert (sampler.epoch, sampler.progress) == (1, 0)


def test_a_restored_epoch_goes_before_others() -> None:
    """Loops that call set_epoch with the restored epoch continue, and a reset gives it up."""
    state = {**of_ranks().state_dict(), "epoch": 3, "global_consumed": 4, "progress": 4}
    sampler = loaded(of_ranks(), {"progress": 4, "epoch": 0})
    sampler.set_epoch(0)
    sampler.advance(6)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.progress) == (1, 0)
    end = loaded(of_ranks(1), {"progress": 1, "epoch": 1})
    end.set_epoch(2)
    beginning = loaded(of_ranks(), {**state, "global_consumed": 0})
    beginning.reset_progress()
    beginning.set_epoch(0)


def test_a_state_from_an_epochs_end_begins_the_next() -> None:
    """Saved after the last batch, before and after the end of the block, it yields a whole epoch."""
    sampler = of_ranks(10)
    with sampler.in_epoch(2):
        sampler.advance(len(list(sampler)))
        inside = sampler.state_dict()
    for state in (inside, sampler.state_dict(), {"progress": 10, "epoch": 2}):
        again = loaded(of_ranks(10), state)
        assert (again.epoch, again.progress, len(list(again))) == (3, 0, 10)
        assert again.state_dict() == {**inside, "epoch": 3}


def test_a_constant_advance_fits_a_short_last_batch() -> None:
    """The documented loop, advance(batch_size) for every batch, runs through an epoch of any length."""
    for batch_size in (1, 4, 16):
        sampler = of_ranks(10)
        for _ in DataLoader(range(10), sampler=sampler, batch_size=batch_size, num_workers=int(batch_size == 4)):  # type: ignore[arg-type]
            sampler.advance(batch_size)
        assert (sampler.is_over, sampler.progress) == (True, 10)


def test_a_loader_that_drops_its_last_batch_ends_its_epochs() -> None:
    """in_epoch ends each epoch; a state after the last full batch yields no other."""
    sampler = of_ranks(10)
    loader = DataLoader(range(10), sampler=sampler, batch_size=4, drop_last=True)  # type: ignore[arg-type]
    states = []
    for epoch in range(2):
        with sampler.in_epoch(epoch):
            for _ in loader:
                sampler.advance(4)
                states.append(sampler.state_dict())
    assert [(state["epoch"], state["progress"]) for state in states] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    sampler.load_state_dict(states[1])
    assert list(loader) == []


def test_the_guard_can_be_told_to_give_up_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """With strict=False this is logged, and an exception in the block keeps the position."""
    sampler = advanced(of_ranks(10), 4)
    with contextlib.suppress(KeyError), sampler.in_epoch(1, strict=False):
        assert sampler.progress == 0
        sampler.advance(3)
        raise KeyError
    assert "is discarded" in caplog.text
    assert (sampler.epoch, sampler.progress) == (1, 3)


def test_no_samples_are_no_epochs_end() -> None:
    """An empty data set, or one too small for the ranks with drop_last, does not end one epoch after another."""
    for sampler in (of_ranks(0), of_ranks(2, ranks=3, drop_last=True)):
        assert list(sampler) == []
        assert sampler.state_dict()["epoch"] == 0
    assert [list(of_ranks(3, ranks=8, rank=rank, shuffle=False)) for rank in range(8)] == [[i % 3] for i in range(8)]


def test_len_is_that_of_the_whole_epoch_unless_asked() -> None:
    """The remaining length is available in any case."""
    for mode, expected in (("full", 5), ("remaining", 3)):
        sampler = loaded(of_ranks(10, ranks=2, len_mode=mode), {"progress": 2, "epoch": 0})
        assert len(DataLoader(range(10), sampler=sampler)) == expected  # type: ignore[arg-type]
        alone = advanced(single(5, len_mode=mode), 2)
        assert (len(alone), alone.remaining(), sampler.remaining()) == (expected, 3, 3)


def test_a_count_that_can_not_be_changes_nothing() -> None:
    """Beyond a short last batch, after a new iteration, or after the end, the position stays."""
    sampler, again = of_ranks(10), of_ranks(10)
    sampler.advance(8)
    list(sampler)
    for too_far, fits, progress in ((9, 8, 10), (8, 0, 10)):
        with pytest.raises(AdvancedTooFarError):
            sampler.advance(too_far)
        sampler.advance(fits)
        assert sampler.progress == progress
    list(again)
    next(iter(again))  # started again: it has not handed out all
    with pytest.raises(AdvancedTooFarError):
        again.advance(11)


# Groups


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
    """With one rank, each epoch's full batches match the original's, and leftovers follow; ranks take turns."""
    groups = [i * i % 7 for i in range(60)]
    for epoch in range(3):
        sampler = grouped(groups)
        sampler.set_epoch(epoch)
        expected = of_the_original(groups, 4, 1, 0, epoch)
        assert list(sampler)[: len(expected)] == expected
    alone, ranks = list(grouped(groups)), [list(grouped(groups, ranks=4, rank=rank)) for rank in range(4)]
    assert [batch for turn in zip(*ranks, strict=True) for batch in turn][: len(alone)] == alone


def test_the_originals_state_of_groups_continues_here() -> None:
    """The samples that its ranks consumed, in batches that each formed from its own part, do not come again."""
    groups, ranks = [i * i % 5 for i in range(48)], 2
    before, rest = set[int](), set[int]()
    for rank in range(ranks):
        before |= {index for batch in of_the_original(groups, 4, ranks, rank, 2)[:2] for index in batch}
        sampler = loaded(grouped(groups, 4, ranks, rank, leftover="mixed"), {"progress": 2, "epoch": 2})
        rest |= {index for batch in sampler for index in batch}
        again = loaded(grouped(groups, 4, ranks, rank, leftover="mixed"), sampler.state_dict())
        assert list(again) == list(sampler)
    assert before | rest == set(range(48))
    assert not before & rest


LEFT_OVER: dict[str, tuple[Any, list[list[int]]]] = {
    "mixed": (((1, 0, 1, 0, 2), 3, {"leftover": "mixed"}), [[0, 1, 2], [3, 4]]),
    "filled up, the fullest first": (((0, 1, 1), 4, {}), [[1, 2, 1, 2], [0, 0, 0, 0]]),
    "dropped": (((0, 1, 1), 2, {"leftover": "drop"}), [[1, 2]]),
    "mixed, full ones only": (((0, 1, 2, 3, 4, 5), 4, {"leftover": "mixed", "drop_last": True}), [[0, 1, 2, 3]]),
    "full ones only": (((0, 0, 0, 1, 1, 1), 2, {"drop_last": True}), [[0, 1], [3, 4]]),
}


@pytest.mark.parametrize("case", LEFT_OVER)
def test_what_is_left_over_comes_in_order(case: str) -> None:
    """What does not fill a batch is mixed, filled up, or dropped, as chosen, and always in the same order."""
    (groups, size, arguments), expected = LEFT_OVER[case]
    sampler = grouped(groups, size, shuffle=False, **arguments)
    assert list(sampler) == expected
    assert len(sampler) == sampler.num_batches == sampler.remaining() == len(expected)


def test_groups_and_names_may_be_spelled_otherwise() -> None:
    """Strings and tensors give the same batches; the original's spelling is the same class, and Lightning's own.

    Advance without a number counts one batch, and Lightning finds `set_epoch`.
    """
    sampler = grouped([0, 1, 0, 1, 0], 2)
    expected = list(sampler)
    assert list(grouped(["a", "b", "a", "b", "a"], 2)) == expected
    assert list(grouped(torch.tensor([7, 5, 7, 5, 7]), 2)) == expected
    for kind in (InterruptibleDistributedSampler, InterruptibleSampler, InterruptibleDistributedGroupedBatchSampler):
        assert getattr(lightning_faulttolerant, kind.__name__.replace("ptible", "ptable")) is kind
    assert isinstance(of_ranks(), DistributedSampler)  # Lightning doesn't replace it
    sampler.advance()
    assert sampler.progress == 1
    sampler.reset_progress()
    sampler.sampler.set_epoch(3)
    assert sampler.epoch == 3


def test_ranks_are_asked_for_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that is created before the ranks are known still deals to them, also under Lightning's launcher."""
    sampler = InterruptibleDistributedSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.advance(2)
    monkeypatch.delenv("WORLD_SIZE")
    assert (sampler.global_consumed, sampler.rank, sampler.num_replicas) == (4, 1, 2)


def test_the_originals_state_continues_here() -> None:
    """The original's progress is that of this rank among the current number of ranks, also of a single one."""
    for rank in range(3):
        sampler = loaded(of_ranks(20, ranks=3, rank=rank), {"progress": 4, "epoch": 0})
        assert list(sampler) == list(of_ranks(20, ranks=3, rank=rank))[4:]
        assert sampler.state_dict()["progress"] == 4
    expected: Any = DistributedSampler(range(10), 1, 0, seed=3)
    expected.set_epoch(4)
    assert list(loaded(single(10, seed=3), {"progress": 3, "epoch": 4})) == list(expected)[3:]


def test_what_has_no_effect_or_another_order_is_warned_of() -> None:
    """The original's versions disagree on the order of later epochs; some arguments mean nothing for a single rank."""
    with pytest.warns(UserWarning, match="order of epoch 0"):
        sampler = loaded(of_ranks(20), {"progress": 4, "epoch": 2})
    assert (sampler.epoch, sampler.progress) == (2, 4)
    loaded(of_ranks(20, shuffle=False), {"progress": 4, "epoch": 2})
    for name, value in {"num_replicas": 2, "rank": 1, "drop_last": True}.items():
        with pytest.warns(UserWarning, match=f"{name} has no effect"):
            assert sorted(single(10, **{name: value})) == list(range(10))


@pytest.mark.parametrize("make", [of_ranks, single, grouped])
def test_seeds_are_those_of_torch(make: Any) -> None:
    """Seed and epoch together may exceed torch's range, then continue from 0; the computed order takes any number."""
    for seed, same in ((2**64 - 1, -1), (-(2**63), 2**63)):
        ours, other = make(seed=seed), make(seed=same)
        for sampler in (ours, other):
            sampler.set_epoch(2)
        assert list(ours) == list(other)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="seed="):
            make(seed=seed)
        assert list(make(seed=seed, order="feistel"))


# Errors

STATE = {**of_ranks().state_dict(), "progress": 4, "global_consumed": 4}
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "no state": (lambda s: s.load_state_dict(None), ValueError),
    "progress alone": (lambda s: s.load_state_dict({"progress": 1}), ValueError),
    "progress after the end": (lambda s: s.load_state_dict({"progress": 11, "epoch": 3}), AdvancedTooFarError),
    "a newer version": (lambda s: s.load_state_dict({**STATE, "epoch": 3, "version": 3}), ValueError),
    "another kind": (lambda s: s.load_state_dict({**single().state_dict(), "epoch": 3}), ValueError),
    "no ranks": (lambda s: s.load_state_dict({**STATE, "epoch": 3, "num_replicas": 0}), ValueError),
    "too far": (lambda s: s.advance(11), AdvancedTooFarError),
    "backwards": (lambda s: s.advance(-1), ValueError),
    "another epoch": (lambda s: s.set_epoch(1), HasNotResetProgressError),
    "an epoch before the restored": (
        lambda s: loaded(of_ranks(), {**STATE, "epoch": 3}).set_epoch(0),
        HasNotResetProgressError,
    ),
    "an epoch before the restored end": (
        lambda s: loaded(of_ranks(1), {"progress": 1, "epoch": 1}).set_epoch(0),
        HasNotResetProgressError,
    ),
    "other ranks": (
        lambda s: loaded(of_ranks(ranks=2, on_world_size_change="error"), STATE),
        FingerprintMismatchError,
    ),
    "the groups' epoch": (lambda s: advanced(grouped(), 1).set_epoch(2), HasNotResetProgressError),
    "the groups' progress": (lambda s: loaded(grouped(), {"progress": 7, "epoch": 3}), AdvancedTooFarError),
    "other groups": (
        lambda s: loaded(grouped((0, 0, 0, 0, 1, 1, 2, 3, 4)), advanced(grouped(), 2).state_dict()),
        FingerprintMismatchError,
    ),
    "rank": (lambda s: of_ranks(ranks=2, rank=2), ValueError),
    "negative rank": (lambda s: of_ranks(ranks=2, rank=-1), ValueError),
    "order": (lambda s: of_ranks(order="random"), ValueError),
    "len_mode": (lambda s: of_ranks(len_mode="half"), ValueError),
    "on_world_size_change": (lambda s: of_ranks(on_world_size_change="shrug"), ValueError),
    "no seed": (lambda s: of_ranks(seed=None), ValueError),
    "batch_size": (lambda s: grouped(batch_size=0), ValueError),
    "leftover": (lambda s: grouped(leftover="keep"), ValueError),
    "groups": (lambda s: InterruptibleDistributedGroupedBatchSampler(range(3), [0, 1], 2, 1, 0), ValueError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_and_changes_nothing(case: str, snapshot: SnapshotAssertion) -> None:
    """The error says what is wrong with both values, and the sampler stays as it was."""
    call, kind = REFUSED[case]
    sampler = advanced(of_ranks(), 4)
    before = sampler.state_dict()
    with pytest.raises(kind) as caught:
        call(sampler)
    assert type(caught.value) is kind
    assert str(caught.value) == snapshot
    assert sampler.state_dict() == before


def test_a_state_of_other_data_is_refused(snapshot: SnapshotAssertion, caplog: pytest.LogCaptureFixture) -> None:
    """The state holds what determines the order, and a difference is an error with both values, or a warning."""
    saved = advanced(of_ranks(10), 4)
    for name, value in {"length": 11, "seed": 1, "shuffle": False, "drop_last": True, "order": "feistel"}.items():
        sampler = of_ranks(**{"length": 10, name: value})
        with pytest.raises(FingerprintMismatchError) as caught:
            sampler.load_state_dict(saved.state_dict())
        assert str(caught.value) == snapshot(name=name)
        assert sampler.progress == 0
        sampler.load_state_dict(saved.state_dict(), strict=False)
        assert f"{name.replace('length', 'dataset_len')} was" in caplog.text
        assert sampler.global_consumed == 4
    assert loaded(of_ranks(10, on_world_size_change="error"), saved.state_dict()).progress == 4
