"""torchdata's ``StatefulDataLoader``: followed like any other loader. Its own state of the position is not used.

Its own state has the order only, without the random states of its workers. Two positions would be restored.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.loader.plain_state import has_state_methods, what_is_not_plain
from lightning_faulttolerant.loader.tracked_class import keeps_own_position


def why_not_followed(loader: DataLoader[Any]) -> str | None:
    """Return why the ``StatefulDataLoader`` `loader` can't be followed, or ``None`` if it can."""
    for name in ("state_dict", "load_state_dict"):
        owner = next(base for base in type(loader).__mro__ if name in vars(base))
        if not owner.__module__.startswith("torchdata."):
            return f"{type(loader).__name__} has a {name} of its own, which would not be called"
    if vars(loader).get("_initial_iter_for_state_dict"):
        return "it already has its own iterator (made by its state_dict before fit)"
    dataset = stateful_dataset(loader)
    strange = None if dataset is None else what_is_not_plain(dataset.state_dict())
    return strange and f"the state_dict of its data set has {strange}; give it plain values and tensors only"


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
