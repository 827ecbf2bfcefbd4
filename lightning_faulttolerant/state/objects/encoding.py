"""Values as plain lists, dicts, numbers, strings, bytes, and tensors, which a checkpoint can hold safely.

``None``, booleans, whole numbers, fractions, and strings stand for themselves. Everything else is a list whose first
item names its kind. An object that the fit began with is named by its path. Each other object that can change is in a
table once, so that its holders share it again.
"""

from __future__ import annotations

import array
import enum
import functools
import logging
import math
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_faulttolerant.state import generators
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.graph import Aliases, Graph, name_of
from lightning_faulttolerant.state.objects.leaves import (
    CantCarryError,
    LiveError,
    OpaqueError,
    Pickles,
    SavedError,
    TooLargeError,
    check_not_saved,
    class_name,
    encode_array,
    encode_leaf,
    has_whole_state,
    method_name,
    part_name,
    plain_of,
    why_not,
)
from lightning_faulttolerant.state.reachable import is_generator, is_users
from lightning_faulttolerant.state.tensors import is_readable, shard_of

_PLAIN = frozenset({type(None), bool, int, float})
_MIN_NUMBERS = 64  # a list with this many numbers is kept as one tensor
_MAX_BYTES = 1 << 30
_ITEM_BYTES = 64
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
VALUES: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""Base classes of users' classes whose objects only change in their attributes, with a way to get the plain value."""


_Place: TypeAlias = tuple[bool, str]
"""Whether a live object that is met here is reported, and the place, for errors.

It isn't reported inside a package's own handle, such as a writer or a client.
"""
_NOWHERE: _Place = False, ""


class _ByteLimit:
    """The approximate limit for the bytes of one save.

    Args:
        max_bytes: The limit.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = self.num_left = max_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes.

        Raises:
            TooLargeError: If they are too many.
        """
        self.num_left -= num_bytes
        if self.num_left < 0:
            raise TooLargeError(f"more than {self._max_bytes / 1024:.0f} kB have changed")


class _NewObjects:
    """The objects that the fit did not begin with, by number. Each has a row in `table`, which is filled later."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        """By the id of the object."""
        self.objects: list[object] = []  # keeps their ids valid
        self.table: list[object] = []
        self.owed: list[tuple[int, _Place]] = []
        """The rows that are still empty."""

    def number_of(self, value: object, place: _Place) -> int:
        """Return the number of an object that was met at `place`."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.table)
            self.objects.append(value)
            self.table.append(None)
            self.owed.append((number, place))
        return number

    def forget(self, num: int) -> list[object]:
        """Forget the objects from number `num` on, and return them."""
        forgotten = self.objects[num:]
        self.numbers = {key: number for key, number in self.numbers.items() if number < num}
        self.owed.clear()
        del self.table[num:], self.objects[num:]
        return forgotten


