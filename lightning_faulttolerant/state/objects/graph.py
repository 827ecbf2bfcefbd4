"""The objects that can be reached from some roots, each by one path, with a mark of each that can change.

A node is the record of one object that can change. Its children are the objects that it refers to.

Tensors may share their memory with another one: a view of a weight, two names of one buffer.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.baseline import Layer, Mark, Records, Weak, held, items_mark
from lightning_faulttolerant.state.tensors import is_readable

_MAX_RATIO = 4  # the base of a view is carried with it, if it is at most this many times as large


@dataclass(kw_only=True, slots=True)
class Node:
    """An object that can change.

    Args:
        kept: The object, as `hold` returned it.
        mark: Returns whether its content is unchanged; ``None`` for an object that only has attributes.
        attributes: Its attributes at that time; ``None`` for an object without any.
        state: A digest of its ``state_dict`` at that time, for an object that is carried by that.
        raw: The names and the ``id`` of all values in its ``__dict__`` at that time, which are compared first; ``None``
            for an object with slots. `attributes` holds the values that count, so their ``id`` stays valid.
    """

    kept: object
    mark: Mark | None = None
    attributes: dict[str, object] | None = None
    state: object = None
    raw: tuple[list[str], list[int]] | None = None

    @property
    def value(self) -> Any:
        """The object; ``None`` for a large tensor or array that no longer exists."""
        return held(self.kept)

    @property
    def holds_weakly(self) -> bool:
        """Whether one of its earlier values may be gone, so that another object has its ``id``."""
        return self.attributes is not None and Weak in set(map(type, self.attributes.values()))

    def has_same_dict(self) -> bool:
        """Return whether all attributes are the same objects as before."""
        if self.raw is None or self.holds_weakly:
            return False
        now = kinds.dict_of(self.value)
        return (list(now), list(map(id, now.values()))) == self.raw


def items_of(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the objects that a container or another holder refers to, by path."""
    if isinstance(value, dict):
        for i, (key, child) in enumerate(kinds.pairs_of(value)):
            if not kinds.is_leaf(child):
                yield f"{path}[{_key_text(key, i)}]", child
    elif isinstance(value, (list, tuple, deque)):
        items = list(tuple.__iter__(value)) if isinstance(value, tuple) else kinds.items_of(value)
        if not all(map(kinds.is_leaf_type, set(map(type, items)))):
            yield from ((f"{path}[{i}]", child) for i, child in enumerate(items) if not kinds.is_leaf(child))
    elif kinds.is_numpy(value, "ndarray") and value.dtype.hasobject:
        children = enumerate(value.ravel().tolist())
        yield from ((f"{path}[{i}]", child) for i, child in children if not kinds.is_leaf(child))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, memoryview):
        yield f"{path}.obj", value.obj
    elif isinstance(value, types.CellType):
        yield from ((f"{path}.value", child) for child in kinds.contents_of_cell(value))


def _key_text(key: object, place: int) -> str:
    if (type(key) is tuple and all(map(kinds.is_leaf, key))) or kinds.is_leaf(key):
        return repr(key)
    return f"{type(key).__name__} {place}"  # two keys of one class get two paths


