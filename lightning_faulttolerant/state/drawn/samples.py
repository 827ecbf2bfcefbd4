"""Whether a list holds something for each sample, or is one of a few values beside them: times, an id of a process."""

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
    """Return how many samples a data set has; ``None`` if it does not say so."""
    if isinstance(dataset, IterableDataset):  # its length may be the work of the data set's own code
        return None
    with contextlib.suppress(Exception):
        return len(dataset)
    return None


def may_be_samples(value: Any, datasets: Iterable[Any]) -> bool:
    """Return whether `value` may hold the samples of one of these data sets, or something of each of them.

    What is shorter than each of them does not, if it is neither an array nor a list of names, which may be data of
    another kind. Next to a data set without a length each list may.
    """
    if isinstance(value, Tensor) or kinds.is_array(value):
        return True
    if not isinstance(value, dict) and names_of(elements_of(value)):
        return True
    lengths = [length_of(dataset) for dataset in datasets]
    known = [length for length in lengths if length is not None]
    return len(known) < len(lengths) or not known or num_values(value) >= min(known)


def num_values(value: Any) -> int:
    """Return how many values a list or a mapping holds, those inside others counted."""
    if isinstance(value, dict):
        return sum(map(num_values, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)) or kinds.is_container(value):
        return sum(map(num_values, value))
    return kinds.num_items(value) or 1
