"""Decodes the values that `Encoder` has encoded, and restores contents into existing objects and tensors."""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import io
import logging
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state import generators
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.encoding import VALUES
from lightning_faulttolerant.state.objects.graph import Graph, alias_of
from lightning_faulttolerant.state.objects.leaves import (
    BUILTINS,
    MADE,
    PICKLED,
    decode_array,
    decode_leaf,
    found_class,
    found_method,
    found_part,
    found_progress_bar,
    set_state,
)
from lightning_faulttolerant.state.reachable import slots_of


class NothingThereError(Exception):
    """An object that a state refers to does not exist any more."""


class _LostGraph(torch.autograd.Function):
    """Stands for the operations that computed a tensor before the run was interrupted."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Any) -> object:
        raise NotExactError(
            "A gradient would flow back through a tensor from before the interruption. A checkpoint has the tensor, "
            "but not its graph. Detach it, or compute it again from its batch."
        )


def new_tensor(kind: str, data: torch.Tensor, device: str, needs_grad: bool | str, *grad: torch.Tensor) -> torch.Tensor:
    """Return a new tensor: its kind, data, device, whether it needs a gradient (or had a graph), and its gradient."""
    tensor = data.detach().clone().to(_device(device))
    if needs_grad == "graph":
        with torch.enable_grad():
            found: torch.Tensor = _LostGraph.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]  # torch's
        return found
    tensor = torch.nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
    tensor.requires_grad_(bool(needs_grad))
    for one in grad:
        tensor.grad = one.detach().clone().to(tensor.device)
    return tensor


def _device(name: str) -> torch.device:
    """Return the device of this name, or the CPU if it does not exist."""
    device = torch.device(name)
    if device.type == "cpu" or device.type == "meta":
        return torch.device("cpu")
    module = getattr(torch, device.type, None)
    is_there = module is not None and module.is_available() and (device.index or 0) < module.device_count()
    return device if is_there else torch.device("cpu")


@torch.no_grad()
def fill_tensor(tensor: Any, content: Sequence[Any]) -> None:
    """Restore an existing tensor in place, with the content that `new_tensor` takes.

    Raises:
        NothingThereError: If the existing object is of another kind.
    """
    data, needs_grad = content[1], content[3]
    if not isinstance(tensor, torch.Tensor):
        raise NothingThereError(f"it was a tensor, and is a {type(tensor).__name__} now")
    is_same_kind = tensor.shape == data.shape and tensor.dtype == data.dtype
    if is_same_kind and not _overlaps(tensor):
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(data)
    else:
        tensor.data = data.detach().clone().to(tensor.device)
    if tensor.is_leaf and needs_grad != "graph" and tensor.requires_grad != needs_grad:
        tensor.requires_grad_(bool(needs_grad))
    if tensor.is_leaf and (tensor.grad is not None or len(content) > 4):
        tensor.grad = content[4].detach().clone().to(tensor.device) if len(content) > 4 else None


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of `tensor` share memory, like those of an expanded one."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


_VALUES = {kind.__name__: kind for kind in VALUES}


class Decoder:
    """Decodes the values of one state.

    Args:
        graph: The objects that this fit began with.
        table: The objects that the saved fit did not begin with, from `Encoder`.
    """

    def __init__(self, graph: Graph, table: Sequence[Any]) -> None:
        self._graph = graph
        self._table = table
        self._made: dict[int, object] = {}
        self._unfilled: list[int] = []
        self._is_at_once = False

    def decode(self, encoded: Any) -> object:
        """Return the value that `encoded` stands for.

        Raises:
            NothingThereError: If it refers to an object, a class, or a function that does not exist any more.
        """
        value = self._decode(encoded)
        self._fill_made()
        return value

    def _decode(self, encoded: Any) -> object:
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
            return tuple.__new__(self._class(rest[0]), self._items(rest[1]))
        if kind == "method":
            return self._method(self._decode(rest[0]), rest[1])
        if kind == "part":
            return self._part(rest[0])
        if kind in ("enum", "flag"):
            return self._enum(kind, *rest)
        return decode_leaf(kind, *rest)

    def fill(self, value: Any, content: Sequence[object]) -> None:
        """Restore content into an existing object.

        Raises:
            NothingThereError: As `decode`, or if the object is of another kind.
        """
        self._fill(value, content)
        self._fill_made()

    def _fill(self, value: Any, content: Sequence[Any]) -> None:
        kind = content[0]
        if kind in ("tensor", "parameter"):
            fill_tensor(value, content)
        elif kind == MADE and set_state(value, content[1]):
            return
        elif kind in (MADE, PICKLED):
            raise NothingThereError(f"a {type(value).__name__} exists that can't be restored from its bytes")
        elif kind == "array":
            _fill_array(value, decode_array(*content[1:4]))
        elif kind == "objects":
            _fill_array(value, self._objects(content))
        elif kind == "memory":
            _fill_memory(value, content[1])
        elif kind == "buffer":
            _fill_buffer(value, content)
        elif kind == "cell":
            for item in self._items(content[1]):
                value.cell_contents = item
        else:
            self._fill_container(value, content)

    def _fill_container(self, value: Any, content: Sequence[Any]) -> None:
        kind, items = content[0], content[1]
        is_plain = kind == "plain"
        kind = type(items).__name__ if is_plain else kind
        wanted: Any = {"list": list, "set": set, "deque": deque}.get(kind, dict)
        if not isinstance(value, wanted):
            raise NothingThereError(f"it was a {kind}, and is a {type(value).__name__} now")
        if is_plain:
            kinds.fill(value, _plain(items))
        elif kind in _MAPPINGS:
            kinds.fill(value, self._pairs(items))
        else:
            kinds.fill(value, self._items(items, has_hashes=kind == "set"))
        if kind == "set":
            _check_order(value, self._items(items))

    def _known(self, path: str) -> object:
        return _there(self._graph.thing_at(path), path)

    def _class(self, name: str) -> Any:
        return _there(found_class(name, self._graph), f"the class {name}")

    def _part(self, name: str) -> object:
        return _there(found_part(name, self._graph), name)

    def _method(self, owner: object, name: str) -> object:
        return _there(found_method(owner, name), f"{type(owner).__name__}.{name}")

    def _enum(self, kind: str, name: str, encoded: Sequence[object]) -> object:
        found = self._class(name)
        try:
            return found[encoded] if kind == "enum" else found(self._decode(encoded))
        except (KeyError, ValueError) as error:
            raise NothingThereError(f"{name} no longer has {encoded}") from error

    def _items(self, items: Any, *, has_hashes: bool = False) -> list[object]:
        if items and items[0] == "numbers" and len(items) == 2 and isinstance(items[1], torch.Tensor):
            numbers: list[object] = items[1].tolist()
            return numbers
        return [self._hashable(item) if has_hashes else self._decode(item) for item in items]

    def _pairs(self, items: Any) -> list[tuple[object, object]]:
        return [(self._hashable(key), self._decode(child)) for key, child in items]

    def _hashable(self, encoded: Any) -> Any:
        """Return a value that is complete immediately: its hash may follow from its attributes."""
        before, self._is_at_once = self._is_at_once, True
        try:
            return self._decode(encoded)
        finally:
            self._is_at_once = before

    def _new(self, number: int) -> object:
        if number not in self._made:
            self._made[number] = self._empty_one(*self._table[number])
            self._unfilled.append(number)
            if self._is_at_once:
                self._fill_one(self._unfilled.pop())
        return self._made[number]

    def _fill_made(self) -> None:
        """Fill the new objects that are still empty, one after the other, at any depth."""
        while self._unfilled:
            self._fill_one(self._unfilled.pop())

    def _empty_one(self, kind: str, *rest: Any) -> object:
        """Return a new object; one that can change is still without its content."""
        if kind in _CONTAINERS:
            return self._empty_container(kind, *rest)
        if kind in _MAKERS:
            return _MAKERS[kind](*rest)
        if kind == "object":
            return _empty(self._class(rest[0]))
        if kind == "value":
            base = _VALUES[rest[1]]
            return base.__new__(self._class(rest[0]), self._decode(rest[2]))
        if kind in ("tensor", "parameter"):
            return new_tensor(kind, *rest)
        if kind == "tensor of a class":
            return self._tensor(rest[1]).as_subclass(self._class(rest[0]))
        if kind == "alias":
            base, *place, needs_grad = rest
            return alias_of(self._tensor(base), *place).requires_grad_(needs_grad)
        if kind == "objects":
            return self._objects([kind, *rest])
        if kind == "partial":
            func, args, keywords = map(self._hashable, rest)
            return functools.partial(func, *args, **keywords)
        if kind == "weak reference":
            referent = self._decode(rest[0])
            return weakref.ref(_Gone() if referent is None else referent)
        if kind == PICKLED:
            raise NothingThereError(f"a {rest[0]} can't be recreated from its bytes")
        raise NothingThereError(f"a {kind} comes from a newer version of the package")

    def _empty_container(self, kind: str, items: Iterable[object], more: Any, *own: Any) -> object:
        value: Any = _empty(self._class(own[0]) if own else BUILTINS[kind])
        if kind == "defaultdict":
            defaultdict.__init__(value, None if more == ["same factory"] else self._hashable(more))
        elif kind == "deque":
            deque.__init__(value, maxlen=more)
        return value

    def _fill_one(self, number: int) -> None:
        value, (kind, *rest) = self._made[number], self._table[number]
        if kind in _CONTAINERS:
            self._fill_container(value, [kind, *rest])
        place = _PLACES_OF_ATTRIBUTES.get(kind, len(rest))
        if place < len(rest):  # a container of Python's own class has no attributes
            self.set_attributes(value, rest[place])

    def _tensor(self, encoded: object) -> torch.Tensor:
        found = self._hashable(encoded)
        if not isinstance(found, torch.Tensor):
            raise NothingThereError(f"it was a tensor, and is a {type(found).__name__} now")
        return found

    def set_attributes(self, value: Any, encoded: Sequence[Sequence[Any]]) -> None:
        """Set an object's attributes from their encoded values."""
        for name, child in encoded:
            set_attribute(value, name, self._decode(child))

    def _objects(self, content: Sequence[Any]) -> object:
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

        array = np.empty(len(content[2]), dtype=object)
        array[:] = self._items(content[2])
        return array.reshape(content[1])


