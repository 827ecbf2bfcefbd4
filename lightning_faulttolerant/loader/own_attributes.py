"""The attributes that a user's ``DataLoader`` class adds to torch's.

The class that a user's loader gets for a fit: like its own, with iterators that are followed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.state.objects.kinds import has_state_methods
from lightning_faulttolerant.state.objects.users import names_in_code, names_in_libraries

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


def swap(loader: object, other: type) -> None:
    """Give `loader` another class, even if its own refuses attribute assignment.

    Raises:
        TypeError: If an object of its class can't change its class.
    """
    object.__setattr__(loader, "__class__", other)


TRACKER = "fault_tolerance_tracker"
"""The attribute of a followed loader that holds its tracker."""


TORCHS = frozenset(vars(DataLoader([0])))  # type: ignore[arg-type]
"""The attributes that torch gives to every loader."""


@functools.cache
def names_of_makers(maker: type[DataLoader[object]]) -> frozenset[str]:
    """Return the attributes of a loader that are torch's or torchdata's: every name that their methods use."""
    methods = (value for base in maker.__mro__ for value in vars(base).values())
    return names_in_code(methods) | frozenset(dir(maker)) | TORCHS


def names_of_others(kind: type[DataLoader[object]]) -> frozenset[str]:
    """Return the attributes of a loader that are not the user's."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith(("torch.", "torchdata."))]
    return names_of_makers(bases[0]) | names_in_libraries(kind)


def has_own_class(loader: object) -> bool:
    """Return whether a loader's class is neither torch's nor torchdata's, and the loader is not a followed copy."""
    if not isinstance(loader, DataLoader) or TRACKER in vars(loader):
        return False
    return not type(loader).__module__.startswith(("torch.", "torchdata."))


def has_own_state(loader: object) -> bool:
    """Return whether the attributes that a loader's class adds to torch's are kept, as any user object is."""
    return has_own_class(loader) and not has_state_methods(loader) and not hasattr(type(loader), REPLAYED)


def sharing(names: frozenset[str], owner_of: Callable[[object], object]) -> dict[str, object]:
    """Return the methods of a class whose objects share their attributes with another object.

    Args:
        names: The names of attributes that are not shared.
        owner_of: Returns the other object; ``None`` as long as none exists.
    """

    def owner_for(self: object, name: str) -> object:
        return None if name in names or name.startswith("__") else owner_of(self)

    def __getattribute__(self: object, name: str) -> object:  # noqa: N807 - they become methods
        owner = owner_for(self, name)
        if owner is not None and name in vars(owner):
            return vars(owner)[name]
        return object.__getattribute__(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        owner = owner_for(self, name)
        if owner is not None:
            setattr(owner, name, value)
        else:
            DataLoader.__setattr__(self, name, value)

    def __delattr__(self: object, name: str) -> None:  # noqa: N807
        owner = owner_for(self, name)
        if owner is not None:
            delattr(owner, name)
        object.__delattr__(self, name)

    return {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__}
