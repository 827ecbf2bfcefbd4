"""The class that a user's loader gets for a fit: like its own, with iterators that are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

REPLAYED = "is_replayed_by_fault_tolerance"
"""The attribute of the class of loaders that are resumed with all their objects by a replay."""


def class_of(
    user_class: Any, iterate: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]], **attributes: Any
) -> type:
    """Return a class like `user_class` with additional attributes. `iterate` creates its iterators."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - it becomes a method
        return iterate(lambda: user_class.__iter__(self))  # not `iter` of it: that may be the loader itself

    # Adds no slots: otherwise an object could not change to this class and back.
    namespace = {"__iter__": __iter__, "__slots__": (), "__module__": user_class.__module__, **attributes}
    return type(user_class.__name__, (user_class,), {**namespace, "__doc__": user_class.__doc__})


def swap(loader: Any, other: type) -> None:
    """Give `loader` another class, even if its own refuses attribute assignment.

    Raises:
        TypeError: If an object of its class can't change its class.
    """
    object.__setattr__(loader, "__class__", other)
