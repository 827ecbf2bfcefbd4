"""What the iterations of a loader that is not a ``DataLoader`` depend on: its objects, and iterators in them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.objects import goes_by_attributes, kept_as_now
from lightning_faulttolerant.loader.own_attributes import TORCHS
from lightning_faulttolerant.state.differences import digests_of
from lightning_faulttolerant.state.objects.kinds import Namespace, is_shared, is_walked
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, TABLE, ObjectState
from lightning_faulttolerant.state.objects.users import names_in_libraries
from lightning_faulttolerant.state.objects.walk import Rules, graph_of

_LOADER, _GLOBALS = "loader", "globals"
# Queues, pools, and processes: the data in them, and the work that runs there, is part of the next batches.
_RUNNING = frozenset({"_queue", "concurrent", "multiprocessing"})


def _left_out(value: object) -> Collection[str]:
    if isinstance(value, Namespace) and isinstance(value.owner, DataLoader):
        return TORCHS | names_in_libraries(type(value.owner))
    return names_in_libraries(type(value))


_RULES = Rules(
    is_live=lambda value: isinstance(value, (nn.Module, DataLoader)) or is_shared(value),
    goes_by_attributes=goes_by_attributes,
    left_out=_left_out,
)
_NO_PART = (nn.Module, nn.Parameter, torch.optim.Optimizer, DataLoader)  # not part of what a loader reads in globals
_NEAR = replace(_RULES, max_items=1_000)  # no iterators are kept among this many items


class LiveObjects:
    """The objects of one loader.

    Args:
        loader: The user's loader.
        older: The objects of other loaders, with older baselines: the sanity check may have changed shared ones since.
    """

    def __init__(self, loader: object, *, older: Iterable[LiveObjects] = ()) -> None:
        self._loader = loader
        self._namespaces: dict[int, Namespace] = {}  # one for each torch loader: another loader has another baseline
        self._state = ObjectState(self._roots(), _RULES)
        self._globals = self._globals_around(loader)
        self._older = list(older)
        self._before: list[Mapping[str, Any]] = []
        for other in self._older:
            for own in (self._state, self._globals):
                own.share(other._globals)
                own.share(other._state)

    def _globals_around(self, loader: object) -> ObjectState:
        """Return the globals of the user's modules, without the loader's own objects."""
        own = self._state.things_of(lambda value: True)
        ids = {id(value) for value in own.values()}
        rules = replace(_RULES, is_live=lambda value: id(value) in ids or _is_no_part(value))
        return ObjectState(users_namespaces({_LOADER: loader}), rules)

    def _roots(self) -> dict[str, object]:
        roots = {_LOADER: self._loader}
        for name, inner in torch_loaders_in(self._loader).items():
            known = {id(one) for one in roots.values()}
            children = {f"{name}.{key}": child for key, child in vars(inner).items() if not _is_users(key)}
            roots.update({path: child for path, child in children.items() if id(child) not in known})
            roots[f"{name}'s own"] = self._namespaces.setdefault(id(inner), Namespace(owner=inner))
        return roots

    def state_dict(self) -> dict[str, Any]:
        """Return the changes since this object was created; an empty dict if there are none."""
        self._state.add(self._roots())
        return _if_any(self._state.state_dict())

    def at_start(self) -> dict[str, object]:
        """Return the same, with the changes on the globals of the user's modules, which an iteration may read."""
        around = _if_any(self._globals.state_dict())
        return {**self.state_dict(), **({_GLOBALS: around} if around else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a state of `state_dict`, unless nothing differs; return what could not be restored."""
        if _GLOBALS in state:  # a global that is missing now shows in the batches, if they depend on it
            self._globals.load_state_dict(state[_GLOBALS])
        if NODES not in state:
            return []
        self._state.add(self._roots())
        own = {name: state[name] for name in (NODES, TABLE, LOST)}
        return [] if digest_of(self.state_dict()) == digest_of(own) else self._state.load_state_dict(own)

    def begin_load(self, *states: Mapping[str, Any]) -> None:
        """Prepare to load `states`: shared objects that other loaders have loaded are reset to earlier values."""
        shared = {id(value) for value in self._state.things_of(lambda value: True).values()}
        for other in self._older:
            other.unload(shared)
        self._before = [self._state.values_of(state) for state in states if NODES in state]

    def unload(self, ids: Collection[int]) -> None:
        """Reset those of its objects with an ``id`` in `ids` to their values before `begin_load`."""
        things = self._state.things_of(lambda value: True)
        for state in self._before:
            nodes = {path: content for path, content in state[NODES].items() if id(things.get(path)) in ids}
            self._state.load_state_dict({**state, NODES: nodes})

    def globals_kept(self, *states: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Restore the current values of globals after the block. The block may load them from these `states`."""
        return kept_as_now(self._globals, [state[_GLOBALS] for state in states if _GLOBALS in state])

    def live(self) -> dict[str, Any]:
        """Return the iterators, threads, and queues that the next iteration may continue from, by path."""
        return {path: value for path, value in _things_in(self._roots()).items() if _is_live(value)}


def torch_loaders_in(loader: object) -> dict[str, DataLoader[object]]:
    """Return the torch loaders that `loader` is or holds, and those that these hold, by path."""
    found: dict[str, DataLoader[object]] = {}
    queue = [(_LOADER, loader)]
    while queue:
        name, value = queue.pop()
        if isinstance(value, DataLoader):
            found[name] = value
            children = {f"{name}.{key}": child for key, child in vars(value).items()}
            things = {path: thing for path, thing in children.items() if isinstance(thing, DataLoader)}
            things.update(_things_in({path: child for path, child in children.items() if path not in things}))
        else:
            things = _things_in({name: value})
        known = {id(one) for one in found.values()}
        queue += [(path, one) for path, one in things.items() if isinstance(one, DataLoader) and id(one) not in known]
    return found


def _things_in(roots: Mapping[str, object]) -> dict[str, Any]:
    return graph_of(roots, _NEAR, lambda one: None, with_contents=False).things


def _is_live(value: object) -> bool:
    if isinstance(value, Iterator):
        return not is_walked(value)
    kind = type(value)
    return isinstance(value, threading.Thread) or kind.__module__.partition(".")[0] in _RUNNING


def _is_users(name: str) -> bool:
    """Return whether an attribute of a torch loader is neither torch's nor Lightning's."""
    return name not in TORCHS and not name.startswith("__")


def _is_no_part(value: object) -> bool:
    return isinstance(value, _NO_PART) or is_shared(value)


def _if_any(state: dict[str, object]) -> dict[str, object]:
    return state if state[NODES] or state[LOST] else {}


def digest_of(state: Mapping[str, Any]) -> Any:
    """Return a value that distinguishes the changes on objects, without the parts that could not be carried."""
    around = state.get(_GLOBALS, {})
    return digests_of({name: [state.get(name), around.get(name)] for name in (NODES, TABLE)})
