"""The class of a loader that is followed: the user's class, with a hook at the place that creates iterators.

The attributes that a user's class adds to torch's stay in the user's object. The followed object is a copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.foreign import is_loader_of
from lightning_faulttolerant.state.objects.kinds import has_state_methods
from lightning_faulttolerant.state.objects.users import names_in_code, names_in_libraries
from lightning_faulttolerant.streaming.loader import StreamingDataLoader

REPLAYED = "is_replayed_by_fault_tolerance"
"""The attribute of the class of loaders that are resumed with all their objects by a replay."""


def class_of(
    user_class: Any, iterate: Callable[[Callable[[], Iterator[object]]], Iterator[object]], **attributes: object
) -> type:
    """Return a class like `user_class` with additional attributes. `iterate` creates its iterators."""

    def __iter__(self: Any) -> Iterator[object]:  # noqa: N807 - it becomes a method
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


RESUMABLE = "is_resumable_in_a_loop_of_ones_own"
"""The class attribute that marks loaders of this package that keep their own state."""


def keeps_own_position(loader: object) -> bool:
    """Return whether `loader` is torchdata's ``StatefulDataLoader``, which creates stateful iterators itself."""
    return _maker(type(loader)).__module__.startswith("torchdata.")


def is_resumable(loader: object) -> bool:
    """Return whether `loader` is one of this package's with a state, or a streaming one; both are followed as usual."""
    return isinstance(loader, DataLoader) and _is_ours(type(loader))


def _is_ours(user_class: type) -> bool:
    return hasattr(user_class, RESUMABLE) or issubclass(user_class, StreamingDataLoader) or is_loader_of(user_class)


def _maker(user_class: type) -> type:
    """Return the class that really creates the iterators of a user's class: torch's or torchdata's."""
    # torchdata is recognized by its name: it need not be installed.
    for base in user_class.__mro__:
        if base.__module__.startswith("torchdata.") and "__iter__" in vars(base):
            return base
    return DataLoader


class _Asked(DataLoader[object]):
    """Comes before a user's class. If its ``__iter__`` is a generator, nothing has begun yet when it is called."""

    def __iter__(self) -> Any:
        vars(self)[TRACKER].ask()
        return super().__iter__()


@functools.cache
def tracked_class(user_class: type[DataLoader[object]]) -> type[DataLoader[object]]:
    """Return the class of the followed copy of a loader of `user_class`."""
    maker = _maker(user_class)
    tracked = _before(maker)
    namespace: dict[str, object] = {"__module__": user_class.__module__, "__doc__": user_class.__doc__}
    namespace["_index_sampler"] = property(functools.partial(_followed_sampler, user_class))
    if maker is not DataLoader or _is_ours(user_class):
        namespace |= {"state_dict": _no_state, "load_state_dict": _load_no_state}
    if user_class is not maker and not _is_ours(user_class):
        namespace |= sharing(names_of_makers(maker), _users)
    bases = (tracked,) if user_class is maker else (_Asked, user_class, tracked)
    return type(user_class.__name__, bases, namespace)


def _followed_sampler(user_class: type[DataLoader[object]], self: DataLoader[object]) -> object:
    # The loader's own samplers stay in their attributes, for code that looks at them. Only iterators get the stand-in.
    tracker = vars(self).get(TRACKER)
    if tracker is None:  # `self` is not the followed copy, but one that other code has made of its class
        return user_class._index_sampler.__get__(self)
    return tracker.index_side


def _users(followed: object) -> Any:
    """Return the user's loader. A followed copy shares its attributes: both sides may set them in the fit."""
    tracker = object.__getattribute__(followed, "__dict__").get(TRACKER)
    return None if tracker is None else tracker.user_loader


@functools.cache
def _before(maker: Any) -> type[DataLoader[object]]:
    """Return the class between a user's class and `maker`. The user's ``super().__iter__()`` calls it.

    It really creates a new iterator, even if the user's ``__iter__`` is a generator that runs later.
    """

    class Tracked(maker):  # type: ignore[misc]  # a class that is not known before
        def __iter__(self) -> Any:
            return vars(self)[TRACKER].iterate(super().__iter__)

    return Tracked


def _no_state(self: object) -> dict[str, object]:
    # Lightning calls it at each checkpoint. The tracker's state has the position; nothing must be restored twice.
    return {}


def _load_no_state(self: object, state_dict: Mapping[str, object]) -> None:
    if not state_dict:
        return
    message = (
        f"A state was loaded into {type(self).__name__}, whose position FaultTolerance keeps and restores. It would "
        "be restored twice. Leave its state_dict and load_state_dict to FaultTolerance."
    )
    exactness = vars(self)[TRACKER].exactness
    if exactness.strict:
        raise NotExactError(message)
    exactness.admit(message)
