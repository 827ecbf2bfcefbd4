"""An iterable data set whose iteration can't be begun again as it was says so."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.tracked import TrackedLoader
from tests.loader.loops import safe, seed

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "persistent": {"num_workers": 1, "persistent_workers": True},
}
each_workers = pytest.mark.parametrize("workers", WORKERS)


class Forgetful(IterableDataset[Tensor]):
    """Its first iteration leaves a generator that the second one takes away and draws from, late."""

    def __init__(self) -> None:
        self.kept: dict[str, random.Random] = {}

    def __iter__(self) -> Iterator[Tensor]:
        last = self.kept.pop("last", None)
        if last is None:
            self.kept["last"] = random.Random(3)
        for number in range(8):
            yield torch.tensor(number + (last.random() if last is not None and number > 5 else 0.0))


def tracked(dataset: IterableDataset[Any], workers: str, *, strict: bool = True) -> tuple[TrackedLoader, Any]:
    """Return a loader that is followed, and its copy."""
    loader = DataLoader(dataset, batch_size=2, **WORKERS[workers])
    tracker = TrackedLoader(loader)
    tracker.index_side.strict = strict
    return tracker, tracker.copy_of(loader)


def state_in_second_iteration(dataset: IterableDataset[Any], workers: str, consumed: int) -> dict[str, Any]:
    """Return the state behind some batches of the second iteration."""
    tracker, loader = tracked(dataset, workers)
    list(loader)
    batches = iter(loader)
    for _ in range(consumed):
        next(batches)
    state: dict[str, Any] = safe(tracker.state_dict(consumed))
    tracker.close_workers()
    return state


@each_workers
def test_generator_that_is_gone_is_refused(workers: str) -> None:
    """An iteration that began with a generator that a fresh data set does not have can't be begun again."""
    seed(1)
    state = state_in_second_iteration(Forgetful(), workers, 2)
    tracker, loader = tracked(Forgetful(), workers)
    tracker.load_state_dict(state)
    with pytest.raises(NotExactError, match=r"no generator to restore the state of dataset\.kept\['last'\] into"):
        list(loader)
    tracker.close_workers()


@each_workers
def test_generator_that_is_gone_is_announced_if_not_strict(workers: str, caplog: pytest.LogCaptureFixture) -> None:
    """If not strict it goes on, and the main process says so, once."""
    seed(1)
    state = state_in_second_iteration(Forgetful(), workers, 2)
    tracker, loader = tracked(Forgetful(), workers, strict=False)
    tracker.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "lightning_faulttolerant"):
        assert len(list(loader)) == 2
        assert len(list(loader)) == 4
    tracker.close_workers()
    [reason] = tracker.index_side.not_exact
    assert "no generator to restore the state of dataset.kept['last'] into" in reason
    assert [record.message for record in caplog.records] == [reason]
