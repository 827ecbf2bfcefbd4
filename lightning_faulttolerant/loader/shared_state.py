"""Data sets that keep their own state and belong to several loaders, all of which advance it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.loader.hugging_face import refills_its_buffer
from lightning_faulttolerant.loader.own_position import stateful_dataset
from lightning_faulttolerant.loader.plain_state import has_state


def share_a_state(loader: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Return whether both loaders have one data set with a state that is part of their positions and changes here.

    Workers change copies. If both loaders have workers, each has its own states.
    """
    if loader.dataset is not other.dataset or (loader.num_workers and other.num_workers):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader.dataset) and not refills_its_buffer(loader.dataset)
    return stateful_dataset(loader) is not None or stateful_dataset(other) is not None
