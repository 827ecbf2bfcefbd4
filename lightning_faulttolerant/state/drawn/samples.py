"""Check whether a list holds a value for each sample, or just a few other values: times, the id of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_faulttolerant.state.drawn.keys import elements_of
from lightning_faulttolerant.state.drawn.texts import names_of
from lightning_faulttolerant.state.objects import kinds


def length_of(dataset: Any) -> int | None:
    """Return the number of samples in a data set; ``None`` if it has no length."""
    if isinstance(dataset, IterableDataset):  # its length may run expensive code of the data set
        return None
    with contextlib.suppress(Exception):
        return len(dataset)
    return None


def may_be_samples(value: Any, datasets: Iterable[Any]) -> bool:
    """Return whether `value` may hold the samples of one of these data sets, or a value for each of them.

    A value that is shorter than each of them does not. Arrays and lists of names are exceptions: they may be data of
    another kind. If a data set has no length, any list may.
    """
    if isinstance(value, Tensor) or kinds.is_array(value):
        return True
    if not isinstance(value, dict) and names_of(elements_of(value)):
        return True
    lengths = [length_of(dataset) for dataset in datasets]
    known = [length for length in lengths if length is not None]
    return len(known) < len(lengths) or not known or num_values(value) >= min(known)


def num_values(value: Any) -> int:
    """Return the number of values in a list or a mapping, including nested ones."""
    if isinstance(value, dict):
        return sum(map(num_values, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)) or kinds.is_container(value):
        return sum(map(num_values, value))
    return kinds.num_items(value) or 1
