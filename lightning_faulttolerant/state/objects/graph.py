"""The objects that can be reached from some roots, each by one path, with a mark of each that can change."""

from __future__ import annotations

import functools
import logging
import math
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.libraries import is_librarys
from lightning_faulttolerant.state.objects.marks import Mark, length_mark, mark_of, plain_data_mark
from lightning_faulttolerant.state.objects.modules import is_users_function
from lightning_faulttolerant.state.reachable import is_generator

_log = logging.getLogger(__name__)

MAX_OBJECTS = 500_000
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What of the objects is not looked at, because somebody else carries it.

    Args:
        left_out: Returns the names of an object's attributes that are not its user's.
        is_live: Returns whether an object is not looked into, only known by its path.
        goes_by_attributes: Returns whether the attributes of an object are its state although it has a ``state_dict``.
        max_items: Of a container with more items only the length is looked at.
    """

    left_out: Callable[[Any], Collection[str]] = lambda value: _NOTHING
    is_live: Callable[[Any], bool] = lambda value: False
    goes_by_attributes: Callable[[Any], bool] = lambda value: False
    max_items: float = math.inf


@dataclass(kw_only=True, slots=True)
class Node:
    """An object that can change.

    Args:
        value: The object.
        mark: Tells whether its content is what it was; ``None`` for an object that only has attributes.
        attributes: Those that it had; ``None`` for an object without.
        state: What stands for its ``state_dict`` as it was, for an object that is carried by that.
        raw: The names and the ``id`` of all that its ``__dict__`` held, which are compared first; ``None`` for an
            object with slots. What counts is held by `attributes`, so its ``id`` stays its own.
    """

    value: Any
    mark: Mark | None = None
    attributes: dict[str, Any] | None = None
    state: Any = None
    raw: tuple[list[str], list[int]] | None = None

    def has_same_dict(self) -> bool:
        """Return whether all attributes are the very objects that they were."""
        if self.raw is None:
            return False
        now = kinds.dict_of(self.value)
        return (list(now), list(map(id, now.values()))) == self.raw


@dataclass(kw_only=True, slots=True)
class Graph:
    """All objects by path.

    Args:
        things: Every object that was met, by the path on which it was met first.
        paths: The path of each of them, by its ``id``.
        nodes: Those of them that can change.
        classes: The classes of all that were met, by module and name.
    """

    things: dict[str, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)

    def path_of(self, value: Any) -> str | None:
        """Return the path of `value`, if it was met."""
        return self.paths.get(id(value))

    def forget_one(self, value: Any) -> None:
        """Drop an object, and nothing that was met from there."""
        path = self.paths.get(id(value))
        if path is not None and self.things.get(path) is value:
            del self.paths[id(value)], self.things[path]
            self.nodes.pop(path, None)

    def forget(self, name: str) -> None:
        """Drop a root, and what was met first from there."""
        for path in [path for path in self.things if is_at(path, name)]:
            self.paths.pop(id(self.things.pop(path)), None)
            self.nodes.pop(path, None)


def graph_of(
    roots: Mapping[str, Any], rules: Rules, state_of: Callable[[Any], Any], *, graph: Graph | None = None
) -> Graph:
    """Return the graph of all that can be reached from `roots`.

    Args:
        roots: The objects to begin with, by name.
        rules: What is left out.
        state_of: Returns what stands for the ``state_dict`` of an object that has one; ``None`` if it can't be read.
        graph: One to add to.
    """
    graph = Graph() if graph is None else graph
    queue: deque[tuple[str, Any]] = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if kinds.is_leaf(value) or id(value) in graph.paths:
            continue
        if len(graph.things) >= MAX_OBJECTS:
            _log.warning(
                "More than %s objects can be reached from the module, the callbacks, and the data sets: what training"
                " changes on those after %s is not saved.",
                MAX_OBJECTS,
                path,
            )
            break
        graph.paths[id(value)] = path
        graph.things[path] = value
        if kinds.is_named(value) and not isinstance(value, types.MethodType):
            if isinstance(value, types.FunctionType) and is_users_function(value):
                queue.extend(_of_function(graph, path, value))
            continue
        graph.classes.setdefault(name_of(type(value)), type(value))
        queue.extend(_met(graph, path, value, rules, state_of))
    return graph


def is_at(path: str, owner: str) -> bool:
    """Return whether `path` is that of `owner`, or leads on from there."""
    return path == owner or path.startswith((f"{owner}.", f"{owner}["))


def name_of(named: Any) -> str:
    """Return the name under which a class or a function is found again."""
    return f"{named.__module__}:{named.__qualname__}"


def _met(
    graph: Graph, path: str, value: Any, rules: Rules, state_of: Callable[[Any], Any]
) -> Iterator[tuple[str, Any]]:
    """Add `value` to the nodes, if it can change, and return what it refers to."""
    if is_generator(value) or rules.is_live(value):
        return
    if is_carried_by_state(value) and not rules.goes_by_attributes(value):
        state = state_of(value)
        if state is not None:
            graph.nodes[path] = Node(value=value, state=state)
            return
    mark = length_mark(value) if kinds.num_items(value) > rules.max_items else plain_data_mark(value)
    if mark is not None:
        graph.nodes[path] = Node(value=value, mark=mark)
        return
    mark = mark_of(value)
    own = attributes_of(value, rules)
    if mark is not None or own is not None:
        graph.nodes[path] = Node(
            value=value, mark=mark, attributes=own, raw=_raw_of(value) if own is not None else None
        )
    for name, child in (own or {}).items():
        yield f"{path}.{name}", child
    if isinstance(value, nn.Module):
        yield from _of_module(path, value)
    else:
        yield from items_of(path, value)


def is_carried_by_state(value: Any) -> bool:
    """Return whether an object's own ``state_dict`` and ``load_state_dict`` carry its state."""
    if isinstance(value, nn.Module) or not kinds.is_walked(value) or kinds.is_optimizer(value):
        return False
    return kinds.has_state_methods(value)


