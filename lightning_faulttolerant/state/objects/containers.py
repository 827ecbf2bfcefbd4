"""The items of containers, read and written by Python's own methods: no code of a user's subclass runs."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

KINDS = (list, dict, set, deque)


def length_of(value: object) -> int:
    """Return the number of items in a container."""
    return int(_own(value).__len__(value))


def items_of(value: object) -> list[Any]:
    """Return the items of a list, a set, or a deque; the keys of a dict."""
    return [key for key, _ in pairs_of(value)] if isinstance(value, dict) else list(_own(value).__iter__(value))


def pairs_of(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dict, in its order."""
    own: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    return list(own.items(value))


def fill(value: Any, items: Iterable[Any]) -> None:
    """Replace the items of a container by these; pairs for a dict."""
    if isinstance(value, list):
        list.__setitem__(value, slice(None), items)
        return
    found = list(items)
    own: Any = OrderedDict if isinstance(value, OrderedDict) else _own(value)
    own.clear(value)
    if isinstance(value, dict):
        for key, child in found:
            own.__setitem__(value, key, child)
    elif isinstance(value, deque):
        deque.extend(value, found)
    else:
        set.update(value, found)


def _own(value: object) -> Any:
    return next(kind for kind in KINDS if isinstance(value, kind))
