"""Which loaders can be resumed exactly, why others can't, and the class of a loader that is followed.

That class is the user's class, with a hook at the place that creates iterators. The attributes that a user's class adds
to torch's stay in the user's object. The followed object is a copy of it.

A loader, its data set, or its samplers may have a ``state_dict``. In manual mode, nothing is wrapped or replayed: the
states of these objects are saved and loaded back into them. A data set may belong to several loaders that all advance
its state.

torchdata's ``StatefulDataLoader`` is followed like any other loader. Its own state has the order only, without the
random states of its workers. It is not used: two positions would be restored.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from lightning_faulttolerant.errors import NotExactError, worded
from lightning_faulttolerant.loader.data_sets import (
    is_loader_of,
    refills_its_buffer,
    why_drawn_by_the_clock,
    why_not_followed as why_foreign_not_followed,
)
from lightning_faulttolerant.loader.samplers import has_state, state_of, what_is_not_plain
from lightning_faulttolerant.state.objects.kinds import has_state_methods
from lightning_faulttolerant.state.reachable import names_in_code, names_in_libraries
from lightning_faulttolerant.streaming import is_loader_class

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
    return hasattr(user_class, RESUMABLE) or is_loader_class(user_class) or is_loader_of(user_class)


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
        # Lightning calls it at each checkpoint. The tracker's state has the position; nothing must be restored twice.
        namespace |= {"state_dict": lambda self: {}, "load_state_dict": _load_no_state}
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


def begin_plainly(followed: DataLoader[object]) -> None:
    """Begin an iteration of the followed copy as the user's ``__iter__`` would, without running that."""
    _before(_maker(type(followed))).__iter__(followed)


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


def why_not_followed(loader: DataLoader[object]) -> str | None:
    """Return why the ``StatefulDataLoader`` `loader` can't be followed, or ``None`` if it can."""
    for name in ("state_dict", "load_state_dict"):
        owner = next(base for base in type(loader).__mro__ if name in vars(base))
        if not owner.__module__.startswith("torchdata."):
            return f"{type(loader).__name__} has its own {name}, which would not be called"
    if vars(loader).get("_initial_iter_for_state_dict"):
        return "it already has its own iterator (created by its state_dict before fit)"
    dataset = stateful_dataset(loader)
    strange = None if dataset is None else what_is_not_plain(dataset.state_dict())
    return strange and f"the state_dict of its data set has {strange}; give it only plain values and tensors"


def was_given_position(loader: DataLoader[object]) -> bool:
    """Return whether the next iteration over `loader` begins at a position that was loaded before."""
    return bool(vars(loader).get("next_iter_state"))


def starts_over(loader: DataLoader[object]) -> bool:
    """Return whether the next iteration creates an iterator, although `loader` still holds the last one."""
    return keeps_own_position(loader) and not loader.persistent_workers


def forget_own_position(followed: DataLoader[object]) -> None:
    """Let the followed copy begin as a new loader."""
    if keeps_own_position(followed):
        vars(followed).update(next_iter_state=None, _iterator=None)


def stateful_dataset(loader: DataLoader[object]) -> Any | None:
    """Return the map-style data set of a ``StatefulDataLoader`` if it keeps a state, which torchdata restores."""
    dataset = loader.dataset
    if not keeps_own_position(loader) or isinstance(dataset, IterableDataset) or not has_state_methods(dataset):
        return None
    return dataset


_PARTS = ("dataset", "sampler", "batch_sampler")


class OwnState:
    """The objects of one loader that keep their own state.

    Args:
        loader: Any iterable; a torch ``DataLoader`` may keep its state in its data set and its samplers, too.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parts = {"loader": loader} if has_state_methods(loader) else {}
        if not parts and isinstance(loader, DataLoader):
            parts = {name: getattr(loader, name, None) for name in _PARTS}
        self._parts = {name: part for name, part in parts.items() if has_state_methods(part)}

    def why_not_exact(self) -> str | None:
        """Return why the loader's own objects can't report its position, or ``None`` if they can."""
        if not self._parts:
            return "neither it nor its data set, sampler, or batch sampler has state_dict and load_state_dict"
        workers = getattr(self._loader, "num_workers", 0)
        if workers and "loader" not in self._parts:
            return (
                f"its {workers} workers have copies of the {' and the '.join(self._parts)}, and run ahead, so the "
                "state in this process does not belong to the consumed batches"
            )
        return None

    def state_dict(self) -> dict[str, object]:
        """Return a copy of each object's state, by the object's name: ``loader``, or ``dataset``, ``sampler``, ..."""
        return {name: state_of(part) for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the states. The next iteration continues from there, if the objects do as they promise."""
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(copy.deepcopy(state[name]))


