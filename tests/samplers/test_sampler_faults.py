from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant import (
    AdvancedTooFarError,
    FingerprintMismatchError,
    HasNotResetProgressError,
    InterruptibleDistributedSampler,
    InterruptibleSampler,
)
from tests.samplers.made import sampler_of

# Faults of the original library that this one does not have.


def test_fault_same_permutation_each_epoch() -> None:
    """Each epoch has its own order, by set_epoch and by in_epoch."""
    sampler = sampler_of(50)
    orders = []
    for epoch in range(3):
        with sampler.in_epoch(epoch):
            orders.append(tuple(sampler))
    sampler.set_epoch(5)
    orders.append(tuple(sampler))
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 16])
def test_fault_constant_advance_fails_on_a_short_last_batch(batch_size: int, num_workers: int) -> None:
    """The documented loop, advance(batch_size) for every batch, runs through an epoch of any length."""
    if num_workers and batch_size not in (4, 16):
        return  # processes are costly
    sampler = sampler_of(10)
    loader = DataLoader(range(10), sampler=sampler, batch_size=batch_size, num_workers=num_workers)  # type: ignore[arg-type]
    for _ in loader:
        sampler.advance(batch_size)
    assert sampler.is_over
    assert sampler.progress == 10
    with pytest.raises(AdvancedTooFarError):
        sampler.advance(batch_size)


def test_more_than_there_are_is_still_an_error() -> None:
    """A wrong count is an error, unlike a short last batch: before all is handed out, and beyond the earlier count."""
    sampler = sampler_of(10)
    for wrong in (11, 100):
        with pytest.raises(AdvancedTooFarError, match=f"advance\\({wrong}\\) at 0 of 10 samples of epoch 0"):
            sampler.advance(wrong)
    assert sampler.progress == 0
    sampler.advance(8)
    assert list(sampler) == list(sampler_of(10))[8:]
    with pytest.raises(AdvancedTooFarError):
        sampler.advance(9)
    assert sampler.progress == 8
    sampler.advance(8)
    assert sampler.progress == 10
    again = sampler_of(10)
    assert len(list(again)) == 10
    next(iter(again))  # started again: it has not handed out all
    with pytest.raises(AdvancedTooFarError):
        again.advance(11)
    with pytest.raises(ValueError, match="-1"):
        sampler.advance(-1)


def test_fault_a_rejected_state_is_half_loaded() -> None:
    """A state that is refused leaves the sampler as it was."""
    sampler = sampler_of(10)
    sampler.advance(4)
    before = sampler.state_dict()
    bad: list[dict[str, Any]] = [
        {"progress": 11, "epoch": 3},
        {"progress": 1},
        {"progress": "1", "epoch": 0},
        {"progress": -1, "epoch": 0},
        {},
        {**before, "global_consumed": 11, "epoch": 3},
        {**before, "epoch": 3, "seed": 1},
        {**before, "epoch": 3, "version": 3},
        {**before, "epoch": 3, "kind": "grouped"},
        {**before, "epoch": 3, "num_replicas": 0},
    ]
    for state in bad:
        with pytest.raises((AdvancedTooFarError, ValueError, FingerprintMismatchError)):
            sampler.load_state_dict(state)
        assert sampler.state_dict() == before


