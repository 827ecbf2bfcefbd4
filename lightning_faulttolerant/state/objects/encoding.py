"""Values as plain lists, dicts, numbers, strings, bytes, and tensors, which a checkpoint can hold safely.

``None``, booleans, whole numbers, fractions, and strings stand for themselves. Everything else is a list whose first
item says what it is. An object that the fit began with is named by its path. Each other object that can change stands
once in a table, so that those who share it share it again.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import logging
import math
import pathlib
import sys
import threading
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state import generators
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.graph import Graph, name_of
from lightning_faulttolerant.state.objects.modules import is_users
from lightning_faulttolerant.state.reachable import is_generator
from lightning_faulttolerant.state.tensors import shard_of

_MIN_NUMBERS = 64  # so many numbers in a list are kept as one tensor
_MAX_BYTES = 1 << 30
_ITEM_BYTES = 64
_FUNCTIONS = ("torch", "torch.nn.functional", "numpy", "math")  # whose functions don't say where they are found
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
BUILTINS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict,
                                                            set, frozenset, type(None), deque, Counter, OrderedDict,
                                                            defaultdict)}  # fmt: skip
DATES: dict[str, Any] = {kind.__name__: kind for kind in (datetime.date, datetime.datetime, datetime.time)}
PATHS: dict[str, Any] = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath,
                                                         pathlib.PosixPath, pathlib.WindowsPath)}  # fmt: skip
TEXTS: dict[str, Any] = {"Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "UUID": uuid.UUID}


class CantCarryError(Exception):
    """A value can't be carried through a checkpoint."""


class LiveError(CantCarryError):
    """A value stands for something outside of Python, which is no state: an open file, a lock, a progress bar."""


class TooLargeError(CantCarryError):
    """A value is larger than there is room."""


