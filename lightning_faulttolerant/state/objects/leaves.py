"""Values without references to other objects, as plain lists that a checkpoint can hold, and back.

They are values that never change, and plain data: lists and dicts of numbers and strings, which stand for themselves in
a state.

Classes and functions are saved by name, and looked up only among imported modules: other people may have written a
checkpoint. It can name classes, which are created without running their code. It can also name functions of the user's
modules and a few of torch, NumPy, and Python's `math`. It can't name functions that read files or start programs.
`CantCarryError` and its subclasses say why a value can't be carried through a checkpoint.

Objects that only their library can read become bytes, if the state is trusted where it is restored. The bytes contain
no object that other objects refer to: it would be a copy afterwards. Such an object is not carried.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import inspect
import io
import operator
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.graph import Graph, name_of
from lightning_faulttolerant.state.packing import POOL, is_packed
from lightning_faulttolerant.state.reachable import is_users_function


class CantCarryError(Exception):
    """A value can't be carried through a checkpoint."""


class LiveError(CantCarryError):
    """A value stands for a resource outside of Python, which is not state: an open file, a lock, a progress bar."""


class SavedError(LiveError):
    """A value is, or holds, a saved state: the next state would hold it together with those before it."""


class OpaqueError(CantCarryError):
    """A value is an object that only its library can read: it may be a handle of that library."""


class TooLargeError(CantCarryError):
    """A value is larger than the remaining room."""


def check_not_saved(value: dict[object, object]) -> None:
    """Raise if a dict is a state from this package."""
    if is_packed(value):
        raise SavedError("a state that was saved")


