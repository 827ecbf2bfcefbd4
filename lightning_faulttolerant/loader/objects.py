"""The user's objects that a loader's iterations change: in its samplers, in its workers, and in loaders of other kinds.

A sampler is started again from the state that its objects had at its start. Workers are created again from the state at
their creation. The changes that fetching makes on a worker's copies travel with the worker's state. A loader that is
not a ``DataLoader`` depends on its own objects, and on iterators in them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_faulttolerant.loader.caches import is_built_again
from lightning_faulttolerant.loader.exactness import TORCHS, has_own_class, names_of_others
from lightning_faulttolerant.loader.samplers import index_sampler
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.kinds import (
    Namespace,
    has_state_methods,
    is_shared,
    is_shared_value,
    is_walked,
)
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE
from lightning_faulttolerant.state.objects.walk import Rules, graph_of, users_namespaces
from lightning_faulttolerant.state.packing import digests_of
from lightning_faulttolerant.state.reachable import is_global, names_in_libraries
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

_SAMPLER, _DATASET, ATTRIBUTES = "sampler", "dataset", "attributes"
_COPIED = ("dataset", "collate_fn", "worker_init_fn")


def is_iterated(value: object) -> bool:
    """Return whether `value` is an iterable data set with its own state: its iteration reports its position."""
    return isinstance(value, IterableDataset) and has_state_methods(value)


def goes_by_attributes(value: object) -> bool:
    """Return whether `value` is a data set or a sampler: its ``state_dict``, if it has one, reports a position."""
    return isinstance(value, (Dataset, Sampler))


def _left_out(value: object) -> Collection[str]:
    return names_of_others(type(value)) if isinstance(value, DataLoader) else names_in_libraries(type(value))


def _is_no_part(value: object) -> bool:
    is_torchs = isinstance(value, DataLoader) and not has_own_class(value)
    return isinstance(value, nn.Module) or is_torchs or is_iterated(value) or is_shared(value)


COPIES_RULES = Rules(is_live=_is_no_part, goes_by_attributes=goes_by_attributes, left_out=_left_out, drops_saved=True)
"""Rules for objects that workers copy: they exclude modules, and include of loaders only a user class's additions."""
_SAMPLER_RULES = replace(COPIES_RULES, is_live=lambda value: isinstance(value, Dataset) or _is_no_part(value))
_FED_RULES = replace(COPIES_RULES, is_live=lambda value: isinstance(value, DataLoader))


class DatasetObjects:
    """The objects of an iterable data set.

    A data set may draw from a trained module, as an environment's samples depend on a policy. The module is then
    one of the objects, with its weights: samples that are drawn again use the weights of their time.

    Args:
        dataset: The user's data set.
    """

    def __init__(self, dataset: object) -> None:
        self._roots = {"dataset": dataset}
        self._own = self._state = ObjectState(self._roots, COPIES_RULES)
        self._own.carry_buffers()
        rules = replace(COPIES_RULES, is_live=lambda value: value is not dataset and _is_no_part(value))
        self._attributes = ObjectState(self._roots, rules) if is_iterated(dataset) else None
        self._begun: ObjectState | None = None
        self.is_fed = bool(self._state.things_of(_is_trained))
        if self.is_fed:
            self._state = ObjectState(self._roots, _FED_RULES)
            self._state.carry_tensors()  # other code restores these too, so no baseline is that of the first start
            self._state.carry_buffers()

    def at_start(self) -> dict[str, object]:
        """Return the state that a new iteration depends on; an empty dict if nothing has changed."""
        return _if_any(self._state.state_dict())

    def between(self) -> dict[str, object]:
        """Return the state that the next iteration depends on, without modules: other code restores these."""
        return {**self._own.state_dict(), **self.attributes()}

    def load_between(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a state of `between`; return a line for each thing that could not be restored."""
        self.load_attributes(state)
        return self._own.load_state_dict(state)

    def attributes(self) -> dict[str, object]:
        """Return the attributes of a data set with ``load_state_dict``, which would let an iteration continue."""
        return {} if self._attributes is None else {ATTRIBUTES: self._attributes.state_dict()}

    def load_attributes(self, state: Mapping[str, Any]) -> None:
        """Restore what `attributes` has returned, as far as possible: the data set's state says whether that is all."""
        if self._attributes is not None and ATTRIBUTES in state:
            self._attributes.load_state_dict(state[ATTRIBUTES])

    def load_state_dict(self, state: Mapping[str, object]) -> list[str]:
        """Restore a state of `at_start`; return a line for each thing that could not be restored."""
        return self._state.load_state_dict(state)

    def as_now(self, *states: Mapping[str, Any]) -> list[dict[str, object]]:
        """Return the current values to restore after `states` are loaded; nothing if no module is trained."""
        return [self._state.values_of(state) for state in states if state] if self.is_fed else []

    def begin_draws(self) -> None:
        """Find what drawing changes from now on, if a module is trained."""
        self._begun = ObjectState(self._roots, _FED_RULES) if self.is_fed else None

    def after_draws(self) -> list[dict[str, object]]:
        """Return the changes since `begin_draws`, except on weights: those of training are restored."""
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        modules = [module for module in begun.things_of(_is_trained).values() if isinstance(module, nn.Module)]
        weights = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        return [begun.state_dict(without=begun.things_of(lambda value: id(value) in weights))]


def _is_trained(value: object) -> bool:
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())