def attributes_of(value: Any, rules: Rules) -> dict[str, Any] | None:
    """Return the attributes of `value` that are its user's; ``None`` if it has none that count."""
    if isinstance(value, types.FunctionType):
        return kinds.attributes(value)
    is_subclass = kinds.is_container(value) and not kinds.is_plain_container(value)
    if not is_subclass and (kinds.is_container(value) or not kinds.is_walked(value)):
        return None
    left_out = rules.left_out(value)
    found = kinds.attributes(value).items()
    return {n: child for n, child in found if n not in left_out and not _is_wrappers(value, n, child)}


def _is_wrappers(owner: Any, name: str, value: Any) -> bool:
    """Return whether `value` is what Lightning's wrappers (DDP) put in place of a method for a call, and leave there.

    They put their own function there, and then the method that the class has anyway.
    """
    if isinstance(value, types.MethodType):
        return value.__self__ is owner and getattr(type(owner), name, None) is value.__func__
    return isinstance(value, types.FunctionType) and is_librarys(value)


def _of_function(graph: Graph, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Add a function that somebody holds, which may count on itself, and return the variables of its closure."""
    own = kinds.attributes(function)
    graph.nodes[path] = Node(value=function, attributes=own, raw=_raw_of(function))
    yield from ((f"{path}.{name}", child) for name, child in own.items())
    names = function.__code__.co_freevars
    yield from ((f"{path}.{name}", cell) for name, cell in zip(names, function.__closure__ or (), strict=True))


def _raw_of(value: Any) -> tuple[list[str], list[int]] | None:
    if isinstance(value, kinds.Namespace) and value.names is not None:
        return None
    if kinds.has_slots(type(value)):  # type: ignore[arg-type]  # mypy: a class is no Hashable
        return None
    found = kinds.dict_of(value)
    return list(found), list(map(id, found.values()))


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}", child
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if isinstance(tensor, Tensor):
                yield f"{path}.{name}", tensor


def items_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return what a container or another holder refers to, by path."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not kinds.is_leaf(child):
                yield f"{path}[{_key_text(key)}]", child
    elif isinstance(value, (list, tuple, deque)):
        if not all(map(kinds.is_leaf_type, set(map(type, value)))):
            yield from ((f"{path}[{i}]", child) for i, child in enumerate(value) if not kinds.is_leaf(child))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.CellType):
        yield from ((f"{path}.value", child) for child in kinds.contents_of_cell(value))


def _key_text(key: Any) -> str:
    return repr(key) if kinds.is_leaf(key) else f"{type(key).__name__}"