def why_not(value: object) -> CantCarryError:
    """Return why an unreadable value can't be carried."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if kinds.is_generator(value) or kinds.is_iterator(value) or kinds.is_loader_iterator(value):
        return CantCarryError(f"an iterator ({name}), which can't be copied")
    if kinds.holds_data(value) or kinds.is_hash(value):
        return CantCarryError(f"a {name}, which only its library can read")
    return LiveError(f"a {name}") if kinds.is_live(value) else OpaqueError(f"a {name}, which only its library can read")


BUILTINS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict,
                                                            set, frozenset, type(None), deque, Counter, OrderedDict,
                                                            defaultdict)}  # fmt: skip
_HARMLESS = frozenset({"argparse:Namespace", "collections:UserDict", "collections:UserList", "collections:UserString",
                       "types:SimpleNamespace", "_thread:_local"})  # fmt: skip
_OF_LIBRARIES = ("torch", "torch.nn.functional", "numpy", "math")  # their functions don't say where they are found
_FILES = ("from_file", "fromfile", "load", "save")
_PYTHONS = sys.stdlib_module_names - {"__main__"}


def class_name(kind: type, graph: Graph) -> str:
    """Return the name of a class.

    Raises:
        CantCarryError: If it can't be found by its name.
    """
    name = name_of(kind)
    if found_class(name, graph) is not kind:
        raise CantCarryError(f"a {kind.__qualname__}, whose class can't be found by its name")
    return name


def part_name(part: object, graph: Graph) -> str:
    """Return the name of a class or a function.

    Raises:
        CantCarryError: If it can't be found by its name, or is not part of a state.
    """
    own_name = getattr(part, "__name__", "")
    if found_part(f"builtins:{own_name}", graph) is part:
        return f"builtins:{own_name}"
    if isinstance(part, types.ModuleType):
        raise LiveError(f"the module {part.__name__}")
    qualname = getattr(part, "__qualname__", own_name)
    names = [f"{getattr(part, '__module__', None)}:{qualname}", *(f"{name}:{own_name}" for name in _OF_LIBRARIES)]
    name = next((name for name in names if found_part(name, graph) is part), None)
    if name is None:
        raise CantCarryError(f"the function {names[0]}, which can't be found by its name")
    return name


def found_class(name: str, graph: Graph) -> type | None:
    """Return the class of this name, from an imported module or from those that the fit began with."""
    known = graph.classes.get(name)
    if known is not None:
        return known
    found = _found(name)
    # The deletion of an object must not run code of its class.
    return found if isinstance(found, type) and not hasattr(found, "__del__") else None


def found_progress_bar(name: str) -> Callable[..., object] | None:
    """Return the tqdm bar class of this name, if it is imported."""
    found = _found(name)
    return found if isinstance(found, type) and kinds.is_progress_bar_class(found) else None


def found_part(name: str, graph: Graph) -> object:
    """Return the class or function of this name, if a checkpoint may name it."""
    module_name, _, qualname = name.partition(":")
    if module_name == "builtins":
        found = vars(builtins).get(qualname)
        return BUILTINS.get(qualname) or (found if isinstance(found, type) else None)
    found = _found(name)
    if isinstance(found, type):
        return found_class(name, graph)
    is_known = found is not None and graph.path_of(found) is not None
    return found if is_known or _is_harmless(found, module_name) else None


def _found(name: str) -> object:
    module_name, _, qualname = name.partition(":")
    if name in _HARMLESS:
        return vars(sys.modules[module_name]).get(qualname) if module_name in sys.modules else None
    if module_name.partition(".")[0] in _PYTHONS - {"math"}:
        return None
    found: object = sys.modules.get(module_name)
    for attribute in qualname.split("."):
        found = inspect.getattr_static(found, attribute, None)
        if isinstance(found, types.ModuleType):  # `torch:os.system` would lead to other modules
            return None
    if isinstance(found, staticmethod):
        found = found.__func__
    root = (getattr(found, "__module__", None) or "").partition(".")[0]
    return None if root in _PYTHONS - {"math"} else found


def _is_harmless(found: Any, module_name: str) -> bool:
    if isinstance(found, types.FunctionType):
        return is_users_function(found) or module_name == "torch.nn.functional"
    is_fast = isinstance(found, types.BuiltinFunctionType) or kinds.is_numpy(found, "ufunc")
    return is_fast and module_name in _OF_LIBRARIES and not found.__name__.startswith(_FILES)


def method_name(method: types.MethodType) -> str:
    """Return the name of the attribute that holds a method in its object's class.

    Raises:
        CantCarryError: If its class has no such attribute.
    """
    own, owner = method.__func__, type(method.__self__)
    for name in (own.__name__, f"_{owner.__name__.lstrip('_')}{own.__name__}"):
        if inspect.getattr_static(owner, name, None) is own:
            return name
    raise CantCarryError(f"the method {own.__qualname__}, which can't be found by its name")


def found_method(owner: object, name: str) -> types.MethodType | None:
    """Return the method of this name from the class of `owner`."""
    found = inspect.getattr_static(type(owner), name, None)
    return types.MethodType(found, owner) if isinstance(found, types.FunctionType) else None


_DATES: dict[str, Any] = {kind.__name__: kind for kind in (datetime.date, datetime.datetime, datetime.time)}
_PATHS: dict[str, Any] = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath,
                                                          pathlib.PosixPath, pathlib.WindowsPath)}  # fmt: skip
_TEXTS: dict[str, Any] = {"Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "UUID": uuid.UUID}


def encode_leaf(value: Any) -> list[object]:
    """Return the encoded form of a leaf (`kinds.is_leaf`) that is not an enum.

    Raises:
        CantCarryError: If its kind can't be carried.
    """
    kind = type(value)
    if kinds.is_numpy(value, "generic"):
        return ["scalar", *encode_array(value.reshape(1))]
    is_plain = kind is not slice or all(type(part) in (int, type(None)) for part in _bounds(value))
    for name, (own, parts_of, _) in _LEAVES.items() if is_plain else ():
        if kind in own:
            return [name, *parts_of(value)]
    raise CantCarryError(f"a {kind.__name__}")


def decode_leaf(kind: str, *rest: object) -> object:
    """Return the leaf that `encode_leaf` encoded."""
    return _LEAVES[kind][2](*rest)


def _bounds(value: Any) -> list[object]:
    return [value.start, value.stop, value.step]


def encode_array(array: Any) -> list[object]:
    """Return the dtype, the shape, and the bytes of a NumPy array.

    Raises:
        CantCarryError: If its dtype differs when it is read again.
    """
    dtype: object = array.dtype.str
    if array.dtype.names is not None or array.dtype.subdtype is not None:
        dtype = [[name, kind, *map(list, shape)] for name, kind, *shape in array.dtype.descr]
    if array.dtype != _dtype(dtype):
        raise CantCarryError(f"an array of dtype {array.dtype}")
    return [dtype, list(array.shape), array.tobytes()]


def decode_array(dtype: object, shape: Sequence[int], content: bytes) -> Any:
    """Return the array that `encode_array` encoded."""
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    return np.frombuffer(content, dtype=_dtype(dtype)).reshape(shape).copy()


def _dtype(dtype: Any) -> Any:
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    if not isinstance(dtype, list):
        return np.dtype(dtype)
    try:
        return np.dtype([(name, kind, *map(tuple, shape)) for name, kind, *shape in dtype])
    except (TypeError, ValueError):  # nested, or with gaps
        return None


def _torch_dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype of torch")
    return found


def _scalar(dtype: object, shape: Sequence[int], content: bytes) -> object:
    return decode_array(dtype, shape, content)[0]


_LEAVES: dict[str, tuple[Collection[type], Callable[[Any], Sequence[object]], Callable[..., object]]] = {
    "bytes": ([bytes], lambda one: [one], bytes),
    "complex": ([complex], lambda one: [[one.real, one.imag]], lambda parts: complex(*parts)),
    "path": (_PATHS.values(), lambda one: [type(one).__name__, str(one)], lambda kind, text: _PATHS[kind](text)),
    "scalar": ([], encode_array, _scalar),
    "date": (
        _DATES.values(),
        lambda one: [type(one).__name__, one.isoformat()],
        lambda kind, text: _DATES[kind].fromisoformat(text),
    ),
    "timedelta": (
        [datetime.timedelta],
        lambda one: [[one.days, one.seconds, one.microseconds]],
        lambda parts: datetime.timedelta(*parts),
    ),
    "range": ([range], lambda one: [_bounds(one)], lambda parts: range(*parts)),
    "slice": ([slice], lambda one: [_bounds(one)], lambda parts: slice(*parts)),
    "text": (_TEXTS.values(), lambda one: [type(one).__name__, str(one)], lambda kind, text: _TEXTS[kind](text)),
    "pattern": ([re.Pattern], lambda one: [one.pattern, one.flags], re.compile),
    "size": ([torch.Size], lambda one: [list(one)], torch.Size),
    "dtype": ([torch.dtype], lambda one: [str(one).removeprefix("torch.")], _torch_dtype),
    "device": ([torch.device], lambda one: [str(one)], torch.device),
    "ellipsis": ([type(...)], lambda one: [], lambda: ...),
}
"""By the name in a state: the classes, what an object consists of, and what makes it again."""


_PLAIN_LEAVES = frozenset({type(None), bool, int, float, str})
_PLAIN_KINDS = _PLAIN_LEAVES | {list, dict, tuple}
_MAX_DEPTH = 8
_ITEM_BYTES = 72
_values_of = operator.methodcaller("values")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Plain data.

    Args:
        value: The list or dict that holds it.
        ids: The ``id`` of each list and dict inside, and of each tuple.
        num_bytes: The approximate size.
    """

    value: Any
    ids: frozenset[int]
    num_bytes: int

    def copy(self) -> object:
        """Return a copy, including everything inside."""
        # Safe: the bytes are our own, of plain data.
        return pickle.loads(pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL)) if self.ids else self.value.copy()


