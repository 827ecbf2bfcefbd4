"""Objects that have not changed yet, all compared together.

A worker checks its objects after each batch, so a check must cost next to nothing while nothing changes.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.children import Node
from lightning_faulttolerant.state.objects.marks import MANY_ITEMS
from lightning_faulttolerant.state.reachable import has_dict

_SEQUENCES = (list, deque)
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_values_of = operator.methodcaller("values")
_EMPTY = object()


class Unchanged:
    """Objects that are unchanged since they were recorded.

    Their attributes and items are compared by identity, at the speed of C. Only if one differs, each object is checked
    separately.

    Args:
        nodes: The objects, by path.
        has_changed: Checks one object separately.
    """

    def __init__(self, nodes: Mapping[str, Node], has_changed: Callable[[Node], bool]) -> None:
        self._nodes = dict(nodes)
        self._has_changed = has_changed
        self._note()

    def _note(self) -> None:
        """Record the current content of all of them."""
        self._one_by_one: list[str] = []
        self._owners: list[Any] = []
        self._namespaces: list[Any] = []
        self._sequences: list[Any] = []
        self._mappings: list[object] = []
        self._slots: list[Callable[[], Any]] = []
        for path, node in self._nodes.items():
            if not self._takes(node):
                self._one_by_one.append(path)
        self._noted = self._look()

    def _takes(self, node: Node) -> bool:
        """Include an object in the common comparison; return whether that is possible."""
        value, kind = node.value, type(node.value)
        if node.holds_weakly:
            return False
        if node.mark is not None:
            is_plain = node.attributes is None and kind in (*_SEQUENCES, *_MAPPINGS) and len(value) < MANY_ITEMS
            if is_plain:
                (self._sequences if kind in _SEQUENCES else self._mappings).append(value)
            return is_plain
        if node.raw is not None:
            self._namespaces.append(value.owner) if kind is kinds.Namespace else self._owners.append(value)
            return True
        if node.attributes is None or kind is kinds.Namespace:
            return False
        if has_dict(kind):
            self._owners.append(value)
        self._slots += [partial(slot.__get__, value) for _, slot in kinds.slots_of(kind)]
        return True

    def _look(self) -> list[list[int]]:
        own = map(object.__getattribute__, self._owners, repeat("__dict__"))
        dicts = [*own, *map(vars, self._namespaces), *self._mappings]
        return [
            _ids_in(self._slots),
            [*map(len, dicts), *map(len, self._sequences)],
            [*map(id, chain.from_iterable(dicts))],
            [*map(id, chain.from_iterable(map(_values_of, dicts)))],
            [*map(id, chain.from_iterable(self._sequences))],
        ]

    def take_changed(self) -> list[str]:
        """Return the paths of the objects that have changed, and drop them from this collection."""
        is_same = self._look() == self._noted
        paths = self._one_by_one if is_same else list(self._nodes)
        changed = [path for path in paths if self._has_changed(self._nodes[path])]
        for path in changed:
            del self._nodes[path]
        if changed or not is_same:  # equal but no longer identical values are recorded again
            self._note()
        return changed


def _ids_in(slots: list[Callable[[], object]]) -> list[int]:
    try:
        return [id(slot()) for slot in slots]
    except AttributeError:
        return [id(_held(slot)) for slot in slots]


def _held(slot: Callable[[], object]) -> Any:
    try:
        return slot()
    except AttributeError:  # an empty slot
        return _EMPTY