_MAPPINGS = ("dict", "defaultdict", "OrderedDict", "Counter")
_CONTAINERS = ("list", "set", "deque", *_MAPPINGS)
_PLACES_OF_ATTRIBUTES = {"object": 1, "value": 3, "tensor of a class": 2, **dict.fromkeys(_CONTAINERS, 3)}


def _there(found: Any, name: str) -> Any:
    if found is None:
        raise NothingThereError(f"{name} no longer exists")
    return found


def _progress_bar(name: str, position: object, total: object, description: Any, is_shown: bool) -> object:
    """Return a progress bar that continues where the old one was."""
    kind = _there(found_progress_bar(name), f"the class {name}")
    description = (description or "").removesuffix(": ") or None
    return kind(total=total, initial=position, desc=description, disable=not is_shown)


def _plain(value: Any) -> list[object]:
    """Return copies of the items of plain data; pairs for a dict."""
    copied = copy.deepcopy(value)
    return list(copied.items()) if isinstance(copied, dict) else copied


class _Gone:
    """Stands for the dead object of a weak reference."""


def _check_order(value: set[Any], wanted: list[object]) -> None:
    """Refuse a set of numbers with another order; the order of texts differs in each process anyway."""
    if kinds.items_of(value) != wanted and all(isinstance(item, (int, float)) for item in wanted):
        raise NothingThereError("a set of numbers has the same items, but yields them in another order; sort it")