def plain_of(value: object) -> Plain | None:
    """Return `value` as plain data, or ``None`` if it is something else or refers to a list or dict twice.

    All items of one depth are checked together, at the speed of C.
    """
    if type(value) not in (list, dict):
        return None
    layer: dict[type, list[Any]] = {type(value): [value]}
    ids, tuples, num_bytes = {id(value)}, set[int](), 0
    for _ in range(_MAX_DEPTH):
        dicts = layer.get(dict, [])
        if any(map(operator.contains, dicts, repeat(POOL))):  # maybe a saved state
            return None
        parts = [list(chain.from_iterable(inside)) for inside in (*layer.values(), map(_values_of, dicts)) if inside]
        layer = {}
        for items in parts:
            kinds = set(map(type, items))
            if not kinds <= _PLAIN_KINDS:
                return None
            num_bytes += _ITEM_BYTES * len(items) + (sum(map(len, _of_kind(items, str))) if str in kinds else 0)
            for kind in kinds - _PLAIN_LEAVES:
                layer.setdefault(kind, []).extend(items if len(kinds) == 1 else _of_kind(items, kind))
        num_before = len(ids)
        ids.update(map(id, layer.get(list, ())), map(id, layer.get(dict, ())))
        if len(ids) < num_before + len(layer.get(list, ())) + len(layer.get(dict, ())):
            return None
        tuples.update(map(id, layer.get(tuple, ())))
        if not layer:
            return Plain(value=value, ids=frozenset(ids | tuples) - {id(value)}, num_bytes=num_bytes)
    return None


