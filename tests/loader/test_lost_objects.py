"""Objects of a loader that can't be carried, or restored, are reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.iterable import IterableSide
from lightning_faulttolerant.loader.objects import LoaderObjects, lost_in_loaders, lost_in_workers
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.objects.object_state import LOST
from tests.data_sets import NoisyDataset


class Stream(IterableDataset[Any]):
    """May have a list."""

    def __init__(self, *, has_list: bool = True) -> None:
        if has_list:
            self.seen: list[int] = []
        self.own: Any = None
        self.turns: Any = None

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def hidden() -> Any:
    """Return an object whose class can't be found by its name."""
    return type("Hidden", (), {})()


def position_of(dataset: Stream) -> Any:
    """Return the position of an iteration after a batch."""
    side = IterableSide(dataset, Exactness())
    dataset.seen.append(3)
    dataset.own = hidden()
    dataset.turns = iter([1, 2])  # a fresh iteration creates it again
    side.begin(None)
    batch = [next(iter(side))]
    side.collate(list, batch)
    return side.record.position_after(1)


def test_what_is_not_there_any_more_is_refused() -> None:
    """An iteration over a data set without an attribute that its samples may depend on is not exact."""
    position = position_of(Stream())
    side = IterableSide(Stream(has_list=False), Exactness())
    side.begin(position)
    with pytest.raises(NotExactError, match=r"Stream continues without dataset\.seen"):
        iter(side)
    side = IterableSide(Stream(has_list=False), exactness := Exactness(strict=False))
    side.begin(position)
    iter(side)
    assert any("dataset.seen" in line for line in exactness.reasons)


def test_what_an_iteration_began_with_is_named() -> None:
    """An object of a data set that can't be carried is lost, in the main process and in workers."""
    position = position_of(Stream())
    places = {"train/0": {"iterable": {"epoch": None, "position": position}, "workers": [{"iterable": position}]}}
    assert list(lost_in_loaders(places)) == ["train/0.dataset.own"]
    assert list(lost_in_workers(places)) == ["train/0.dataset.own of a worker"]


def test_what_workers_copied_is_named() -> None:
    """An object that workers copied and that can't be carried is lost even if nothing else has changed."""
    loader = DataLoader(NoisyDataset(8), batch_size=4)
    objects = LoaderObjects(loader)
    assert objects.of_workers() == {}
    loader.dataset.own = None  # type: ignore[attr-defined]
    tracker = TrackedLoader(loader)
    loader.dataset.own = hidden()  # type: ignore[attr-defined]
    assert objects.of_workers()["dataset"][LOST]
    list(tracker.copy_of(loader))
    assert list(lost_in_loaders({"train/0": tracker.state_dict(1)})) == ["train/0.dataset.own"]