def of_module(path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the children, parameters, and buffers of a module, by path."""
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}", child
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                yield f"{path}.{name}", tensor


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
          "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_post_accumulate_grad_hooks")  # fmt: skip


def of_hooks(path: str, owner: object) -> Iterator[tuple[str, object]]:
    """Yield the hooks on a module, a tensor, or an optimizer; their keys differ in each process."""
    for name in _HOOKS:
        hooks = getattr(owner, name, None) or {}
        yield from ((f"{path}.{name}[{i}]", hook) for i, hook in enumerate(list(hooks.values())))


def of_namespace(path: str, namespace: kinds.Namespace) -> Iterator[tuple[str, object]]:
    """Yield the functions and classes of a module or a class, and the members of an enum, which may hold state."""
    if isinstance(namespace.owner, enum.EnumMeta):
        yield from ((f"{path}.{one.name}", kinds.Namespace(owner=one)) for one in [*namespace.owner])
    if namespace.names is None:
        for name, value in list(vars(namespace.owner).items()):
            is_wrapped = isinstance(value, (classmethod, staticmethod, types.MethodType))
            found = value.fget if isinstance(value, property) else value.__func__ if is_wrapped else value
            if isinstance(found, (types.FunctionType, type)):
                yield f"{path}.{name}()", found


def of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the attributes, the defaults, and the closure of a function."""
    for name, child in kinds.attributes(function).items():
        yield f"{path}.{name}", child
    if function.__defaults__:  # most functions hold nothing
        yield from ((f"{path}.__defaults__[{i}]", child) for i, child in enumerate(function.__defaults__))
    if function.__kwdefaults__:
        yield from ((f"{path}.__kwdefaults__[{name}]", child) for name, child in function.__kwdefaults__.items())
    if function.__closure__:
        names = function.__code__.co_freevars
        yield from ((f"{path}.{name}", cell) for name, cell in zip(names, function.__closure__, strict=True))


@dataclass(kw_only=True, slots=True)
class Graph:
    """All objects by path.

    Args:
        things: Every object, by the path on which it was met first.
        paths: The path of each object, by its ``id``.
        nodes: The objects that can change.
        classes: The classes of all objects, by module and name.
        records: The items of large lists that are not nodes yet, by the path of the list. Each becomes a node when it
            changes, or when its path is requested.
    """

    things: dict[str, object] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    records: dict[str, Records] = field(default_factory=dict)

    def path_of(self, value: object) -> str | None:
        """Return the path of `value`, if it was met."""
        path = self._path_of_single(value)
        if path is not None:
            return path
        for owner, records in self.records.items():
            found = records.place_of(value)
            if found is not None:
                layer, place = found
                if layer is records.layers[0]:
                    return f"{owner}[{layer.roots[place]}]"
                self._expand(owner, layer.roots[place])
                return self.paths.get(id(value))
        return None

    def _path_of_single(self, value: object) -> str | None:
        path = self.paths.get(id(value))
        # A large tensor may be gone, and another object may have its id.
        return path if path is not None and held(self.things.get(path)) is value else None

    def is_met(self, value: object) -> bool:
        """Return whether `value` was met."""
        if self._path_of_single(value) is not None:
            return True
        return bool(self.records) and any(records.place_of(value) for records in self.records.values())

    def may_have_met(self, ids: frozenset[int]) -> bool:
        """Return whether an object with one of these ids was met. It may be gone, and its id used by another."""
        layers = (layer for records in self.records.values() for layer in records.layers)
        known: list[dict[int, Any]] = [self.paths, *(layer.places for layer in layers)]
        return not all(places.keys().isdisjoint(ids) for places in known)

    def thing_at(self, path: str) -> object:
        """Return the object at this path, or ``None``."""
        if path not in self.things:
            self._expand_at(path)
        return held(self.things.get(path))

    def node_at(self, path: str) -> Node | None:
        """Return the node at this path, or ``None``."""
        if path not in self.nodes:
            self._expand_at(path)
        return self.nodes.get(path)

    def add_records(self, owner: str, records: Records) -> None:
        """Add the items of a large list; items that were already met elsewhere are nodes from the start."""
        self.records[owner] = records
        places = ((layer, id_) for layer in records.layers for id_ in layer.places.keys() & self.paths.keys())
        self._expand_all(owner, {layer.roots[layer.places[id_]] for layer, id_ in places})

    def recorded(self, known: Graph) -> Iterator[object]:
        """Yield all objects of the records, except the records that `known` has too."""
        noted = {id(records) for records in known.records.values()}
        return (value for own in self.records.values() if id(own) not in noted for value in own.members())

    def expand_changed(self) -> None:
        """Turn the changed records into nodes with their old content."""
        for owner, records in list(self.records.items()):
            self._expand_all(owner, records.changed())

    def expand_tensors(self, is_one: Callable[[Tensor], bool]) -> None:
        """Turn the records with tensors that satisfy `is_one` into nodes."""
        for owner, records in list(self.records.items()):
            self._expand_all(owner, {records.root_of(tensor) for tensor in records.tensors() if is_one(tensor)})

    def _expand_all(self, owner: str, roots: set[Any]) -> None:
        for root in sorted(roots):
            self._expand(owner, root)
        if roots:
            self.records[owner] = self.records[owner].without(roots)

    def _expand_at(self, path: str) -> None:
        for owner, records in self.records.items():
            if path.startswith(f"{owner}["):
                number = path[len(owner) + 1 :].partition("]")[0]
                if number.isdecimal() and int(number) < len(records.items):
                    self._expand(owner, int(number))

    def _expand(self, owner: str, root: int) -> None:
        """Turn a record and its parts into nodes, with the content that they had when they were recorded."""
        records = self.records[owner]
        queue: deque[tuple[str, object]] = deque([(f"{owner}[{root}]", records.items[root])])
        seen: set[int] = set()
        while queue:
            path, value = queue.popleft()
            found = None if kinds.is_leaf(value) or id(value) in seen else records.place_of(value)
            if found is None or found[0].roots[found[1]] != root:  # it belongs to another record that shares it
                continue
            seen.add(id(value))
            known = self.paths[id(value)] = self._path_of_single(value) or path
            children = list(_of_record(self, known, *found))
            self.things.setdefault(known, value)
            queue.extend(children)

    def share(self, older: Graph) -> None:
        """Use the nodes of `older` for the objects that it has too, and drop what was added to these since."""
        paths = {path: older.path_of(node.value) for path, node in list(self.nodes.items())}
        shared = {path: older.nodes[other] for path, other in paths.items() if other in older.nodes}
        things = [(path, held(value)) for path, value in self.things.items()]
        for path, value in things:
            if _is_in(path, shared) and not older.is_met(value):
                self.forget_one(value)
        self.nodes.update(shared)

    def forget_one(self, value: object) -> None:
        """Drop an object, but not the objects that were met from there."""
        path = self.path_of(value)
        if path is not None:
            self._expand_at(path)
        if path is not None and held(self.things.get(path)) is value:
            del self.paths[id(value)], self.things[path]
            self.nodes.pop(path, None)

    def forget(self, name: str) -> dict[int, Node]:
        """Drop a root and the objects first met from there; return their nodes, to reuse if met elsewhere."""
        dropped: dict[int, Node] = {}
        for path in [path for path in self.records if is_at(path, name)]:
            self._expand_all(path, set(chain.from_iterable(layer.roots for layer in self.records[path].layers)))
            del self.records[path]
        for path in [path for path in self.things if is_at(path, name)]:
            value = held(self.things.pop(path))
            self.paths.pop(id(value), None)
            if path in self.nodes:
                dropped[id(value)] = self.nodes.pop(path)
        return dropped


def _of_record(graph: Graph, path: str, layer: Layer, place: int) -> Iterator[tuple[str, object]]:
    """Add a part of a record to the nodes, with its recorded content, and yield the objects that it referred to."""
    value, before = layer.members[place], layer.before[place]
    node: Node | None = None
    if layer.is_marked:
        node = Node(kept=value, mark=before)
    elif layer.has_attributes:
        node = Node(kept=value, attributes=before, raw=(list(before), list(map(id, before.values()))))
        yield from ((f"{path}.{name}", child) for name, child in before.items())
    else:
        node = None if layer.kind is tuple else Node(kept=value, mark=items_mark(value, before))
        yield from items_of(path, before)
    if node is not None:
        graph.nodes.setdefault(path, node)


def _is_in(path: str, owners: Mapping[str, Node]) -> bool:
    """Return whether an object was first met from one of `owners`."""
    while path and path not in owners:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return bool(path)


def is_at(path: str, owner: str) -> bool:
    """Return whether `path` is the path of `owner`, or continues it."""
    return path == owner or path.startswith((f"{owner}.", f"{owner}["))


def name_of(named: Any) -> str:
    """Return the name by which a class or a function can be found again."""
    return f"{named.__module__}:{named.__qualname__}"


class Aliases:
    """Finds the tensors that new tensors share their memory with.

    Args:
        graph: The objects that the fit began with.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[object, Tensor] | None = None
        self._new: dict[object, Tensor] = {}

    def base_of(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return a tensor whose memory contains all of `tensor`, and the offset there, in elements.

        Candidates are the tensors that the fit began with, and those of earlier calls.
        """
        if type(tensor) is not Tensor or not is_readable(tensor) or not tensor.numel():
            return None
        key = _key(tensor)
        if self._known is None:
            tensors = (one for one in map(held, self._graph.things.values()) if isinstance(one, Tensor))
            self._known = {_key(one): one for one in tensors if is_readable(one) and one.numel()}
        for other in (self._known.get(key), self._new.get(key), _whole_of(tensor)):
            offset = None if other is None or other is tensor else _offset_in(other, tensor)
            if other is not None and offset is not None:
                return other, offset
        self._new.setdefault(key, tensor)
        return None

    def forget(self, values: Iterable[object]) -> None:
        """Forget tensors that are not carried after all."""
        gone = {id(value) for value in values}
        self._new = {key: tensor for key, tensor in self._new.items() if id(tensor) not in gone}


def _key(tensor: Tensor) -> object:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _whole_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view is a part of, unless that is much larger."""
    whole = tensor._base
    is_part = whole is not None and tensor.numel() < whole.numel() <= _MAX_RATIO * tensor.numel()
    return whole if is_part else None


def _offset_in(other: Tensor, tensor: Tensor) -> int | None:
    """Return the offset of `tensor` in `other`, in elements; ``None`` if `other` does not contain all of it."""
    if (
        other.dtype != tensor.dtype
        or not is_readable(other)
        or not other.is_contiguous()
        or _key(other) != _key(tensor)
    ):
        return None
    offset = int(tensor.storage_offset() - other.storage_offset())
    end = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return offset if offset >= 0 and end < other.numel() else None


def alias_of(base: Tensor, shape: list[int], stride: list[int], offset: int) -> Tensor:
    """Return the tensor at this place of `base`, sharing its memory."""
    with torch.no_grad():
        return base.detach().as_strided(shape, stride, base.storage_offset() + offset)
