"""The objects that one object refers to, each child by its path.

The record of one object that can change.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_faulttolerant.state.objects import containers, kinds
from lightning_faulttolerant.state.objects.marks import Mark, Weak, held


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

    kept: Any
    mark: Mark | None = None
    attributes: dict[str, Any] | None = None
    state: Any = None
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
        for i, (key, child) in enumerate(containers.pairs_of(value)):
            if not kinds.is_leaf(child):
                yield f"{path}[{_key_text(key, i)}]", child
    elif isinstance(value, (list, tuple, deque)):
        items = list(tuple.__iter__(value)) if isinstance(value, tuple) else containers.items_of(value)
        if not all(map(kinds.is_leaf_type, set(map(type, items)))):
            yield from ((f"{path}[{i}]", child) for i, child in enumerate(items) if not kinds.is_leaf(child))
    elif kinds.is_numpy(value, "ndarray") and value.dtype.hasobject:
        children = enumerate(value.ravel().tolist())
        yield from ((f"{path}[{i}]", child) for i, child in children if not kinds.is_leaf(child))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
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
    """Yield the functions and classes of a module or a class, which may hold state."""
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
