"""Objects of a loader that its iterations change continue, in this process and in workers, or are named as lost."""

from __future__ import annotations

import copy
import operator
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_faulttolerant import NotExactError, ResumableDataLoader
from lightning_faulttolerant.loader.objects import LoaderObjects, WorkerObjects, lost_in_loaders, lost_in_workers
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.saved import LOST, NODES
from tests.laws.data_sets import NoisyDataset
from tests.loader.loops import follow
from tests.loader.made import Echo


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


def begun_with_changes() -> Any:
    """Return the state of an iteration, after a batch, over a data set that was changed before."""
    dataset = Stream()
    tracker, tracked = follow(DataLoader(dataset, None))
    dataset.seen.append(3)
    dataset.own = hidden()
    dataset.turns = iter([1, 2])  # a fresh iteration creates it again
    next(iter(tracked))
    return tracker.state_dict(1)


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_not_there_any_more_is_refused(strict: bool) -> None:
    """An iteration over a data set without an attribute that its samples may depend on is not exact."""
    tracker, tracked = follow(DataLoader(Stream(has_list=False), None), begun_with_changes(), strict=strict)
    if strict:
        with pytest.raises(NotExactError, match=r"Stream continues without dataset\.seen"):
            iter(tracked)
    else:
        list(tracked)
        assert any("dataset.seen" in line for line in tracker.exactness.reasons)


def test_what_an_iteration_began_with_is_named() -> None:
    """An object of a data set that can't be carried is lost, in the main process and in workers."""
    position = begun_with_changes()["iterable"]["position"]
    places = {"train/0": {"iterable": {"epoch": None, "position": position}, "workers": [{"iterable": position}]}}
    assert list(lost_in_loaders(places)) == ["train/0.dataset.own"]
    assert list(lost_in_workers(places)) == ["train/0.dataset.own of a worker"]


def test_what_workers_copied_is_named() -> None:
    """An object that workers copied and that can't be carried is lost even if nothing else has changed."""
    loader = DataLoader(NoisyDataset(8), batch_size=4)
    objects = LoaderObjects(loader)
    assert objects.of_workers() == {}
    loader.dataset.own = None  # type: ignore[attr-defined]
    tracker, tracked = follow(loader)
    loader.dataset.own = hidden()  # type: ignore[attr-defined]
    assert objects.of_workers()["dataset"][LOST]
    list(tracked)
    assert list(lost_in_loaders({"train/0": tracker.state_dict(1)})) == ["train/0.dataset.own"]


class Caching(Dataset[Any]):
    """Counts, and fills caches."""

    def __init__(self) -> None:
        self.count = 0
        self.cache: dict[int, Any] = {}
        self.files = [f"{number}.png" for number in range(2_000)]

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        self.last = torch.zeros(100 * self.count)
        return self.cache.setdefault(index, torch.zeros(1_000))


def objects_of(dataset: Any) -> WorkerObjects:
    """Return the tracker of a data set's objects."""
    return WorkerObjects(
        dataset=dataset, collate_fn=None, worker_init_fn=None, held=HeldGenerators({"dataset": dataset})
    )


def test_cache_that_is_too_large_is_named() -> None:
    """Objects beyond the limit are named, by the first state that lacks them and by all later ones."""
    dataset = Caching()
    objects = objects_of(dataset)
    for index in range(40):
        dataset[index]
        state = objects.state_dict()
    reason = state[LOST]["dataset.cache"]
    assert [name for name, _ in state[NODES]["dataset"]["attributes"]] == ["count", "last"]
    dataset.last = torch.zeros(100_000)
    state = objects.state_dict()
    assert state[LOST] == {"dataset.cache": reason, "dataset.last": reason}
    assert state[NODES] == {"dataset": {"attributes": [["count", 40]]}}
    places = {"train/0": {"workers": [{"objects": state}, {}]}, "val/0": None}
    lost = lost_in_workers(places)
    assert list(lost) == [f"train/0.dataset.{name} of a worker" for name in ("cache", "last")]


class Caches(Dataset[Any]):
    """Caches what `entry` returns in `cache`, and draws a random number for each sample."""

    def __init__(self, entry: Callable[[Any, int], Any], cache: Any) -> None:
        self.entry, self.cache, self.count = entry, cache, 0
        self.random = random.Random(0)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        found = self.cache.get(index) if isinstance(self.cache, dict) else self.cache[index]
        if found is None:
            self.cache[index] = found = self.entry(self, index)
        return found + self.random.random() + random.random()


@pytest.mark.parametrize("cache", [lambda: [None] * 20, dict, OrderedDict])
def test_cache_of_what_an_index_determines_is_no_state(cache: Callable[[], Any]) -> None:
    """It is neither lost nor carried; the data set, its cache, and all generators are as they were."""
    dataset = Caches(lambda self, index: torch.full((9_000,), float(index)), cache())
    objects = objects_of(dataset)
    for index in (7, 3):
        dataset[index]
    entries, states = copy.copy(dataset.cache), (random.getstate(), dataset.random.getstate())
    state = objects.state_dict()
    assert state[LOST] == {}
    assert state[NODES] == {"dataset": {"attributes": [["count", 2]]}}
    assert all(map(operator.is_, dataset.cache, entries))
    assert dataset.cache[7] is entries[7]
    assert (random.getstate(), dataset.random.getstate(), dataset.count) == (*states, 2)


OTHER_CACHES: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any, int], Any]]] = {
    "global generator": (lambda data, index: torch.full((4_096,), random.random()), Caches.__getitem__),
    "own generator": (lambda data, index: torch.full((4_096,), data.random.random()), Caches.__getitem__),
    "count": (lambda data, index: torch.full((4_096,), float(data.count)), Caches.__getitem__),
    "entries that change": (
        lambda data, index: torch.zeros(9_000),
        lambda data, index: (Caches.__getitem__(data, index), data.cache[index].add_(1)),
    ),
    "entries by another key": (
        lambda data, index: None,
        lambda data, index: data.cache.update({len(data.cache): torch.zeros(9_000)}),
    ),
}


@pytest.mark.parametrize("name", OTHER_CACHES)
def test_cache_of_anything_else_is_lost(name: str) -> None:
    """A new worker would fill it with other values: it is state, but too large to travel."""
    entry, read = OTHER_CACHES[name]
    dataset = Caches(entry, {})
    objects = objects_of(dataset)
    for index in (0, 1, 2, 3, 4, 4):
        read(dataset, index)
        state = objects.state_dict()
    assert "dataset.cache" in state[LOST]
    assert list(dataset.cache) == [*range(6 if name == "entries by another key" else 5)]


def test_what_other_code_carries_is_not_carried_again() -> None:
    """The weights of a module that the data set holds, and a state of its loader, are not; counts beside them are."""
    dataset: Any = Echo()
    dataset.module, dataset.counter, dataset.kept = nn.Linear(2, 2), SimpleNamespace(count=0), None
    objects = LoaderObjects(DataLoader(dataset))
    with torch.no_grad():
        dataset.module.weight.add_(1)
    dataset.kept = ResumableDataLoader(dataset).state_dict()
    assert objects.of_workers() == {}
    dataset.counter.count = 1
    assert list(objects.of_workers()["dataset"]["nodes"]) == ["dataset.counter"]
