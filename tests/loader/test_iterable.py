"""An iterable data set reports that its iteration can't be begun again as it was."""

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
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.tracked import TrackedLoader
from tests.loader.loops import safe, seed

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "persistent": {"num_workers": 1, "persistent_workers": True},
}
each_workers = pytest.mark.parametrize("workers", WORKERS)


class Equipped(IterableDataset[Tensor]):
    """Draws late, from a generator that it may have been given."""

    def __init__(self, *parts: random.Random) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(8):
            yield torch.tensor(number + (self.parts[0].random() if self.parts and number > 5 else 0.0))


class Plain(IterableDataset[Tensor]):
    """Keeps its place as an attribute, begins again each time, and has another name in each process."""

    num_made = 0

    def __init__(self) -> None:
        Plain.num_made += 1
        self.name, self.index = f"number {self.num_made}", 0

    def __iter__(self) -> Iterator[Tensor]:
        for self.index in range(8):
            yield torch.tensor(float(self.index))


class Counting(Plain):
    """Counts its iterations."""

    num_begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_begun += 1
        for sample in super().__iter__():
            yield sample * self.num_begun


class Holding(Plain):
    """Holds a data set that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Counting()]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts[0])


class Told(Plain):
    """Gets its epoch by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch


def tracked(dataset: IterableDataset[Any], workers: str, *, strict: bool = True) -> tuple[TrackedLoader, Any]:
    """Return a tracker and the tracked copy of its loader."""
    loader = DataLoader(dataset, batch_size=2, **WORKERS[workers])
    tracker = TrackedLoader(loader, exactness=Exactness(strict=strict))
    return tracker, tracker.copy_of(loader)


def state_at(dataset: IterableDataset[Any], workers: str, *, num_iterations: int, consumed: int | None) -> Any:
    """Return the state after some iterations, or after `consumed` batches of the next one."""
    tracker, loader = tracked(dataset, workers)
    for epoch in range(num_iterations):
        if isinstance(dataset, Told):
            dataset.set_epoch(epoch)
        list(loader)
    if consumed is not None:
        batches = iter(loader)
        for _ in range(consumed):
            next(batches)
    state = safe(tracker.state_dict(consumed))
    tracker.close_workers()
    return state


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's iterator, which is not created
@each_workers
def test_generator_that_is_gone_is_refused(workers: str) -> None:
    """An iteration that began with a generator that a fresh data set does not have can't be begun again."""
    seed(1)
    state = state_at(Equipped(random.Random(3)), workers, num_iterations=1, consumed=2)
    tracker, loader = tracked(Equipped(), workers)
    tracker.load_state_dict(state)
    with pytest.raises(NotExactError, match=r"the generator dataset\.parts\[0\] does not exist"):
        list(loader)
    tracker.close_workers()


@each_workers
def test_generator_that_is_gone_is_announced_if_not_strict(workers: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without strict it continues, and the main process reports this."""
    seed(1)
    state = state_at(Equipped(random.Random(3)), workers, num_iterations=1, consumed=2)
    tracker, loader = tracked(Equipped(), workers, strict=False)
    tracker.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "lightning_faulttolerant"):
        assert len(list(loader)) == 2
        assert len(list(loader)) == 4
    tracker.close_workers()
    reasons = tracker.exactness.reasons
    assert reasons
    assert all("the generator dataset.parts[0] does not exist" in reason for reason in reasons)
    assert [record.message for record in caplog.records] == reasons


@pytest.mark.parametrize("consumed", [None, 0, 1], ids=["between", "begun", "one batch"])
@pytest.mark.parametrize("kind", [Counting, Holding])
@each_workers
def test_count_of_iterations(workers: str, kind: type[Plain], consumed: int | None) -> None:
    """A data set that counts its iterations in an attribute, with other samples in each, continues with its count."""
    state = state_at(kind(), workers, num_iterations=2, consumed=consumed)
    tracker, loader = tracked(kind(), workers)
    tracker.load_state_dict(state)
    assert torch.equal(torch.cat(list(loader)), 3 * torch.arange(2 * (consumed or 0), 8.0))
    assert torch.equal(torch.cat(list(loader)), 4 * torch.arange(8.0))
    tracker.close_workers()


@pytest.mark.parametrize("consumed", [None, 0, 1], ids=["between", "begun", "one batch"])
@pytest.mark.parametrize("kind", [Plain, Told])
@each_workers
def test_place_that_is_kept_is_no_hidden_state(workers: str, kind: type[Plain], consumed: int | None) -> None:
    """A data set that keeps its place or its epoch as an attribute, and begins again each time, continues."""
    state = state_at(kind(), workers, num_iterations=2, consumed=consumed)
    tracker, loader = tracked(kind(), workers)
    tracker.load_state_dict(state)
    assert len(list(loader)) == 4 - (consumed or 0)
    tracker.close_workers()
