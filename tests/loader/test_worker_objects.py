"""Changes of a worker's copies of a loader's objects travel with its state, unless they are too large."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_faulttolerant.loader.objects import MAX_BYTES, WorkerObjects, lost_in_workers
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
    return WorkerObjects(dataset=dataset, collate_fn=None, worker_init_fn=None)


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
    assert lost_in_workers(places) == {f"train/0.dataset.{name} of a worker": reason for name in ("cache", "last")}


def test_large_list_that_grows_is_found() -> None:
    """For a large list, its length is checked."""
    dataset = Caching()
    objects = objects_of(dataset)
    dataset.files.append("new.png")
    again = Caching()
    objects_of(again).load_state_dict(objects.state_dict())
    assert again.files == dataset.files