class Encoder:
    """Encodes the values of one save.

    Args:
        graph: The objects that the fit began with.
        max_bytes: The approximate limit for everything together.
        has_plain: Whether plain data stands for itself; check `is_torn` afterwards.
        keeps_bytes: Whether objects that only their library can read may be kept as bytes.
    """

    def __init__(
        self, graph: Graph, *, max_bytes: float = math.inf, has_plain: bool = False, keeps_bytes: bool = False
    ) -> None:
        self._graph = graph
        self._aliases = Aliases(graph)
        self._limit = _ByteLimit(max_bytes)
        self._new = _NewObjects()
        self._place = _NOWHERE
        self._has_graphs = True
        self._has_plain = has_plain
        self._pickles = Pickles(self._is_shared) if keeps_bytes else None
        self._in_plain: set[int] = set()
        self._kept_plain: list[object] = []
        self.may_be_handle = False
        """Whether a library's own object may be a handle that a data set has opened for reading."""
        self.is_torn = False
        """Whether an object refers to a list or dict inside of plain data: encode all again, without ``has_plain``."""

    @property
    def table(self) -> list[object]:
        """The objects that the fit did not begin with, each by its number."""
        return self._new.table

    def encode(self, value: object) -> object:
        """Return the encoded form of `value`.

        Raises:
            CantCarryError: If it, or an object that it refers to, can't be carried; the message names it and why.
        """
        return self._or_nothing(self._encode, value)

    def state(self, state_dict: object) -> object:
        """Return the encoded form of a ``state_dict``: like `encode`, but tensors are copies without a graph.

        Raises:
            CantCarryError: As `encode`.
        """
        self._has_graphs = False
        try:
            return self.encode(state_dict)
        finally:
            self._has_graphs = True

    def content(self, value: object) -> list[object]:
        """Return the content of an object that the fit began with, to be restored into that object.

        Raises:
            CantCarryError: As `encode`.
        """
        encoded: list[object] = self._or_nothing(self._content_or_bytes, value)
        return encoded

    def _content_or_bytes(self, value: object) -> list[object]:
        try:
            return self._content(value)
        except CantCarryError as error:
            if not has_whole_state(value):
                raise
            return self._pickled(value, error)

    def _or_nothing(self, encode: Callable[[object], object], value: object) -> Any:
        num_before, bytes_before = len(self._new.table), self._limit.num_left
        try:
            encoded = encode(value)
            self._make_owed()
            return encoded
        except BaseException:
            self._aliases.forget(self._new.forget(num_before))
            self._limit.num_left = bytes_before
            raise

    def _make_owed(self) -> None:
        """Fill the rows of the table that are still empty, one after the other, at any depth."""
        new = self._new
        while new.owed:
            number, place = new.owed.pop()
            new.table[number] = self._inside(self._made, new.objects[number], place)

    def _encode(self, value: Any) -> object:
        self._limit.take(len(value) if type(value) in (str, bytes) else _ITEM_BYTES)
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, type) and "<locals>" in value.__qualname__ and not is_users(value):
            raise LiveError(f"the class {value.__qualname__}, which its library creates on first use")
        path = self._graph.path_of(value)
        if path is not None:
            return ["known", path]
        if isinstance(value, enum.Enum):
            return self._enum(value)
        if kinds.is_leaf(value):
            return encode_leaf(value)
        if type(value) in (tuple, frozenset):
            return [type(value).__name__, self._items(value)]
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            return ["named tuple", class_name(type(value), self._graph), self._items(tuple.__iter__(value))]
        if isinstance(value, types.MethodType):
            return ["method", self._encode(value.__self__), method_name(value)]
        if kinds.is_named(value):
            return ["part", part_name(value, self._graph)]
        return ["new", self._number(value)]

    def _enum(self, value: enum.Enum) -> list[object]:
        name = class_name(type(value), self._graph)
        if value.name is not None and type(value).__members__.get(value.name) is value:
            return ["enum", name, value.name]
        return ["flag", name, self._encode(value.value)]  # several of its members together

    def _is_shared(self, value: object) -> bool:
        is_alias = isinstance(value, Tensor) and self._aliases.base_of(value) is not None
        return is_alias or id(value) in self._new.numbers or self._graph.path_of(value) is not None

    def _pickled(self, value: object, reason: CantCarryError) -> list[object]:
        """Return the bytes of an object that can't be carried in any other way."""
        is_handle = isinstance(reason, LiveError) or (self.may_be_handle and isinstance(reason, OpaqueError))
        if self._pickles is None or is_handle or isinstance(reason, TooLargeError):
            raise reason
        if kinds.is_generator(value) or kinds.is_iterator(value) or kinds.is_loader_iterator(value):
            raise reason
        if not isinstance(value, torch.nn.Module) and (kinds.is_container(value) or kinds.is_walked(value)):
            raise reason
        row = self._pickles.row(value, reason)
        self._limit.take(len(row[-1]))
        return row

    def _number(self, value: object) -> int:
        if self._pickles is not None and self._pickles.has_met(value):
            raise CantCarryError(
                f"a {type(value).__name__} that is also part of an object that only its library can read"
            )
        self.is_torn |= id(value) in self._in_plain
        return self._new.number_of(value, self._place)

    def _made(self, value: object) -> list[object]:
        """Return the encoded form that recreates an object."""
        try:
            return self._readable(value)
        except CantCarryError as error:
            return self._pickled(value, error)

    def _readable(self, value: object) -> list[object]:
        if type(value) in (list, dict):  # the most frequent kinds
            return self._content(value)
        if is_generator(value):
            return ["random generator", generators.pack_generator(value)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self._encode, (value.func, value.args, value.keywords))]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if kinds.is_progress_bar(value):
            return ["progress bar", name_of(type(value)), *kinds.state_of_bar(value)]
        if isinstance(value, _LOCKS):
            return ["lock", type(value).__name__]
        if isinstance(value, weakref.ref):
            return ["weak reference", self._encode(value())]
        if isinstance(value, Tensor):
            return self._new_tensor(value)
        if kinds.is_container(value) or kinds.is_numpy(value, "ndarray") or kinds.is_buffer(value):
            return [*self._content(value), *self._rest(value)]
        if isinstance(value, torch.nn.Module):
            raise CantCarryError(f"a module ({type(value).__name__}) that was created in training")
        if isinstance(value, tuple(VALUES)):
            return self._value(value)
        if kinds.is_walked(value):
            return ["object", class_name(type(value), self._graph), self._attributes(value)]
        raise why_not(value)

    def _new_tensor(self, tensor: Tensor) -> list[object]:
        """Return a copy of a tensor; for one that shares another's memory, its place there."""
        if _has_own_class(tensor):
            with torch._C.DisableTorchFunctionSubclass():
                data = tensor.as_subclass(Tensor)
            name = class_name(type(tensor), self._graph)
            return ["tensor of a class", name, self._encode(data), self._attributes(tensor)]
        base = self._aliases.base_of(tensor)
        if base is None:
            return self._content(tensor)
        other, offset = base
        place = [list(tensor.shape), list(tensor.stride()), offset]
        return ["alias", self._encode(other), *place, tensor.requires_grad and tensor.is_leaf]

    def _value(self, value: object) -> list[object]:
        """Return the encoded form of an object whose class derives from a number, a string, or a similar type."""
        base = next(kind for kind in VALUES if isinstance(value, kind))
        if type(value).__new__ is not base.__new__ and not is_users(type(value)):
            raise CantCarryError(f"a {type(value).__module__}.{type(value).__qualname__}")
        name, plain = class_name(type(value), self._graph), self._encode(VALUES[base](value))
        return ["value", name, base.__name__, plain, self._attributes(value)]

    def _rest(self, value: object) -> list[object]:
        """Return the class of a user's own container, and its attributes."""
        if not kinds.is_container(value) or kinds.is_plain_container(value):
            return []
        return [class_name(type(value), self._graph), self._attributes(value)]

    def _attributes(self, value: object) -> list[object]:
        return [[name, self._attribute(value, name, child)] for name, child in kinds.attributes(value).items()]

    def _attribute(self, value: object, name: str, child: object) -> object:
        is_part = self._place[0] or is_users(type(value))
        return self._inside(self._encode, child, (is_part, f", in {type(value).__name__}.{name}"))

    def _item(self, child: object) -> object:
        if type(child) in _PLAIN:
            self._limit.take(_ITEM_BYTES)
            return child
        return self._inside(self._encode, child, (True, self._place[1]))

    def _inside(self, encode: Callable[[object], object], child: object, place: _Place) -> object:
        """Encode an object that another one refers to, at this place."""
        before, self._place = self._place, place
        is_part, where = place
        try:
            return encode(child)
        except CantCarryError as error:
            if not is_part or isinstance(error, SavedError):
                raise
            raise CantCarryError(f"{error}{where}") from error
        finally:
            self._place = before

    def _content(self, value: Any) -> list[object]:
        if self._has_plain and type(value) in (list, dict):
            plain = self._plain(value)
            if plain is not None:
                return plain
        if type(value) is list:
            return ["list", self._items(value), None]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kinds.is_array(value):
            if kinds.is_mapped(value):
                raise LiveError("a file that is mapped into memory")
            return self._array(value)
        if kinds.is_numpy(value, "ndarray"):
            return ["objects", list(value.shape), self._items(value.ravel().tolist())]
        if isinstance(value, dict):
            check_not_saved(value)
            kind = next(kind for kind in (defaultdict, OrderedDict, Counter, dict) if isinstance(value, kind))
            pairs = [[self._item(key), self._item(child)] for key, child in kinds.pairs_of(value)]
            return [kind.__name__, pairs, self._factory(value) if isinstance(value, defaultdict) else None]
        if kinds.is_container(value):
            name = next(kind.__name__ for kind in (deque, set, list) if isinstance(value, kind))
            return [name, self._items(kinds.items_of(value)), value.maxlen if isinstance(value, deque) else None]
        if kinds.is_buffer(value):
            content, position = kinds.content_of_buffer(value)
            kind_of_number = value.typecode if isinstance(value, array.array) else None
            self._limit.take(len(content or ""))
            return ["buffer", type(value).__name__, content, position, kind_of_number]
        if kinds.is_shared_value(value):
            return ["memory", bytes(kinds.memory_of(value))]
        if isinstance(value, types.CellType):
            return ["cell", self._items(kinds.contents_of_cell(value))]
        raise why_not(value)

    def _plain(self, value: object) -> list[object] | None:
        """Return the encoded form of plain data; ``None`` for other values, and if other objects refer to its parts."""
        found = plain_of(value)
        if found is None or self._graph.may_have_met(found.ids) or not self._new.numbers.keys().isdisjoint(found.ids):
            return None
        if type(value) is list and len(value) >= _MIN_NUMBERS and not found.ids:
            return None  # they may be numbers of one kind
        self._limit.take(found.num_bytes)
        self.is_torn |= not self._in_plain.isdisjoint(found.ids)
        self._in_plain |= found.ids
        self._kept_plain.append(value)
        return ["plain", found.copy()]

    def _tensor(self, tensor: Tensor) -> list[object]:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_readable(tensor):
            raise CantCarryError(f"a {type(tensor).__name__} that is not a plain tensor")
        self._limit.take(tensor.numel() * tensor.element_size())
        if tensor.nbytes > _MAX_BYTES:
            raise CantCarryError(f"a tensor of {tensor.nbytes / (1 << 20):.0f} MiB, which is too large")
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        has_graph = tensor.requires_grad and not tensor.is_leaf
        needs_grad = ("graph" if self._has_graphs else False) if has_graph else tensor.requires_grad
        grad = tensor.grad if tensor.is_leaf else None
        more = [] if grad is None else [shard_of(grad).detach().clone()]
        return [kind, shard_of(tensor).detach().clone(), str(tensor.device), needs_grad, *more]

    def _array(self, array: Any) -> list[object]:
        self._limit.take(array.nbytes)
        if type(array) is not sys.modules["numpy"].ndarray:
            raise CantCarryError(f"a {type(array).__name__}, which is not a plain array")
        if array.nbytes > _MAX_BYTES:
            raise CantCarryError(f"an array of {array.nbytes / (1 << 20):.0f} MiB, which is too large")
        return ["array", *encode_array(array)]

    def _factory(self, value: Any) -> object:
        if self._graph.path_of(value) is not None:
            return ["same factory"]  # the factory of the existing dict
        return self._encode(value.default_factory)

    def _items(self, items: Iterable[object]) -> object:
        values = list(items)
        self._limit.take(8 * len(values))
        if len(values) >= _MIN_NUMBERS:
            for kind, dtype in ((float, torch.float64), (int, torch.int64)):
                if set(map(type, values)) == {kind}:
                    try:
                        return ["numbers", torch.tensor(values, dtype=dtype)]
                    except (OverflowError, RuntimeError):  # longer integers
                        break
        return [self._item(child) for child in values]


def _has_own_class(tensor: Tensor) -> bool:
    """Return whether a tensor has a class that only adds attributes and methods to torch's, such as MONAI's."""
    kind = type(tensor)
    if kind is Tensor or isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        return False
    return is_readable(tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
