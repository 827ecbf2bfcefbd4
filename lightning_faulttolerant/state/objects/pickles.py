"""Objects that only their library can read, as bytes: for a state that is trusted where it is restored.

The bytes contain no object that other objects refer to: it would be a copy afterwards. Such an object is not carried.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.names import CantCarryError

PICKLED, MADE = "pickled", "made"
_new_object = object().__reduce_ex__(pickle.HIGHEST_PROTOCOL)[0]


class Pickles:
    """Pickles the objects of one save.

    Args:
        is_shared: Whether other objects refer to an object too.
    """

    def __init__(self, is_shared: Callable[[object], bool]) -> None:
        self._is_shared = is_shared
        self._met: dict[int, object] = {}

    def has_met(self, value: object) -> bool:
        """Return whether an object is a part of one that was already pickled."""
        return id(value) in self._met

    def row(self, value: object, reason: CantCarryError) -> list[Any]:
        """Return the encoded form of an object.

        Args:
            value: The object.
            reason: The reason why it can't be carried in any other way.

        Raises:
            CantCarryError: If it can't be pickled, or refers to objects that others refer to.
        """
        buffer = io.BytesIO()
        pickler = _UnsharedPickler(buffer, value, lambda part: self.has_met(part) or self._is_shared(part))
        try:
            pickler.dump(value)
        except _SharedError as error:
            raise CantCarryError(f"{reason}, and which refers to {error}, which other objects also use") from error
        except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
            raise reason from None
        self._met.update(pickler.met)
        return [PICKLED, f"{type(value).__module__}.{type(value).__qualname__}", buffer.getvalue()]


class _SharedError(Exception):
    """An object to be pickled refers to one that other objects refer to."""


class _UnsharedPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, root: object, is_shared: Callable[[object], bool]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._root = root
        self._is_shared = is_shared
        self._of_classes: set[int] = set()
        """Values that a class shares between all its objects: a pandas table includes them in its state."""
        self.met: dict[int, object] = {}

    def persistent_id(self, value: object) -> None:
        for kind in type(value).__mro__:
            self._of_classes.update(map(id, vars(kind).values()))
        if value is self._root or id(value) in self._of_classes or _can_not_change(value):
            return
        has_more = isinstance(value, Tensor) and (
            value.grad_fn is not None or (value.is_leaf and value.grad is not None)
        )
        if has_more or self._is_shared(value):
            raise _SharedError(f"a {type(value).__name__}")
        self.met[id(value)] = value


def _can_not_change(value: object) -> bool:
    """Return whether a copy of a value is as good: texts and numbers. Functions and classes are pickled by name."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, tuple, frozenset):
        return True
    return kinds.is_leaf(value) or kinds.is_numpy(value, "dtype") or getattr(value, "__qualname__", None) is not None


def has_pickles(state: Mapping[str, object]) -> bool:
    """Return whether an object state holds objects as bytes."""
    return any(True for _ in _rows_of(state))


def unpickled(state: Mapping[str, object]) -> dict[str, object]:
    """Return an object state with its objects in place of their bytes: this runs any code in the bytes.

    An object that can't be created again stays as bytes, and is not restored.
    """
    for row in _rows_of(state):
        row[:] = _made(row)
    return dict(state)


def _made(row: list[Any]) -> list[Any]:
    try:
        return [MADE, pickle.loads(row[2])]
    except Exception as error:  # noqa: BLE001 - any class may raise anything when it is unpickled
        return [PICKLED, f"{row[1]} ({type(error).__name__}: {error})", row[2]]


def has_whole_state(value: object) -> bool:
    """Return whether an object can take the state of another of its class: pickle's last step sets all of it."""
    if not hasattr(type(value), "__setstate__"):
        return False
    try:
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
        return False
    if not isinstance(reduced, tuple) or len(reduced) < 3 or reduced[2] is None or any(reduced[3:]):
        return False
    return reduced[0] is _new_object and reduced[1] == (type(value),)


def set_state(value: Any, made: Any) -> bool:
    """Copy another object's state by ``__setstate__`` of their class; return whether that is possible."""
    if type(value) is not type(made) or not has_whole_state(made):
        return False
    value.__setstate__(made.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2])
    return True


def _rows_of(state: Mapping[str, Any]) -> Iterator[list[object]]:
    contents = [content.get("<content>") for content in state.get("nodes", {}).values()]
    rows: Sequence[Any] = [*state.get("table", ()), *contents]
    return (row for row in rows if isinstance(row, list) and row and row[0] == PICKLED)
