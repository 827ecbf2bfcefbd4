"""Changes of a worker's copies of a loader's objects travel with its state, unless they are too large."""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lightning_faulttolerant.loader.objects import MAX_BYTES, WorkerObjects, lost_in_workers
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.object_state import LOST, NODES


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


def test_change_is_restored() -> None:
    """A count and a small cache continue in a new worker; without a change the state is empty."""
    dataset = Caching()
    objects = objects_of(dataset)
    assert objects.state_dict() == {}
    dataset[3]
    state = pickle.loads(pickle.dumps(objects.state_dict()))
    again = Caching()
    assert objects_of(again).load_state_dict(state) == []
    assert (again.count, list(again.cache)) == (1, [3])


def test_cache_that_is_too_large_is_named() -> None:
    """Objects beyond the limit are named, by the first state that lacks them and by all later ones."""
    dataset = Caching()
    objects = objects_of(dataset)
    for index in range(40):
        dataset[index]
        state = objects.state_dict()
    reason = f"more than {MAX_BYTES // 1024} kB have changed"
    assert state[LOST] == {"dataset.cache": reason}
    assert [name for name, _ in state[NODES]["dataset"]["attributes"]] == ["count", "last"]
    dataset.last = torch.zeros(100_000)
    state = objects.state_dict()
    assert state[LOST] == {"dataset.cache": reason, "dataset.last": reason}
    assert state[NODES] == {"dataset": {"attributes": [["count", 40]]}}
    places = {"train/0": {"workers": [{"objects": state}, {}]}, "val/0": None}
    lost = lost_in_workers(places)
    assert list(lost) == [f"train/0.dataset.{name} of a worker" for name in ("cache", "last")]
    assert all(f"{reason}; fill it before fit" in line for line in lost.values())


def test_large_list_that_grows_is_found() -> None:
    """For a large list, its length is checked."""
    dataset = Caching()
    objects = objects_of(dataset)
    dataset.files.append("new.png")
    again = Caching()
    objects_of(again).load_state_dict(objects.state_dict())
    assert again.files == dataset.files


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


@pytest.mark.parametrize(
    "entry",
    [
        lambda self, index: torch.full((4_096,), random.random()),
        lambda self, index: torch.full((4_096,), self.random.random()),
        lambda self, index: torch.full((4_096,), float(self.count)),
    ],
    ids=["global generator", "own generator", "count"],
)
def test_cache_of_anything_else_is_lost(entry: Callable[[Any, int], Any]) -> None:
    """A new worker would fill it with other values."""
    dataset = Caches(entry, {})
    objects = objects_of(dataset)
    for index in range(5):
        dataset[index]
        state = objects.state_dict()
    assert "dataset.cache" in state[LOST]
    assert (dataset.count, list(dataset.cache)) == (5, [*range(5)])


def test_cache_that_samples_change_is_lost() -> None:
    """An entry that each sample changes in place is state."""

    class Changes(Caches):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return self.cache[index].add_(1)

    dataset = Changes(lambda self, index: torch.zeros(9_000), {})
    objects = objects_of(dataset)
    for index in (0, 0, 4):
        dataset[index]
    assert list(objects.state_dict()[LOST]) == ["dataset.cache"]
    assert dataset.cache[0].mean() == 2


def test_list_of_samples_is_lost() -> None:
    """A list that grows by a sample each time is not a cache."""

    class Remembers(Caches):
        def __getitem__(self, index: int) -> Any:
            self.cache.append(torch.zeros(9_000))

    dataset = Remembers(lambda self, index: None, [])
    objects = objects_of(dataset)
    for index in range(4):
        dataset[index]
    assert list(objects.state_dict()[LOST]) == ["dataset.cache"]
    assert len(dataset.cache) == 4
