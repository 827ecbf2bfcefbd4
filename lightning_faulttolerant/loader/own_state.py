"""Loaders with a position in user objects: the loader, its data set, or its samplers have a ``state_dict``.

Nothing is wrapped or replayed here. The states of these objects are saved and loaded back into them.

A data set may belong to several loaders that all advance its state.

torchdata's ``StatefulDataLoader``: followed like any other loader. Its own state of the position is not used.

Its own state has the order only, without the random states of its workers. Two positions would be restored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.loader.hugging_face import refills_its_buffer
from lightning_faulttolerant.loader.samplers import has_state, has_state_methods, state_of, what_is_not_plain
from lightning_faulttolerant.loader.tracked_class import keeps_own_position


def why_not_followed(loader: DataLoader[Any]) -> str | None:
    """Return why the ``StatefulDataLoader`` `loader` can't be followed, or ``None`` if it can."""
    for name in ("state_dict", "load_state_dict"):
        owner = next(base for base in type(loader).__mro__ if name in vars(base))
        if not owner.__module__.startswith("torchdata."):
            return f"{type(loader).__name__} has its own {name}, which would not be called"
    if vars(loader).get("_initial_iter_for_state_dict"):
        return "it already has its own iterator (created by its state_dict before fit)"
    dataset = stateful_dataset(loader)
    strange = None if dataset is None else what_is_not_plain(dataset.state_dict())
    return strange and f"the state_dict of its data set has {strange}; give it only plain values and tensors"


def was_given_position(loader: DataLoader[Any]) -> bool:
    """Return whether the next iteration over `loader` begins at a position that was loaded before."""
    return bool(vars(loader).get("next_iter_state"))


def starts_over(loader: DataLoader[Any]) -> bool:
    """Return whether the next iteration creates an iterator, although `loader` still holds the last one."""
    return keeps_own_position(loader) and not loader.persistent_workers


def forget_own_position(followed: DataLoader[Any]) -> None:
    """Let the followed copy begin as a new loader."""
    if keeps_own_position(followed):
        vars(followed).update(next_iter_state=None, _iterator=None)


def stateful_dataset(loader: DataLoader[Any]) -> Any | None:
    """Return the map-style data set of a ``StatefulDataLoader`` if it keeps a state, which torchdata restores."""
    dataset = loader.dataset
    if not keeps_own_position(loader) or isinstance(dataset, IterableDataset) or not has_state_methods(dataset):
        return None
    return dataset


_PARTS = ("dataset", "sampler", "batch_sampler")


class OwnState:
    """The objects of one loader that keep their own state.

    Args:
        loader: Any iterable; a torch ``DataLoader`` may keep its state in its data set and its samplers, too.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parts = {"loader": loader} if has_state_methods(loader) else {}
        if not parts and isinstance(loader, DataLoader):
            parts = {name: getattr(loader, name, None) for name in _PARTS}
        self._parts = {name: part for name, part in parts.items() if has_state_methods(part)}

    def why_not_exact(self) -> str | None:
        """Return why the loader's own objects can't report its position, or ``None`` if they can."""
        if not self._parts:
            return "neither it nor its data set, sampler, or batch sampler has state_dict and load_state_dict"
        workers = getattr(self._loader, "num_workers", 0)
        if workers and "loader" not in self._parts:
            return (
                f"its {workers} workers have copies of the {' and the '.join(self._parts)}, and run ahead, so the "
                "state in this process does not belong to the consumed batches"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of each object's state, by the object's name: ``loader``, or ``dataset``, ``sampler``, ..."""
        return {name: state_of(part) for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states. The next iteration continues from there, if the objects do as they promise."""
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(copy.deepcopy(state[name]))


def share_a_state(loader: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Return whether both loaders have one data set with a state that is part of their positions and changes here.

    Workers change copies. If both loaders have workers, each has its own states.
    """
    if loader.dataset is not other.dataset or (loader.num_workers and other.num_workers):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader.dataset) and not refills_its_buffer(loader.dataset)
    return stateful_dataset(loader) is not None or stateful_dataset(other) is not None