@contextmanager
def kept_as_now(objects: ObjectState, states: Iterable[Mapping[str, object]]) -> Iterator[None]:
    """Restore the current values after the block; the block may load `states`."""
    now = [objects.values_of(state) for state in states]
    try:
        yield
    finally:
        for state in now:
            objects.load_state_dict(state)


def of_workers_in(states: Mapping[str, object]) -> dict[str, object]:
    """Return the part of a state of `LoaderObjects.of_start` that `LoaderObjects.of_workers` would have returned."""
    return {name: state for name, state in states.items() if name == _DATASET}


class LoaderObjects:
    """The objects of one loader.

    Args:
        loader: The user's loader.
        known: The objects of the previous loader. Objects that both have in common keep their baseline.
    """

    def __init__(self, loader: DataLoader[object], *, known: LoaderObjects | None = None) -> None:
        self._dataset = loader.dataset
        self._owed_memory: Mapping[str, object] = {}
        self._sampler = ObjectState({_SAMPLER: index_sampler(loader)}, _SAMPLER_RULES)
        roots = {name: getattr(loader, name, None) for name in _COPIED}
        if known is None or known._dataset is not loader.dataset:
            self._copied = ObjectState({**roots, **users_namespaces(roots)}, COPIES_RULES)
            self._shared = ObjectState(self._copied.things_of(is_shared))
        else:
            self._copied, self._shared = known._copied, known._shared
            self._copied.add(roots)

    def of_start(self) -> dict[str, object]:
        """Return the changes on the sampler and on everything that it may read."""
        if isinstance(self._dataset, IterableDataset):  # its iteration reports its position
            return {}
        states = {_SAMPLER: self._sampler.state_dict(), **self.of_workers()}
        return {name: state for name, state in states.items() if state[NODES] or state[LOST]}

    def of_workers(self) -> dict[str, Any]:
        """Return the changes on the objects that workers copy at their creation."""
        state = self._copied.state_dict()
        return {_DATASET: state} if state[NODES] or state[LOST] else {}

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Restore a state of `of_start` or `of_workers`; return a line for each thing that could not be restored."""
        parts = {_SAMPLER: self._sampler, _DATASET: self._copied}
        return [line for name, state in states.items() for line in parts[name].load_state_dict(state)]

    def of_memory(self) -> dict[str, object]:
        """Return the changes in memory that workers share with this process. It has only a current state."""
        return self._shared.state_dict() if len(self._shared) else {}

    def owe_memory(self, state: Mapping[str, object]) -> None:
        """Let `put_back` restore a state of `of_memory`, before workers are created."""
        self._owed_memory = state

    @contextmanager
    def put_back(self, *moments: Mapping[str, Any]) -> Iterator[None]:
        """Restore the current values after the block, except those of the sampler. The block may load `moments`.

        Shared memory that is still to be restored is restored first: workers created in the block read it immediately.
        """
        if self._owed_memory:
            self._shared.load_state_dict(self._owed_memory)
            self._owed_memory = {}
        with kept_as_now(self._copied, [states[_DATASET] for states in moments if _DATASET in states]):
            yield


_LOADER, _GLOBALS = "loader", "globals"
# Queues, pools, and processes: the data in them, and the work that runs there, is part of the next batches.
_RUNNING = frozenset({"_queue", "concurrent", "multiprocessing"})


def _left_out_of_live(value: object) -> Collection[str]:
    if isinstance(value, Namespace) and isinstance(value.owner, DataLoader):
        return TORCHS | names_in_libraries(type(value.owner))
    return names_in_libraries(type(value))


_LIVE_RULES = Rules(
    is_live=lambda value: isinstance(value, (nn.Module, DataLoader)) or is_shared(value),
    goes_by_attributes=goes_by_attributes,
    left_out=_left_out_of_live,
)
_NO_PART = (nn.Module, nn.Parameter, torch.optim.Optimizer, DataLoader)  # not part of what a loader reads in globals


class LiveObjects:
    """The objects of one loader.

    Args:
        loader: The user's loader.
        older: The objects of other loaders, with older baselines: the sanity check may have changed shared ones since.
    """

    def __init__(self, loader: object, *, older: Iterable[LiveObjects] = ()) -> None:
        self._loader = loader
        self._namespaces: dict[int, Namespace] = {}  # one for each torch loader: another loader has another baseline
        self._state = ObjectState(self._roots(), _LIVE_RULES)
        self._state.carry_buffers()
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
        rules = replace(_LIVE_RULES, is_live=lambda value: id(value) in ids or _is_no_live_part(value))
        return ObjectState(users_namespaces({_LOADER: loader}), rules)

    def _roots(self) -> dict[str, object]:
        roots = {_LOADER: self._loader}
        for name, inner in torch_loaders_in(self._loader).items():
            known = {id(one) for one in roots.values()}
            # What is torch's or Lightning's; the user's own are below "...'s own".
            children = {f"{name}.{key}": own for key, own in vars(inner).items() if key in TORCHS or key[:2] == "__"}
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

    def begin_load(self, *states: Mapping[str, object]) -> None:
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

    def live(self) -> dict[str, object]:
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
    return graph_of(roots, replace(_LIVE_RULES, max_items=1_000), lambda one: None, with_contents=False).things


def _is_live(value: object) -> bool:
    if isinstance(value, Iterator):
        return not is_walked(value)
    kind = type(value)
    return isinstance(value, threading.Thread) or kind.__module__.partition(".")[0] in _RUNNING


def _is_no_live_part(value: object) -> bool:
    return isinstance(value, _NO_PART) or is_shared(value)


def _if_any(state: dict[str, object]) -> dict[str, object]:
    return state if state[NODES] or state[LOST] else {}


def digest_of(state: Mapping[str, Any]) -> object:
    """Return a value that distinguishes the changes on objects, without the parts that could not be carried."""
    around = state.get(_GLOBALS, {})
    return digests_of({name: [state.get(name), around.get(name)] for name in (NODES, TABLE)})


MAX_BYTES = 65_536
"""The space for changes in a worker's state."""
_MAX_NEAR = 1_000  # of the nearest objects are checked after each batch
_MAX_ITEMS = 1_000


