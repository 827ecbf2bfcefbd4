"""The way back: values from what `Encoder` made of them, and contents into the objects that are there."""

from __future__ import annotations

import datetime
import functools
import logging
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_faulttolerant.state import generators
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.encoding import BUILTINS, DATES, PATHS, TEXTS, found_class, found_part
from lightning_faulttolerant.state.objects.graph import Graph


class NothingThereError(Exception):
    """What a state refers to is not there any more."""


class Decoder:
    """Decodes the values of one state.

    Args:
        graph: The objects that the fit began with, here.
        table: The objects that it did not begin with, as `Encoder` left them.
    """

    def __init__(self, graph: Graph, table: Sequence[Any]) -> None:
        self._graph = graph
        self._table = table
        self._made: dict[int, Any] = {}

    def decode(self, encoded: Any) -> Any:
        """Return the value that `encoded` stands for.

        Raises:
            NothingThereError: If it refers to an object, a class, or a function that is not there any more.
        """
        if not isinstance(encoded, list):
            return encoded
        kind, *rest = encoded
        if kind == "known":
            return self._known(rest[0])
        if kind == "new":
            return self._new(rest[0])
        if kind in ("tuple", "frozenset"):
            return BUILTINS[kind](self._items(rest[0]))
        if kind == "named tuple":
            return self._class(rest[0])._make(self._items(rest[1]))
        if kind == "method":
            return getattr(self.decode(rest[0]), rest[1])
        if kind == "part":
            return self._part(rest[0])
        if kind == "enum":
            return self._class(rest[0])[rest[1]]
        return _LEAVES[kind](*rest)

    def fill(self, value: Any, content: Sequence[Any]) -> None:
        """Put a content into an object that is there.

        Raises:
            NothingThereError: As `decode`, or if the object is of another kind.
        """
        kind = content[0]
        if kind in ("tensor", "parameter"):
            _fill_tensor(value, content)
        elif kind == "array":
            _fill_array(value, _array(*content[1:4]))
        elif kind == "objects":
            _fill_array(value, self._objects(content))
        elif kind == "memory":
            _fill_memory(value, content[1])
        elif kind == "cell":
            for item in self._items(content[1]):
                value.cell_contents = item
        else:
            self._fill_container(value, content)

    def _fill_container(self, value: Any, content: Sequence[Any]) -> None:
        kind, items = content[0], content[1]
        wanted = {"list": list, "set": set, "deque": deque}.get(kind, dict)
        if not isinstance(value, wanted):
            raise NothingThereError(f"a {type(value).__name__} is there in place of a {kind}")
        if isinstance(value, list):
            value[:] = self._items(items)
        elif isinstance(value, dict):
            pairs = [(self.decode(key), self.decode(child)) for key, child in items]
            value.clear()
            dict.update(value, pairs)
        else:
            found = self._items(items)
            value.clear()
            value.extend(found) if isinstance(value, deque) else value.update(found)

    def _known(self, path: str) -> Any:
        if path not in self._graph.things:
            raise NothingThereError(f"{path} is not there any more")
        return self._graph.things[path]

    def _class(self, name: str) -> Any:
        found = found_class(name, self._graph)
        if found is None:
            raise NothingThereError(f"the class {name} is not there any more")
        return found

    def _part(self, name: str) -> Any:
        found = found_part(name, self._graph)
        if found is None and name != "builtins:NoneType":
            raise NothingThereError(f"{name} is not there any more")
        return found

    def _items(self, items: Any) -> list[Any]:
        if items and items[0] == "numbers" and len(items) == 2 and isinstance(items[1], Tensor):
            numbers: list[Any] = items[1].tolist()
            return numbers
        return [self.decode(item) for item in items]

    def _new(self, number: int) -> Any:
        if number not in self._made:
            self._make(number, *self._table[number])
        return self._made[number]

    def _make(self, number: int, kind: str, *rest: Any) -> None:
        made = self._made
        if kind in ("list", "set", "deque", "dict", "defaultdict", "OrderedDict", "Counter"):
            self._make_container(number, kind, *rest)
        elif kind == "object":
            value = made[number] = _empty(self._class(rest[0]))
            self.set_attributes(value, rest[1])
        elif kind in ("tensor", "parameter"):
            made[number] = _new_tensor(kind, *rest)
        elif kind == "array":
            made[number] = _array(*rest)
        elif kind == "objects":
            made[number] = self._objects([kind, *rest])
        elif kind == "random generator":
            made[number] = generators.make_generator(rest[0])
        elif kind == "partial":
            func, args, keywords = map(self.decode, rest)
            made[number] = functools.partial(func, *args, **keywords)
        elif kind == "logger":
            made[number] = logging.getLogger(rest[0])
        elif kind == "lock":
            made[number] = threading.RLock() if rest[0] == "RLock" else threading.Lock()
        elif kind == "weak reference":
            made[number] = weakref.ref(self.decode(rest[0]))
        else:
            raise NothingThereError(f"a {kind} is of a newer version of the package")

    def _make_container(self, number: int, kind: str, items: Any, more: Any, *own: Any) -> None:
        value: Any
        is_of_user = bool(own)
        base = self._class(own[0]) if is_of_user else BUILTINS[kind]
        if kind == "defaultdict":
            factory = None if more == ["same factory"] else self.decode(more)
            value = _empty(base)
            defaultdict.__init__(value, factory)
        elif kind == "deque":
            value = _empty(base)
            deque.__init__(value, maxlen=more)
        else:
            value = _empty(base)
        self._made[number] = value
        if kind == "list":
            list.extend(value, self._items(items))
        elif kind == "set":
            set.update(value, self._items(items))
        elif kind == "deque":
            deque.extend(value, self._items(items))
        else:
            for key, child in items:
                base_set = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
                base_set(value, self.decode(key), self.decode(child))
        if is_of_user:
            self.set_attributes(value, own[1])

    def set_attributes(self, value: Any, encoded: Sequence[Sequence[Any]]) -> None:
        """Give an object the attributes of these names."""
        for name, child in encoded:
            set_attribute(value, name, self.decode(child))

    def _objects(self, content: Sequence[Any]) -> Any:
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

        array = np.empty(len(content[2]), dtype=object)
        array[:] = self._items(content[2])
        return array.reshape(content[1])


