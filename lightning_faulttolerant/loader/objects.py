"""What an iteration changes on a loader's own objects: on its samplers, and on what its workers copy.

A sampler is started again from what its objects were when it was started. Workers are made again from what there was
when they were made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_faulttolerant.loader.own_attributes import has_own_class, names_of_others
from lightning_faulttolerant.state.objects.kinds import has_state_methods, is_shared
from lightning_faulttolerant.state.objects.libraries import names_in_libraries
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, ObjectState
from lightning_faulttolerant.state.objects.walk import Rules

_SAMPLER, _DATASET = "sampler", "dataset"
_COPIED = ("dataset", "collate_fn", "worker_init_fn")


def is_iterated(value: Any) -> bool:
    """Return whether `value` is an iterable data set with a state of its own: where it is, its iteration says."""
    return isinstance(value, IterableDataset) and has_state_methods(value)


def goes_by_attributes(value: Any) -> bool:
    """Return whether `value` is a data set or a sampler: its ``state_dict``, if it has one, tells a position."""
    return isinstance(value, (Dataset, Sampler))


def _left_out(value: Any) -> Collection[str]:
    return names_of_others(type(value)) if isinstance(value, DataLoader) else names_in_libraries(type(value))


def _is_no_part(value: Any) -> bool:
    is_torchs = isinstance(value, DataLoader) and not has_own_class(value)
    return isinstance(value, nn.Module) or is_torchs or is_iterated(value) or is_shared(value)


COPIES_RULES = Rules(is_live=_is_no_part, goes_by_attributes=goes_by_attributes, left_out=_left_out, drops_saved=True)
"""Of what workers copy: modules are no part of it, and of loaders only what a user's class adds to torch's."""
_FED_RULES = Rules(
    is_live=lambda value: isinstance(value, DataLoader),
    goes_by_attributes=goes_by_attributes,
    left_out=_left_out,
    drops_saved=True,
)


class DatasetObjects:
    """The objects of an iterable data set.

    If it draws from a module that is trained, as an environment's samples follow from a policy, that is one of them,
    weights and all: when its samples are drawn again, they are drawn under the weights of then.

    Args:
        dataset: The user's.
    """

    def __init__(self, dataset: Any) -> None:
        roots = {"dataset": dataset}
        self._state = ObjectState(roots, COPIES_RULES)
        self.is_fed = bool(self._state.things_of(_is_trained))
        if self.is_fed:
            self._state = ObjectState(roots, _FED_RULES)
            self._state.carry_tensors()  # others restore these too, so that no baseline is that of the first start

    def at_start(self) -> dict[str, Any]:
        """Return what an iteration that is begun follows from; an empty dict if nothing has changed."""
        state = self._state.state_dict()
        return state if state[NODES] or state[LOST] else {}

    def between(self) -> dict[str, Any] | None:
        """Return what the next iteration follows from; ``None`` if that is part of the trained module's state."""
        return None if self.is_fed else self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore what one of these returned; return a line for each thing that could not be."""
        return self._state.load_state_dict(state)

    def as_now(self, *states: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what puts back, after `states` were loaded, what training uses now; nothing if that is theirs."""
        return [self._state.values_of(state) for state in states if state] if self.is_fed else []


def _is_trained(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())


@contextmanager
def kept_as_now(objects: ObjectState, states: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Let what is loaded of these states meanwhile be as it is now again."""
    now = [objects.values_of(state) for state in states]
    try:
        yield
    finally:
        for state in now:
            objects.load_state_dict(state)


def of_workers_in(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `LoaderObjects.of_workers` would have given, of what `of_start` did."""
    return {name: state for name, state in states.items() if name == _DATASET}


class LoaderObjects:
    """The objects of one loader.

    Args:
        loader: The user's.
        known: Those of the loader that was there before. What both have in common keeps its baseline.
    """

    def __init__(self, loader: DataLoader[Any], *, known: LoaderObjects | None = None) -> None:
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        rules = Rules(
            is_live=lambda value: isinstance(value, Dataset) or _is_no_part(value),
            goes_by_attributes=goes_by_attributes,
            left_out=_left_out,
            drops_saved=True,
        )
        self._dataset = loader.dataset
        self.owed_memory: Mapping[str, Any] = {}
        """What `of_memory` returned, to be restored before workers are made."""
        self._sampler = ObjectState({_SAMPLER: sampler}, rules)
        roots = {name: getattr(loader, name, None) for name in _COPIED}
        if known is not None and known._dataset is loader.dataset:
            self._copied: ObjectState = known._copied
            self._shared: ObjectState = known._shared
            self._copied.add(roots)
        else:
            self._copied = ObjectState({**roots, **users_namespaces(roots)}, COPIES_RULES)
            self._shared = ObjectState(self._copied.things_of(is_shared))

    def of_start(self) -> dict[str, Any]:
        """Return what has changed on the sampler and on what it may look at."""
        if isinstance(self._dataset, IterableDataset):  # its iteration says
            return {}
        states = {_SAMPLER: self._sampler.state_dict(), **self.of_workers()}
        return {name: state for name, state in states.items() if state[NODES] or state[LOST]}

    def of_workers(self) -> dict[str, Any]:
        """Return what has changed on what workers copy when they are made."""
        state = self._copied.state_dict()
        return {_DATASET: state} if state[NODES] or state[LOST] else {}

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Restore what `of_start` or `of_workers` returned; return a line for each thing that could not be."""
        parts = {_SAMPLER: self._sampler, _DATASET: self._copied}
        return [line for name, state in states.items() for line in parts[name].load_state_dict(state)]

    def of_memory(self) -> dict[str, Any]:
        """Return what has changed in memory that workers share with this process: it has no state but that of now."""
        return self._shared.state_dict() if len(self._shared) else {}

    @contextmanager
    def put_back(self, *moments: Mapping[str, Any]) -> Iterator[None]:
        """Let what is restored of these meanwhile be as it is now again, except for the sampler's own objects.

        Memory that is still to be restored is: workers that are made meanwhile look at it at once.
        """
        if self.owed_memory:
            self._shared.load_state_dict(self.owed_memory)
            self.owed_memory = {}
        with kept_as_now(self._copied, [states[_DATASET] for states in moments if _DATASET in states]):
            yield
