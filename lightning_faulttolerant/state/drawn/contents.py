"""The content of the data sets that a script drew: lists, mappings, arrays, and single numbers, by path."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state.drawn import orders
from lightning_faulttolerant.state.drawn.texts import NotPlainError, is_number, text_of
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.decoding import set_attribute
from lightning_faulttolerant.state.objects.walk import Rules, attributes_of
from lightning_faulttolerant.streaming.dataset import StreamingDataset

INDICES = "indices"
PARTS = (Subset, SubsetRandomSampler)
"""The classes of a split's parts."""
_MAX_OBJECTS = 20_000
_FIRST_ITEMS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """A list, a mapping, or an array that an object holds.

    Args:
        value: The list, mapping, or array.
        owner: The object.
        name: The attribute of the object.
        digest: Differs if the elements or their order differ.
    """

    value: Any
    owner: Any
    name: str
    digest: str

    def set(self, elements: Any) -> None:
        """Replace the elements, in the same object if it allows that."""
        if orders.fill(self.value, elements):
            return
        made: Any = None
        if isinstance(self.value, tuple):
            made = tuple(elements)
        else:  # a read-only array
            made = self.value.copy()
            orders.fill(made, elements)
        set_attribute(self.owner, self.name, made)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnContents:
    """Everything that was found.

    Args:
        lists: Lists, mappings, and arrays, by path.
        numbers: The texts of single numbers, by path.
        parts: The parts of splits, by path.
        datasets: The data sets, by path.
    """

    lists: dict[str, Content]
    numbers: dict[str, str]
    parts: dict[str, Any]
    datasets: dict[str, Any]


def contents_of(roots: Mapping[str, object], rules: Rules) -> DrawnContents:
    """Return the content that can be reached from `roots`.

    Args:
        roots: The objects to begin with, by name.
        rules: What is left out.
    """
    found = DrawnContents(lists={}, numbers={}, parts={}, datasets={})
    queue: deque[tuple[str, object]] = deque(roots.items())
    seen: set[int] = set()
    while queue and len(seen) < _MAX_OBJECTS:
        path, value = queue.popleft()
        if kinds.is_leaf(value) or id(value) in seen or isinstance(value, StreamingDataset):
            continue
        seen.add(id(value))
        if is_part(value):
            found.parts[path] = value
        if isinstance(value, Dataset):
            found.datasets[path] = value
        if rules.is_live(value) and not isinstance(value, (Dataset, *PARTS)):
            continue
        for name, child in (attributes_of(value, rules) or {}).items():
            _add(found, queue.append, f"{path}.{name}", value, name, child)
        queue.extend(_held_by(path, value))
    return found


def is_part(value: object) -> bool:
    """Return whether `value` is a part of a split; its indices identify it."""
    return issubclass(type(value), PARTS)


def _add(
    found: DrawnContents,
    look_into: Callable[[tuple[str, object]], None],
    path: str,
    owner: object,
    name: str,
    value: Any,
) -> None:
    if is_number(value):
        found.numbers[path] = text_of(value)
    elif orders.is_ordered(value):
        if is_part(owner) and name == INDICES:
            return
        try:
            if len(value):
                found.lists[path] = Content(value=value, owner=owner, name=name, digest=orders.digest(value))
        except NotPlainError:
            look_into((path, value))
    else:
        look_into((path, value))


def _held_by(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, nn.Module):
        yield from ((f"{path}.{name}", child) for name, child in value.named_children())
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", child) for key, child in islice(value.items(), _FIRST_ITEMS))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{path}[{i}]", child) for i, child in enumerate(islice(value, _FIRST_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f"{path}.{name}", child) for child in kinds.contents_of_cell(cell))