def _empty(kind: type) -> object:
    """Return a new object of a class, created by its first base that is Python's own, without running its code."""
    maker = next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))
    return maker.__new__(kind)  # type: ignore[call-overload]  # mypy: takes it for `type`


def set_attribute(value: object, name: str, child: object) -> None:
    """Set an attribute directly in the object, without calling a property or ``__setattr__`` of its class."""
    slots = dict(slots_of(type(value)))
    if isinstance(value, kinds.Namespace):
        if kinds.is_named(child):
            raise NothingThereError("it was a function, and is a value now")
        setattr(value.owner, name, child)
    elif name in slots:
        slots[name].__set__(value, child)
    else:
        vars(value)[name] = child


def delete_attribute(value: object, name: str) -> None:
    """Remove an attribute directly from the object, if it exists."""
    slots = dict(slots_of(type(value)))
    with contextlib.suppress(AttributeError):
        if isinstance(value, kinds.Namespace):
            delattr(value.owner, name)
        elif name in slots:
            slots[name].__delete__(value)
        else:
            vars(value).pop(name, None)


def _fill_array(array: Any, content: Any) -> None:
    if not kinds.is_numpy(array, "ndarray") or array.shape != content.shape or array.dtype != content.dtype:
        raise NothingThereError(f"it was an array of shape {list(content.shape)}, and has another kind or shape now")
    array[...] = content


def _fill_memory(value: object, content: bytes) -> None:
    if not kinds.is_shared_value(value) or len(kinds.memory_of(value)) != len(content):
        raise NothingThereError(f"it was {len(content)} bytes of shared memory, and has another kind or size now")
    kinds.memory_of(value)[:] = content


def _new_buffer(kind: str, content: Any, position: int, kind_of_number: str | None) -> Any:
    if kind == "bytearray":
        return bytearray(content)
    if kind == "array":
        return array.array(kind_of_number or "b", content)
    made: object = io.StringIO() if kind == "StringIO" else io.BytesIO()
    _fill_buffer(made, ["buffer", kind, content, position, None])
    return made


def _fill_buffer(value: Any, content: Sequence[Any]) -> None:
    _, kind, held, position, kind_of_number = content
    if type(value).__name__ != kind or getattr(value, "typecode", None) != kind_of_number:
        raise NothingThereError(f"it was a {kind}, and is a {type(value).__name__} now")
    if isinstance(value, (bytearray, array.array)):
        value[:] = _new_buffer(kind, held, position, kind_of_number)
    elif held is None:
        value.close()
    else:
        value.seek(0)
        value.truncate()
        value.write(held)
        value.seek(position)


_MAKERS: dict[str, Callable[..., object]] = {
    "plain": copy.deepcopy,
    "array": decode_array,
    "buffer": _new_buffer,
    "random generator": generators.make_generator,
    "logger": logging.getLogger,
    "progress bar": _progress_bar,
    "lock": lambda kind: threading.RLock() if kind == "RLock" else threading.Lock(),
    MADE: lambda one: one,
}
"""What makes a new object of a kind that needs no other object."""