def _empty(kind: type) -> Any:
    """Return a new object of a class, made by the first of its bases that is Python's own: no code of its runs."""
    maker = next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))
    return maker.__new__(kind)  # type: ignore[call-overload]  # mypy: takes it for `type`


def set_attribute(value: Any, name: str, child: Any) -> None:
    """Set an attribute as it lies in the object: no property and no ``__setattr__`` of its class is called."""
    slots = dict(kinds.slots_of(type(value)))
    if isinstance(value, kinds.Namespace):
        setattr(value.owner, name, child)
    elif name in slots:
        slots[name].__set__(value, child)
    else:
        vars(value)[name] = child


def delete_attribute(value: Any, name: str) -> None:
    """Remove an attribute as it lies in the object."""
    slots = dict(kinds.slots_of(type(value)))
    if isinstance(value, kinds.Namespace):
        delattr(value.owner, name)
    elif name in slots:
        slots[name].__delete__(value)
    else:
        vars(value).pop(name, None)


def _new_tensor(kind: str, data: Tensor, device: str, needs_grad: bool) -> Tensor:
    tensor = data.detach().clone().to(_device(device))
    return nn.Parameter(tensor, requires_grad=needs_grad) if kind == "parameter" else tensor.requires_grad_(needs_grad)


def _device(name: str) -> torch.device:
    """Return the device of this name; the CPU where there is none."""
    device = torch.device(name)
    if device.type == "cpu" or device.type == "meta":
        return torch.device("cpu")
    module = getattr(torch, device.type, None)
    is_there = module is not None and module.is_available() and (device.index or 0) < module.device_count()
    return device if is_there else torch.device("cpu")


@torch.no_grad()
def _fill_tensor(tensor: Any, content: Sequence[Any]) -> None:
    data, needs_grad = content[1], content[3]
    if not isinstance(tensor, Tensor):
        raise NothingThereError(f"a {type(tensor).__name__} is there in place of a tensor")
    if tensor.shape == data.shape and tensor.dtype == data.dtype:
        tensor.detach().copy_(data)
    else:
        tensor.data = data.detach().clone().to(tensor.device)
    if tensor.is_leaf and tensor.requires_grad != needs_grad:
        tensor.requires_grad_(needs_grad)


def _array(dtype: Any, shape: Sequence[int], content: bytes) -> Any:
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    own = np.dtype([tuple(item) for item in dtype]) if isinstance(dtype, list) else np.dtype(dtype)
    return np.frombuffer(content, dtype=own).reshape(shape).copy()


def _fill_array(array: Any, content: Any) -> None:
    if not kinds.is_numpy(array, "ndarray") or array.shape != content.shape or array.dtype != content.dtype:
        raise NothingThereError(f"an array of shape {list(content.shape)} was there, and now it is another one")
    array[...] = content


def _fill_memory(value: Any, content: bytes) -> None:
    if not kinds.is_shared_value(value) or len(kinds.memory_of(value)) != len(content):
        raise NothingThereError(f"{len(content)} bytes of shared memory were there, and now it is something else")
    kinds.memory_of(value)[:] = content


_LEAVES: dict[str, Callable[..., Any]] = {
    "bytes": bytes,
    "complex": lambda parts: complex(*parts),
    "path": lambda kind, text: PATHS[kind](text),
    "scalar": lambda dtype, shape, content: _array(dtype, shape, content)[0],
    "date": lambda kind, text: DATES[kind].fromisoformat(text),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "text": lambda kind, text: TEXTS[kind](text),
    "size": torch.Size,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "ellipsis": lambda: ...,
}