class Encoder:
    """Encodes the values of one save.

    Args:
        graph: The objects that the fit began with.
        max_bytes: About how much all of it may be.
    """

    def __init__(self, graph: Graph, *, max_bytes: float = math.inf) -> None:
        self._graph = graph
        self._max_bytes = self._bytes_left = max_bytes
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self.table: list[Any] = []
        """The objects that the fit did not begin with, each by its number."""

    def encode(self, value: Any) -> Any:
        """Return what stands for `value`.

        Raises:
            CantCarryError: If it, or something that it refers to, can't be carried; it says what and why.
        """
        return self._or_nothing(self._encode, value)

    def content(self, value: Any) -> list[Any]:
        """Return the content of an object that the fit began with, to be put into that object.

        Raises:
            CantCarryError: As `encode`.
        """
        encoded: list[Any] = self._or_nothing(self._content, value)
        return encoded

    def _or_nothing(self, encode: Callable[[Any], Any], value: Any) -> Any:
        num_before, bytes_before = len(self.table), self._bytes_left
        try:
            return encode(value)
        except BaseException:
            self._forget(num_before)
            self._bytes_left = bytes_before
            raise

    def _take(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TooLargeError(f"more than {self._max_bytes / 1024:.0f} kB have changed")

    def _forget(self, num: int) -> None:
        self._numbers = {key: number for key, number in self._numbers.items() if number < num}
        del self.table[num:], self._kept[num:]

    def _encode(self, value: Any) -> Any:
        self._take(len(value) if isinstance(value, (str, bytes)) else _ITEM_BYTES)
        if value is None or type(value) in (bool, int, float, str):
            return value
        path = self._graph.path_of(value)
        if path is not None and self._graph.things[path] is value:
            return ["known", path]
        if kinds.is_leaf(value):
            return _leaf(value)
        if type(value) in (tuple, frozenset):
            return [type(value).__name__, self._items(value)]
        if isinstance(value, tuple):
            return ["named tuple", self._class(type(value)), self._items(value)]
        if isinstance(value, types.MethodType):
            return ["method", self._encode(value.__self__), value.__func__.__name__]
        if kinds.is_named(value):
            return ["part", self._name(value)]
        return ["new", self._number(value)]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            number = self._numbers[id(value)] = len(self.table)
            self._kept.append(value)  # so that its id stays its own
            self.table.append(None)
            self.table[number] = self._made(value)
        return self._numbers[id(value)]

    def _made(self, value: Any) -> list[Any]:
        """Return how to make an object anew."""
        if is_generator(value):
            return ["random generator", generators.pack_generator(value)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self._encode, (value.func, value.args, value.keywords))]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, _LOCKS):
            return ["lock", type(value).__name__]
        if isinstance(value, weakref.ref):
            return ["weak reference", self._encode(value())]
        if isinstance(value, Tensor) or kinds.is_container(value) or kinds.is_numpy(value, "ndarray"):
            return [*self._content(value), *self._rest(value)]
        if isinstance(value, torch.nn.Module):
            raise CantCarryError(f"a module ({type(value).__name__}) that was made in training")
        if kinds.is_walked(value):
            return ["object", self._class(type(value)), self._attributes(value)]
        raise _why_not(value)

    def _rest(self, value: Any) -> list[Any]:
        """Return the class of a container of a user's own, and what it holds in attributes."""
        if not kinds.is_container(value) or kinds.is_plain_container(value):
            return []
        return [self._class(type(value)), self._attributes(value)]

    def _attributes(self, value: Any) -> list[Any]:
        return [[name, self._attribute(value, name, child)] for name, child in kinds.attributes(value).items()]

    def _attribute(self, value: Any, name: str, child: Any) -> Any:
        try:
            return self._encode(child)
        except CantCarryError as error:
            if isinstance(error, LiveError) and not is_users(type(value)):
                raise  # a package's own handle: a writer, a client
            raise CantCarryError(f"{error}, in {type(value).__name__}.{name}") from error

    def _content(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            self._take(value.numel() * value.element_size())
            return _tensor(value)
        if kinds.is_array(value):
            self._take(value.nbytes)
            return _array(value)
        if kinds.is_numpy(value, "ndarray"):
            return ["objects", list(value.shape), self._items(value.ravel().tolist())]
        if isinstance(value, dict):
            kind = next(kind for kind in (defaultdict, OrderedDict, Counter, dict) if isinstance(value, kind))
            pairs = [[self._encode(key), self._encode(child)] for key, child in value.items()]
            factory = self._factory(value.default_factory) if isinstance(value, defaultdict) else None
            return [kind.__name__, pairs, factory]
        if isinstance(value, deque):
            return ["deque", self._items(value), value.maxlen]
        if isinstance(value, set):
            return ["set", self._items(value), None]
        if isinstance(value, list):
            return ["list", self._items(value), None]
        if kinds.is_shared_value(value):
            return ["memory", bytes(kinds.memory_of(value))]
        if isinstance(value, types.CellType):
            return ["cell", self._items(kinds.contents_of_cell(value))]
        raise _why_not(value)

    def _factory(self, factory: Any) -> Any:
        try:
            return self._encode(factory)
        except CantCarryError:
            return ["same factory"]  # that of the dict that is there

    def _items(self, items: Iterable[Any]) -> Any:
        values = list(items)
        self._take(8 * len(values))
        if len(values) >= _MIN_NUMBERS:
            for kind, dtype in ((float, torch.float64), (int, torch.int64)):
                if set(map(type, values)) == {kind}:
                    try:
                        return ["numbers", torch.tensor(values, dtype=dtype)]
                    except (OverflowError, RuntimeError):  # whole numbers that are longer
                        break
        return [self._encode(child) for child in values]

    def _class(self, kind: type) -> str:
        name = name_of(kind)
        if found_class(name, self._graph) is not kind:
            raise CantCarryError(f"a {kind.__qualname__}, whose class can't be found by its name")
        return name

    def _name(self, value: Any) -> str:
        own_name = getattr(value, "__name__", "")
        if BUILTINS.get(own_name) is value:
            return f"builtins:{own_name}"
        if isinstance(value, types.ModuleType):
            raise LiveError(f"the module {value.__name__}")
        qualname = getattr(value, "__qualname__", own_name)
        names = [f"{getattr(value, '__module__', None)}:{qualname}", *(f"{name}:{own_name}" for name in _FUNCTIONS)]
        name = next((name for name in names if found_part(name, self._graph) is value), None)
        if name is None:
            raise CantCarryError(f"the function {names[0]}, which can't be found by its name")
        return name


def found_class(name: str, graph: Graph) -> type | None:
    """Return the class of this name, of a module that is imported; or one of those that the fit began with."""
    known = graph.classes.get(name)
    found = known if known is not None else found_part(name, graph)
    return found if isinstance(found, type) else None


def found_part(name: str, graph: Graph) -> Any:
    """Return the class or function of this name, of a module that is imported and not one of Python's own."""
    module_name, _, qualname = name.partition(":")
    if module_name == "builtins":
        return BUILTINS.get(qualname)
    # What a checkpoint names is looked up, never imported: others may have written it.
    if module_name.partition(".")[0] in sys.stdlib_module_names - {"__main__", "math"}:
        return None
    found: Any = sys.modules.get(module_name)
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    return found


def _leaf(value: Any) -> list[Any]:
    if isinstance(value, enum.Enum):
        return ["enum", name_of(type(value)), value.name]
    if isinstance(value, pathlib.PurePath):
        return ["path", type(value).__name__, str(value)]
    if kinds.is_numpy(value, "generic"):
        return ["scalar", *_array_content(value.reshape(1))]
    kind = type(value)
    if kind in (bytes, complex):
        return [kind.__name__, value if kind is bytes else [value.real, value.imag]]
    if kind in DATES.values():
        return ["date", kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind in (range, slice):
        return [kind.__name__, [value.start, value.stop, value.step]]
    if kind in TEXTS.values():
        return ["text", kind.__name__, str(value)]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if value is ...:
        return ["ellipsis"]
    raise CantCarryError(f"a {kind.__name__}")


def _tensor(tensor: Tensor) -> list[Any]:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.is_quantized:
        raise CantCarryError(f"a {type(tensor).__name__} that is not a plain tensor")
    if tensor.nbytes > _MAX_BYTES:
        raise CantCarryError(f"a tensor of {tensor.nbytes / (1 << 20):.0f} MiB, which is too large")
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    needs_grad = tensor.requires_grad and tensor.is_leaf
    return [kind, shard_of(tensor).detach().clone(), str(tensor.device), needs_grad]


def _array(array: Any) -> list[Any]:
    if array.nbytes > _MAX_BYTES:
        raise CantCarryError(f"an array of {array.nbytes / (1 << 20):.0f} MiB, which is too large")
    return ["array", *_array_content(array)]


def _array_content(array: Any) -> list[Any]:
    if array.dtype.names is not None or array.dtype.subdtype is not None:
        return [array.dtype.descr and [list(map(str, item)) for item in array.dtype.descr], list(array.shape),
                array.tobytes()]  # fmt: skip
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _why_not(value: Any) -> CantCarryError:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if kinds.is_generator(value) or kinds.is_iterator(value) or kinds.is_loader_iterator(value):
        return CantCarryError(f"an iterator ({name}), which can't be copied")
    if kinds.holds_data(value):
        return CantCarryError(f"a {name}, which only its library can read")
    return LiveError(f"a {name}")
