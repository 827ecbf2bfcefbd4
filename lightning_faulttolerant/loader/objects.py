"""What an iteration changes on a loader's own objects: on its samplers, and on the objects that its workers copy.

A sampler is started again from the state that its objects had at its start. Workers are created again from the state at
their creation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_faulttolerant.loader.own_attributes import has_own_class, names_of_others
from lightning_faulttolerant.loader.samplers import index_sampler
from lightning_faulttolerant.state.objects.kinds import has_state_methods, is_shared
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, ObjectState
from lightning_faulttolerant.state.objects.users import names_in_libraries
from lightning_faulttolerant.state.objects.walk import Rules

_SAMPLER, _DATASET = "sampler", "dataset"
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
_FED_RULES = Rules(
    is_live=lambda value: isinstance(value, DataLoader),
    goes_by_attributes=goes_by_attributes,
    left_out=_left_out,
    drops_saved=True,
)


class DatasetObjects:
    """The objects of an iterable data set.

    A data set may draw from a trained module, as an environment's samples depend on a policy. The module is then
    one of the objects, with its weights: samples that are drawn again use the weights of their time.

    Args:
        dataset: The user's data set.
    """

    def __init__(self, dataset: object) -> None:
        roots = {"dataset": dataset}
        self._state = ObjectState(roots, COPIES_RULES)
        self.is_fed = bool(self._state.things_of(_is_trained))
        if self.is_fed:
            self._state = ObjectState(roots, _FED_RULES)
            self._state.carry_tensors()  # other code restores these too, so no baseline is that of the first start

    def at_start(self) -> dict[str, object]:
        """Return the state that a new iteration depends on; an empty dict if nothing has changed."""
        state = self._state.state_dict()
        return state if state[NODES] or state[LOST] else {}

    def between(self) -> dict[str, Any] | None:
        """Return the state that the next iteration depends on; ``None`` if it is part of the trained module's state."""
        return None if self.is_fed else self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> list[str]:
        """Restore a state of `at_start` or `between`; return a line for each thing that could not be restored."""
        return self._state.load_state_dict(state)

    def as_now(self, *states: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the current values to restore after `states` are loaded; nothing if no module is trained."""
        return [self._state.values_of(state) for state in states if state] if self.is_fed else []


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
        rules = Rules(
            is_live=lambda value: isinstance(value, Dataset) or _is_no_part(value),
            goes_by_attributes=goes_by_attributes,
            left_out=_left_out,
            drops_saved=True,
        )
        self._dataset = loader.dataset
        self._owed_memory: Mapping[str, Any] = {}
        self._sampler = ObjectState({_SAMPLER: index_sampler(loader)}, rules)
        roots = {name: getattr(loader, name, None) for name in _COPIED}
        if known is not None and known._dataset is loader.dataset:
            self._copied: ObjectState = known._copied
            self._shared: ObjectState = known._shared
            self._copied.add(roots)
        else:
            self._copied = ObjectState({**roots, **users_namespaces(roots)}, COPIES_RULES)
            self._shared = ObjectState(self._copied.things_of(is_shared))

    def of_start(self) -> dict[str, Any]:
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

    def owe_memory(self, state: Mapping[str, Any]) -> None:
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