def test_fault_the_position_is_applied_to_another_epoch_than_it_was_saved_in() -> None:
    """A loop over range(0, n) that resumes in epoch 3 gets an error, and one over range(sampler.epoch, n) continues."""
    saved = sampler_of(10)
    saved.set_epoch(3)
    saved.advance(4)
    sampler = sampler_of(10)
    sampler.load_state_dict(saved.state_dict())
    with pytest.raises(HasNotResetProgressError, match=r"set_epoch\(0\), but epoch 3 was restored, at 4 of 10 samples"):
        sampler.set_epoch(0)
    for epoch in range(sampler.epoch, 5):
        with sampler.in_epoch(epoch):
            sampler.advance(len(list(sampler)))
    assert (sampler.epoch, sampler.progress) == (5, 0)
    end = sampler_of(1)
    end.load_state_dict({"progress": 1, "epoch": 1})
    with pytest.raises(HasNotResetProgressError, match="the end of epoch 1 was restored: epoch 2 comes next"):
        end.set_epoch(0)
    end.set_epoch(2)
    beginning = sampler_of(10)
    beginning.load_state_dict({**saved.state_dict(), "global_consumed": 0})
    with pytest.raises(HasNotResetProgressError):
        beginning.set_epoch(0)
    beginning.reset_progress()
    beginning.set_epoch(0)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"length": 11}, "dataset_len was 10 and is now 11"),
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"shuffle": False}, "shuffle was True and is now False"),
        ({"drop_last": True}, "drop_last was False and is now True"),
        ({"order": "feistel"}, "order was 'torch' and is now 'feistel'"),
    ],
)
def test_fault_a_state_of_other_data_is_taken(
    other: dict[str, Any], shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The state holds what determines the order, and a difference is an error with both values, or a warning."""
    saved = sampler_of(10)
    saved.advance(4)
    sampler = sampler_of(**{"length": 10, **other})
    with pytest.raises(FingerprintMismatchError, match=shown):
        sampler.load_state_dict(saved.state_dict())
    assert sampler.progress == 0
    sampler.load_state_dict(saved.state_dict(), strict=False)
    assert shown in caplog.text
    assert sampler.global_consumed == 4


def test_fault_another_number_of_ranks_loses_samples() -> None:
    """In the original's case, of 10 samples, 4 consumed by one rank, the other 6 come to two ranks."""
    alone = sampler_of(10)
    consumed = list(islice(iter(alone), 4))
    alone.advance(4)
    rest: list[int] = []
    for rank in range(2):
        sampler = sampler_of(10, ranks=2, rank=rank)
        sampler.load_state_dict(alone.state_dict())
        rest += list(sampler)
    assert sorted(consumed + rest) == list(range(10))


def test_another_number_of_ranks_may_be_refused() -> None:
    """With on_world_size_change="error", the error names both numbers."""
    saved = sampler_of(10)
    saved.advance(4)
    sampler = sampler_of(10, ranks=2, on_world_size_change="error")
    with pytest.raises(FingerprintMismatchError, match="saved by 1 ranks, but this run has 2"):
        sampler.load_state_dict(saved.state_dict())
    same = sampler_of(10, on_world_size_change="error")
    same.load_state_dict(saved.state_dict())
    assert same.progress == 4


def test_fault_len_is_that_of_the_whole_epoch_after_a_resume() -> None:
    """The remaining length is available, and len returns it with len_mode="remaining"."""
    for mode, expected in (("full", 5), ("remaining", 3)):
        sampler = sampler_of(10, ranks=2, len_mode=mode)
        sampler.load_state_dict({"progress": 2, "epoch": 0})
        assert len(DataLoader(range(10), sampler=sampler)) == expected  # type: ignore[arg-type]
        assert sampler.remaining() == 3
        assert sampler.progress == 2


def test_fault_a_state_from_an_epochs_end_resumes_into_an_empty_epoch() -> None:
    """A state saved after the last batch, before and after the end of the block, begins the next epoch."""
    sampler = sampler_of(10)
    with sampler.in_epoch(2):
        sampler.advance(len(list(sampler)))
        inside = sampler.state_dict()
    for state in (inside, sampler.state_dict(), {"progress": 10, "epoch": 2}):
        again = sampler_of(10)
        again.load_state_dict(state)
        assert (again.epoch, again.progress) == (3, 0)
        assert len(list(again)) == 10
        assert again.state_dict() == {**inside, "epoch": 3}


def test_fault_the_whole_permutation_is_a_list_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list, and with order="feistel" no tensor, is as long as the data: not for 10**12 samples, anywhere in them."""
    longest = 0
    made_at = InterruptibleDistributedSampler.order

    class Watched:
        def __init__(self, order: Any) -> None:
            self.length, self._order = order.length, order

        def at(self, positions: torch.Tensor) -> torch.Tensor:
            nonlocal longest
            longest = max(longest, len(positions))
            return self._order.at(positions)

    monkeypatch.setattr(
        InterruptibleDistributedSampler, "order", lambda self, epoch=None: Watched(made_at(self, epoch))
    )
    sampler = InterruptibleDistributedSampler(10**12, 8, 3, order="feistel")
    for skip in (0, 10**11, sampler.num_samples - 50_000):
        assert len(set(islice(sampler.iter_from(skip), 50_000))) == 50_000
    assert longest <= 16384
    assert len(list(sampler.iter_from(sampler.num_samples - 5))) == 5
    small = sampler_of(100_000)
    assert len(list(small)) == 100_000
    assert longest <= 16384


def test_fault_arguments_without_effect_are_taken_silently() -> None:
    """num_replicas, rank, and drop_last have no effect here, and a warning says so."""
    for arguments in ({"num_replicas": 2}, {"rank": 1}, {"drop_last": True}):
        with pytest.warns(UserWarning, match=f"{next(iter(arguments))} has no effect"):
            sampler = InterruptibleSampler(range(10), **arguments)  # type: ignore[arg-type]
        assert sorted(sampler) == list(range(10))


def test_fault_single_lets_an_epoch_be_left_in_its_middle() -> None:
    """The guard that the original has but never sets works here."""
    sampler = InterruptibleSampler(range(10))
    sampler.advance(1)
    with pytest.raises(HasNotResetProgressError):
        sampler.set_epoch(1)


def test_fault_single_has_the_length_of_the_whole_epoch_after_a_resume() -> None:
    """The remaining length is available."""
    sampler = InterruptibleSampler(range(10), len_mode="remaining")
    sampler.advance(4)
    assert len(sampler) == sampler.remaining() == 6
