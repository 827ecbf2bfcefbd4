"""The changes that fetching makes on a worker's copies of a loader's objects. They travel with the worker's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.loader.objects import COPIES_RULES
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, ObjectState
from lightning_faulttolerant.state.objects.users import is_global

MAX_BYTES = 65_536
"""The space for changes in a worker's state."""
# This many of the nearest objects are checked after each batch. The rest takes at most this share of the time.
_MAX_NEAR = 1_000
_MAX_ITEMS = 1_000
_FAR_SHARE = 0.01


class WorkerObjects:
    """The objects of one worker.

    Objects far down are checked only as often as that takes 1 % of the time, so a change of these may be found some
    batches late. For a container with more than 1,000 items, only the length is checked. A check of each item would
    copy memory that workers share with the main process until one of them touches it.

    Args:
        dataset: The worker's copy. For an iterable one, its iteration handles the changes.
        collate_fn: The worker's copy.
        worker_init_fn: The worker's copy.
    """

    def __init__(self, *, dataset: object, collate_fn: object, worker_init_fn: object) -> None:
        roots = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
        if not isinstance(dataset, IterableDataset):
            roots = {"dataset": dataset, **roots}
        roots |= users_namespaces({"dataset": dataset, **roots})
        self._state = ObjectState(roots, replace(COPIES_RULES, max_items=_MAX_ITEMS))
        paths = [path for path in self._state.paths if not self._state.is_large(path)]
        paths.sort(key=is_global)  # the loader's own objects come first
        near = dict.fromkeys(paths[:_MAX_NEAR])
        self._near = self._state.unchanged(near)
        self._far = [path for path in self._state.paths if path not in near]
        self._changing: dict[str, None] = {}
        self._far_seconds, self._far_at = 0.0, 0.0
        self._lost: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the changes, and those that are too large to carry; an empty dict if there are none."""
        self._changing.update(dict.fromkeys(self._near.take_changed()))
        self._look_far()
        if not self._changing and not self._lost:
            return {}
        state = self._state.state_dict(of=self._changing, without=self._lost, max_bytes=MAX_BYTES)
        self._lost.update(state[LOST])  # it is not tried again after each batch
        state[LOST] = dict(self._lost)
        return state if state[NODES] or state[LOST] else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a state; return a line for each thing that could not be restored."""
        if not state:
            return []
        known = {*self._state.paths}
        self._changing.update(dict.fromkeys(path for path in state[NODES] if path in known))
        self._lost = dict(state[LOST])
        return self._state.load_state_dict(state)

    def _look_far(self) -> None:
        began = perf_counter()
        if (began - self._far_at) * _FAR_SHARE < self._far_seconds:
            return
        changed = self._state.changed_of(path for path in self._far if path not in self._changing)
        self._changing.update(dict.fromkeys(changed))
        self._far_at = perf_counter()
        self._far_seconds = self._far_at - began


AN_ITERATOR = "an iterator"
"""The start of the reason why an iterator can't be carried."""


def lost_in_loaders(places: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes on data sets when iterations or workers began that can't be carried, by path.

    Args:
        places: The states of loaders, by place.
    """
    found: dict[str, str] = {}
    for place, state in places.items():
        for objects in _at_moments(state or {}):
            found.update({f"{place}.{path}": reason for path, reason in objects.get(LOST, {}).items()})
    return found


def _at_moments(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the changes on a data set at each moment that a loader's state holds."""
    record, position = state.get("record") or {}, (state.get("iterable") or {}).get("position") or {}
    for name in ("birth", "start", "first"):
        yield ((record.get(name) or {}).get("objects") or {}).get("dataset", {})
    yield from _of_position(position)


def _of_position(position: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    moments = (position.get("start") or {}, position.get("first") or {}, position)
    for objects in (moment.get("objects") or {} for moment in moments):
        # Iterators are created again where the iteration begins again, and the resulting samples are compared.
        lost = objects.get(LOST, {}).items()
        yield {LOST: {path: reason for path, reason in lost if not reason.startswith(AN_ITERATOR)}}


def lost_in_workers(places: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes made in workers that can't be carried, by path.

    Args:
        places: The states of loaders, by place.
    """
    found: dict[str, str] = {}
    for place, state in places.items():
        for worker in (state or {}).get("workers") or ():
            for objects in (worker.get("objects", {}), *_of_position(worker.get("iterable") or {})):
                lost: Mapping[str, str] = objects.get(LOST, {})
                found.update({f"{place}.{path} of a worker": reason for path, reason in lost.items()})
    return found