class WorkerObjects:
    """The objects of one worker.

    The 1,000 nearest objects are checked. A change of others is not carried; a resume sees it in the batches that it
    repeats. For a container with more than 1,000 items, only the length is checked. A check of each item would copy
    memory that workers share with the main process until one of them touches it.

    A cache that the data set builds again from an index is no state: a new worker fills its own.

    Args:
        dataset: The worker's copy. For an iterable one, its iteration handles the changes.
        collate_fn: The worker's copy.
        worker_init_fn: The worker's copy.
        held: The generators of these objects.
    """

    def __init__(self, *, dataset: object, collate_fn: object, worker_init_fn: object, held: HeldGenerators) -> None:
        roots = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
        if not isinstance(dataset, IterableDataset):
            roots = {"dataset": dataset, **roots}
        roots |= users_namespaces({"dataset": dataset, **roots})
        self._state = ObjectState(roots, replace(COPIES_RULES, max_items=_MAX_ITEMS))
        paths = [path for path in self._state.paths if not self._state.is_large(path)]
        paths.sort(key=is_global)  # the loader's own objects come first
        near = dict.fromkeys(paths[:_MAX_NEAR])
        self._near = self._state.unchanged(near)
        self._changing: dict[str, None] = {}
        self._lost: dict[str, str] = {}
        self._caches: set[str] = set()
        self._dataset, self._held = dataset, held

    def state_dict(self) -> dict[str, object]:
        """Return the changes, and those that are too large to carry; an empty dict if there are none."""
        state = self._changes()
        if state[LOST] and self._find_caches():
            state = self._changes()
        self._lost.update(state[LOST])  # it is not tried again after each batch
        state[LOST] = dict(self._lost)
        return state if state[NODES] or state[LOST] else {}

    def _changes(self) -> dict[str, Any]:
        self._changing.update(dict.fromkeys(self._near.take_changed()))
        without = {*self._lost, *self._caches}
        return self._state.state_dict(of=self._changing, without=without, max_bytes=MAX_BYTES)

    def _find_caches(self) -> bool:
        """Find the caches among what has changed; return whether there is one. It leaves everything as it was."""
        found = self._state.containers_changed(self._changing)
        found = {path: one for path, one in found.items() if path not in self._lost and path not in self._caches}
        before = self._without(found)
        if not found or before[LOST] or self._state.things_of(is_shared_value):  # what the samples change stays changed
            return False
        states, held = rng_state(), self._held.state_dict()
        with self._state.attributes_kept():
            caches = {path for path, container in found.items() if is_built_again(container, self._dataset)}
        set_rng_state(states)
        self._held.load_state_dict(held)
        self._state.load_state_dict(before)
        if digest_of(self._without(found)) != digest_of(before):
            self._lost[_DATASET] = "it differs when a sample is loaded again"
        self._caches |= caches
        return bool(caches)

    def _without(self, caches: Collection[str]) -> dict[str, Any]:
        self._changing.update(dict.fromkeys(self._near.take_changed()))
        return self._state.state_dict(of=self._changing, without={*caches, *self._caches})

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a state; return a line for each thing that could not be restored."""
        if not state:
            return []
        known = {*self._state.paths}
        self._changing.update(dict.fromkeys(path for path in state[NODES] if path in known))
        self._lost = dict(state[LOST])
        return self._state.load_state_dict(state)


AN_ITERATOR = "an iterator"
"""The start of the reason why an iterator can't be carried."""


