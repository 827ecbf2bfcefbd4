"""Schedulers that hold other objects of a fit: a load keeps these objects, and a save writes their plain states.

torch saves the attributes of a scheduler. Another scheduler among them would be loaded as a copy that belongs to a copy
of the optimizer. In the states here, a name stands for each object that refers to an optimizer or the module, and for
each local function, which does not pickle.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_faulttolerant.checkpoint.verify import is_surely_safe
from lightning_faulttolerant.state.objects.decoding import set_attribute
from lightning_faulttolerant.state.objects.kinds import attributes, contents_of_cell, fill
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.resume.parameters import IN_PLACE, optimizers_of

_log = logging.getLogger(__name__)

SCHEDULERS: Final = "schedulers"
"""The key of our part for the states of schedulers, if a checkpoint of other code holds them in another form."""

_LIVE, _STATE = "lightning_faulttolerant.live", "state"
_LOGS = ("log", "log_dict")
_CONTAINERS = (dict, list, tuple, deque)
_SETS = (set, frozenset)
_CALLS = (MethodType, functools.partial, FunctionType)
_CODE = (type, ModuleType, torch.Tensor)


@final
class Schedulers:
    """The schedulers of a fit, and the objects that they hold.

    Args:
        trainer: The trainer that runs the fit. Its schedulers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._warned_of: set[str] = set()
        self._held: dict[str, object] = {}
        """Those that are restored only with their scheduler, by the path that leads to them at the start."""
        known = {id(one) for one in self._restored_elsewhere().values()}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            self._find(f"scheduler {number}", config.scheduler, known)

    def plain(self, states: Any) -> Any:
        """Return the states of all schedulers without these objects, or `states` if they hold none.

        Args:
            states: What each scheduler's ``state_dict`` returned.
        """
        names = {id(one): name for name, one in {**self._restored_elsewhere(), **self._held}.items()}
        to_write = {id(one) for one in self._held.values() if not isinstance(one, _CALLS)}

        def plain(value: Any) -> Any:
            if not _refers(value, names):
                return value
            if id(value) not in names and isinstance(value, _CONTAINERS):
                return _mapped(value, plain)
            name = names.get(id(value)) or self._warn(f"a new {type(value).__qualname__}")
            is_first = id(value) in to_write
            to_write.discard(id(value))
            if is_first and isinstance(value, _SETS):
                return {_LIVE: name, _STATE: sorted(map(plain, value), key=repr)}
            return {_LIVE: name, _STATE: plain(_state_of(value)) if is_first else None}

        return plain(states)

    def load(self, states: Any) -> tuple[Any, list[str]]:
        """Load the states of the objects that schedulers hold.

        Args:
            states: The result of `plain`.

        Returns:
            The states for each scheduler's ``load_state_dict``, and a reason for each object that does not exist.
        """
        objects = {**self._restored_elsewhere(), **self._held}
        reasons: list[str] = []

        def load(value: Any) -> Any:
            if not _is_name(value):
                return _mapped(value, load) if isinstance(value, _CONTAINERS) and _refers(value, ()) else value
            found, state = objects.get(value[_LIVE]), value[_STATE]
            if found is None:
                reasons.append(f"a scheduler held {value[_LIVE]}, which configure_optimizers does not create")
            elif isinstance(state, list):
                fill(found if isinstance(found, set) else set(), load(state))
            elif state is not None and hasattr(found, "load_state_dict"):
                found.load_state_dict(load(state))
            elif state is not None:
                for name, one in load(state).items():
                    set_attribute(found, name, one)
            return found

        return load(states), reasons

    def _warn(self, name: str) -> str:
        if name not in self._warned_of:
            self._warned_of.add(name)
            _log.warning(
                "A resume from now on can't be exact: a scheduler got %s that refers to an optimizer or the module. "
                "Create it in configure_optimizers, and keep several objects of one class in a list, not in a set.",
                name,
            )
        return name

    def _restored_elsewhere(self) -> dict[str, object]:
        module = self._trainer.lightning_module
        found: dict[str, object] = {"trainer": self._trainer}
        found |= {f"scheduler {i}": config.scheduler for i, config in enumerate(self._trainer.lr_scheduler_configs)}
        found |= {f"module.{name}": one for name, one in (*module.named_modules(), *module.named_parameters())}
        for i, optimizer in enumerate(optimizers_of(self._trainer)):
            own = {name: value for name, value in vars(optimizer).items() if name in IN_PLACE}
            found |= {f"optimizer {i}.{name}": value for name, value in own.items()}
            found |= {f"optimizer {i}, group {j}": group for j, group in enumerate(optimizer.param_groups)}
            found[f"optimizer {i}"] = optimizer
        return found

    def _find(self, path: str, value: object, known: set[int]) -> None:
        for key, one in _items_of(value):
            place = f"{path}.{key}"
            if id(one) not in known and _refers(one, known):
                if not isinstance(one, _CONTAINERS):
                    known.add(id(one))
                    self._held[place] = one
                self._find(place, one, known)


def lost_by_callbacks(module: LightningModule, callbacks: Mapping[str, Callback]) -> dict[str, str]:
    """Return the callbacks whose states hold the module or a part of it, by path, with the reason."""
    known = {id(one) for one in (*module.modules(), *module.parameters())}
    reason = "its state_dict returns the module or a part of it; set that in on_fit_start instead"
    states = {f"callbacks[{name!r}]": callback.state_dict() for name, callback in callbacks.items()}
    read = {path: state for path, state in states.items() if isinstance(state, dict)}
    own = {path: [value for key, value in state.items() if key not in _LOGS] for path, state in read.items()}
    return {path: reason for path, values in own.items() if not known.isdisjoint(map(id, _parts_of(values)))}


def restore_logs(trainer: Trainer) -> None:
    """Give each callback that has loaded its ``__dict__`` the live module's ``log`` again."""
    for own in map(vars, compat.callbacks(trainer)):
        own |= {name: getattr(trainer.lightning_module, name) for name in _LOGS if name in own}


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "load_state_dict") else attributes(value)


def _is_name(value: object) -> bool:
    return isinstance(value, dict) and _LIVE in value


def _refers(value: object, known: Collection[int]) -> bool:
    """Return whether a value is, or has inside it, one with a known ID, a name, or a local function."""
    return any(
        id(one) in known or _is_name(one) or (isinstance(one, FunctionType) and "<" in one.__qualname__)
        for one in _parts_of(value)
    )


def _parts_of(value: object) -> Iterator[object]:
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        yield (one := todo.pop())
        if id(one) not in seen and not is_surely_safe(one):
            seen[id(one)] = one
            todo += (item for _, item in _items_of(one))


def _items_of(value: Any) -> Iterable[tuple[object, Any]]:
    """Return what is in a value, each with its key, index, or name; in a set, with its class."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, _SETS):
        return ((type(one).__qualname__, one) for one in value)
    if isinstance(value, _CONTAINERS):
        return enumerate(value)
    if isinstance(value, FunctionType):
        cells = (one for cell in value.__closure__ or () for one in contents_of_cell(cell))
        return enumerate([*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()])
    if isinstance(value, _CALLS):
        return enumerate(value.__reduce__())
    return () if isinstance(value, _CODE) else attributes(value).items()


def _mapped(value: Any, make: Callable[[Any], Any]) -> Any:
    """Return a copy of a container with what `make` returns for each of its values."""
    if isinstance(value, tuple):
        made = tuple(map(make, value))
        return made if type(value) is tuple else type(value)(*made)
    copied = copy.copy(value)
    for key, one in list(_items_of(value)):
        copied[key] = make(one)
    return copied