def share_a_state(loader: DataLoader[object], other: DataLoader[object]) -> bool:
    """Return whether both loaders have one data set with a state that is part of their positions and changes here.

    Workers change copies. If both loaders have workers, each has its own states.
    """
    if loader.dataset is not other.dataset or (loader.num_workers and other.num_workers):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader.dataset) and not refills_its_buffer(loader.dataset)
    return stateful_dataset(loader) is not None or stateful_dataset(other) is not None


_log = logging.getLogger(__name__)


@final
class Exactness:
    """Collects why a fit or a loop is not exact. Everything that follows one of its loaders reports to this object.

    Args:
        strict: Whether a reason is an error; ``None`` if it is only collected, without a warning.
    """

    def __init__(self, *, strict: bool | None = True) -> None:
        self.strict = strict
        self.reasons: list[str] = []
        """Each reason once, in the order in which they were found."""

    def refuse(self, reason: str) -> None:
        """Raise if `strict`; otherwise collect `reason`, and warn of it once.

        Raises:
            NotExactError: If `strict`.
        """
        if self.strict:
            raise NotExactError(reason)
        self._collect(reason, warns=self.strict is not None)

    def admit(self, reason: str) -> None:
        """Collect `reason` and warn of it once, whether or not `strict`: it is too late for an error."""
        self._collect(reason, warns=True)

    def of_worker(self) -> Exactness:
        """Return the collector of a worker, as strict as this one. The main process admits the worker's reasons."""
        return Exactness(strict=self.strict)

    def _collect(self, reason: str, *, warns: bool) -> None:
        if reason in self.reasons:
            return
        self.reasons.append(reason)
        if warns and get_worker_info() is None:  # the main process warns of what its workers report
            _log.warning(worded(reason))


def lacks_generators(paths: list[str]) -> str:
    """Return the reason why a state can't be continued from if some of its generators no longer exist."""
    return (
        f"the generator {', '.join(paths)} does not exist, so its state can't be restored. Its draws would differ "
        "from the uninterrupted run. Create it before it is first used; or pass strict=False."
    )


def needs_no_position(loader: object) -> bool:
    """Return whether whole runs over `loader` can be repeated exactly, although a position in it can't be resumed.

    This holds if every run begins at the start again, in this process or in new workers.
    """
    if not isinstance(loader, DataLoader):
        return True
    keeps_workers = loader.persistent_workers or getattr(loader, "_iterator", None) is not None
    return not keeps_workers and getattr(loader, "in_order", True)


def why_not_exact(loader: object) -> str | None:
    """Return why `loader` can't be resumed exactly, or ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"its class {type(loader).__name__} is not a torch DataLoader"
    reason = why_not_drawn_again(loader)
    if reason is None and any(_is_torchs_iterator(held) for held in vars(loader).values()) and not starts_over(loader):
        return "it already has its own iterator (created before fit), so its workers can't be reached"
    return reason


def why_not_drawn_again(loader: DataLoader[object]) -> str | None:
    """Return why `loader`, created again, would not yield the same batches again, or ``None`` if it would."""
    if isinstance(loader.dataset, IterDataPipe):
        return "its data set is a data pipe, which is not supported"
    if (reason := why_foreign_not_followed(loader) or why_drawn_by_the_clock(loader.dataset)) is not None:
        return reason
    if keeps_own_position(loader):
        reason = why_not_followed(loader)
        if reason is not None:
            return reason
    elif is_resumable(loader):
        if getattr(loader, "state", None) is not None:
            return "a state was loaded into it before fit, so its first epoch would begin at an unknown position"
    elif hasattr(loader, "state_dict"):
        return f"a {type(loader).__name__} keeps its own state, which lacks the random states of its workers"
    if not getattr(loader, "in_order", True):
        return "with in_order=False, the order of its batches depends on the speed of its workers; set in_order=True"
    return None


def _is_torchs_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and type(value).__module__.startswith(("torch.utils.data", "torchdata."))