def lost_in_loaders(places: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes on data sets when iterations or workers began that can't be carried, by path.

    Args:
        places: The states of loaders, by place.
    """
    found: dict[str, str] = {}
    for place, state in places.items():
        for objects in _at_moments(state or {}):
            found.update({f"{place}.{path}": reason for path, reason in objects.get(LOST, {}).items()})
    return found


def _at_moments(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the changes on a data set at each moment that a loader's state holds."""
    record, position = state.get("record") or {}, (state.get("iterable") or {}).get("position") or {}
    for name in ("birth", "start", "first"):
        yield ((record.get(name) or {}).get("objects") or {}).get("dataset", {})
    yield from _of_position(position)


def _of_position(position: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    moments = (position.get("start") or {}, position.get("first") or {}, position)
    for objects in (moment.get("objects") or {} for moment in moments):
        # Iterators are created again where the iteration begins again, and the resulting samples are compared.
        lost = objects.get(LOST, {}).items()
        yield {LOST: {path: reason for path, reason in lost if not reason.startswith(AN_ITERATOR)}}


_REMEDY = "fill it before fit, let its values depend only on the index of a sample, or pass num_workers=0"


def lost_in_workers(places: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes made in workers that can't be carried, by path.

    Args:
        places: The states of loaders, by place.
    """
    found: dict[str, str] = {}
    for place, state in places.items():
        for worker in (state or {}).get("workers") or ():
            for objects in (worker.get("objects", {}), *_of_position(worker.get("iterable") or {})):
                lost: Mapping[str, str] = objects.get(LOST, {})
                found.update({f"{place}.{path} of a worker": f"{reason}; {_REMEDY}" for path, reason in lost.items()})
    return found