def _of_kind(items: list[object], kind: type) -> list[Any]:
    return [item for item in items if type(item) is kind]


PICKLED, MADE = "pickled", "made"
_new_object = object().__reduce_ex__(pickle.HIGHEST_PROTOCOL)[0]


class Pickles:
    """Pickles the objects of one save.

    Args:
        is_shared: Whether other objects refer to an object too.
    """

    def __init__(self, is_shared: Callable[[object], bool]) -> None:
        self._is_shared = is_shared
        self._met: dict[int, object] = {}

    def has_met(self, value: object) -> bool:
        """Return whether an object is a part of one that was already pickled."""
        return id(value) in self._met

    def row(self, value: object, reason: CantCarryError) -> list[Any]:
        """Return the encoded form of an object.

        Args:
            value: The object.
            reason: The reason why it can't be carried in any other way.

        Raises:
            CantCarryError: If it can't be pickled, or refers to objects that others refer to.
        """
        buffer = io.BytesIO()
        pickler = _UnsharedPickler(buffer, value, lambda part: self.has_met(part) or self._is_shared(part))
        try:
            pickler.dump(value)
        except _SharedError as error:
            raise CantCarryError(f"{reason}, and which refers to {error}, which other objects also use") from error
        except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
            raise reason from None
        self._met.update(pickler.met)
        return [PICKLED, f"{type(value).__module__}.{type(value).__qualname__}", buffer.getvalue()]


class _SharedError(Exception):
    """An object to be pickled refers to one that other objects refer to."""


class _UnsharedPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, root: object, is_shared: Callable[[object], bool]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._root = root
        self._is_shared = is_shared
        self._of_classes: set[int] = set()
        """Values that a class shares between all its objects: a pandas table includes them in its state."""
        self.met: dict[int, object] = {}

    def persistent_id(self, value: object) -> None:
        for kind in type(value).__mro__:
            self._of_classes.update(map(id, vars(kind).values()))
        if value is self._root or id(value) in self._of_classes or _can_not_change(value):
            return
        has_more = isinstance(value, Tensor) and (
            value.grad_fn is not None or (value.is_leaf and value.grad is not None)
        )
        if has_more or self._is_shared(value):
            raise _SharedError(f"a {type(value).__name__}")
        self.met[id(value)] = value


def _can_not_change(value: object) -> bool:
    """Return whether a copy of a value is as good: texts and numbers. Functions and classes are pickled by name."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, tuple, frozenset):
        return True
    return kinds.is_leaf(value) or kinds.is_numpy(value, "dtype") or getattr(value, "__qualname__", None) is not None


def has_pickles(state: Mapping[str, object]) -> bool:
    """Return whether an object state holds objects as bytes."""
    return any(True for _ in _rows_of(state))


def unpickled(state: Mapping[str, object]) -> dict[str, object]:
    """Return an object state with its objects in place of their bytes: this runs any code in the bytes.

    An object that can't be created again stays as bytes, and is not restored.
    """
    for row in _rows_of(state):
        row[:] = _made(row)
    return dict(state)


def _made(row: list[Any]) -> list[object]:
    try:
        return [MADE, pickle.loads(row[2])]
    except Exception as error:  # noqa: BLE001 - any class may raise anything when it is unpickled
        return [PICKLED, f"{row[1]} ({type(error).__name__}: {error})", row[2]]


def has_whole_state(value: object) -> bool:
    """Return whether an object can take the state of another of its class: pickle's last step sets all of it."""
    if not hasattr(type(value), "__setstate__"):
        return False
    try:
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
        return False
    if not isinstance(reduced, tuple) or len(reduced) < 3 or reduced[2] is None or any(reduced[3:]):
        return False
    return reduced[0] is _new_object and reduced[1] == (type(value),)


def set_state(value: Any, made: Any) -> bool:
    """Copy another object's state by ``__setstate__`` of their class; return whether that is possible."""
    if type(value) is not type(made) or not has_whole_state(made):
        return False
    value.__setstate__(made.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2])
    return True


def _rows_of(state: Mapping[str, Any]) -> Iterator[list[object]]:
    contents = [content.get("<content>") for content in state.get("nodes", {}).values()]
    rows: Sequence[object] = [*state.get("table", ()), *contents]
    return (row for row in rows if isinstance(row, list) and row and row[0] == PICKLED)
