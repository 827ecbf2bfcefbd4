"""Read a pickle without running any of it: stand-ins replace whatever it would import, call or load.

Nothing is imported, called or constructed by name, so a hostile file can do no more than be refused. Memory and time
are bounded by `_MAX_OPERATIONS`; values of more than `_LONG_BYTES` are skipped unread. The stand-ins are names, tensors
without values, and data too long to read.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from lightning_faulttolerant.checkpoint.archive import FileWindow

_MAX_DIMENSIONS = 64
_64_BIT = 1 << 63


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A class or function that the pickle names; not imported."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """An object that loading would construct; not constructed."""

    name: str
    arguments: object
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class LongData:
    """A text, bytes or an integer that is too long to read."""

    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The place of the values of one or more tensors in the file."""

    key: str
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """A tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]
    num_values: int
    storage: Storage


def key_of(value: object) -> object:
    """Return a stand-in for a key: hashing an object from a file could recurse without end or take very long."""
    if isinstance(value, tuple) and len(value) <= 8 and all(_is_plain_key(item) for item in value):
        return value
    return value if _is_plain_key(value) else Made(f"key, a {type(value).__name__}", value)


def _is_plain_key(value: object) -> bool:
    if type(value) is int:
        return -_64_BIT <= value < _64_BIT
    return value is None or type(value) in (str, bytes, float, bool, Named, Made, LongData, Storage, TensorInfo)


def stored(identity: object) -> object:
    """Return a stand-in for an object that the pickle keeps outside of itself."""
    match identity:
        case ("storage", Named(name), str(key), _, int(num_values)) if 0 <= num_values < _64_BIT:
            dtype, item_bytes = _STORAGES.get(name.rpartition(".")[2], ("uint8", 1))
            return Storage(key, dtype, num_values * item_bytes)
    return Made("something kept elsewhere", identity)


def result_of(function: object, arguments: object) -> object:
    """Return a stand-in for the result of a call."""
    name = name_of(function)
    known = _KNOWN.get(name)
    if known is not None and isinstance(arguments, tuple):
        try:
            return known(*arguments)
        except (TypeError, ValueError):
            pass  # not the arguments of this function: shown as they are
    return Made(name, arguments)


def name_of(function: object) -> str:
    """Return a display name for an object that the pickle calls."""
    return function.name if isinstance(function, (Named, Made)) else f"a {type(function).__name__}"


def _tensor(storage: object, offset: object, shape: Any, *rest: object) -> TensorInfo:
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_DIMENSIONS
    if not isinstance(storage, Storage) or not is_shape:
        raise TypeError
    num_values = 1
    for length in shape:
        if type(length) is not int or not 0 <= length < _64_BIT:
            raise TypeError
        num_values *= length
    return TensorInfo(storage.dtype, shape, num_values, storage)


def _tensor_of_dtype(
    storage: object, offset: object, shape: object, stride: object, grad: object, hooks: object, dtype: object
) -> object:
    info = _tensor(storage, offset, shape)
    return TensorInfo(name_of(dtype).removeprefix("torch."), info.shape, info.num_values, info.storage)


def _first(value: object, *rest: object) -> object:
    return value


def _ordered_dict(pairs: object = ()) -> dict[object, object]:
    if not isinstance(pairs, (list, tuple)):
        raise TypeError
    return {key_of(key): value for key, value in pairs}


def _items(items: object = ()) -> list[object]:
    if not isinstance(items, (list, tuple)):
        raise TypeError
    return list(items)


def _encoded(text: object, encoding: object) -> object:
    if isinstance(text, LongData):
        return LongData("bytes", text.num_bytes)
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError
    return text.encode("latin1")


# The functions that torch.save writes, and Python's own collections.
_KNOWN: Mapping[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, arguments, state: result_of(function, arguments),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": lambda factory=None: {},
    "torch.Size": lambda shape: tuple(_items(shape)),
    "builtins.set": _items,
    "builtins.frozenset": _items,
    "builtins.bytes": lambda: b"",
    "_codecs.encode": _encoded,
}

# The type and the size in bytes of the values in a storage, by its class.
_STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
}

_MAX_OPERATIONS = 10_000_000
_LONG_BYTES = 64 * 1024


class UnreadablePickleError(ValueError):
    """The bytes are not a pickle."""


class TooLargePickleError(Exception):
    """The bytes may be a pickle, but describing it takes too long."""


def describe_pickle(file: IO[bytes], *, begin: int, num_bytes: int) -> object:
    """Return the content of a pickle: plain values as they are, everything else as a description of this module.

    Args:
        file: Open for reading, seekable.
        begin: The position of the pickle in the file.
        num_bytes: The length of the pickle.

    Returns:
        Dicts, lists, tuples, texts, numbers and descriptions. It may contain itself, and be nested without a limit.

    Raises:
        UnreadablePickleError: If it is not a pickle.
        TooLargePickleError: If it has more than 10 million operations.
        OSError: If the file can't be read.

    Example:
        >>> import fractions, io, pickle
        >>> data = pickle.dumps({"step": 3, "ratio": fractions.Fraction(1, 3)})
        >>> found = describe_pickle(io.BytesIO(data), begin=0, num_bytes=len(data))
        >>> found["step"], found["ratio"].name
        (3, 'fractions.Fraction')
    """
    machine = _Machine(FileWindow(file, begin=begin, end=begin + num_bytes))
    try:
        for _ in range(_MAX_OPERATIONS):
            operation = machine.source.read(1)
            if operation == pickle.STOP:
                return machine.stack.pop()
            _OPERATIONS[operation](machine)
    except KeyError as error:
        raise UnreadablePickleError(f"it has an unknown operation or reference ({error})") from error
    except IndexError as error:
        raise UnreadablePickleError("pickle stack underflow") from error
    except (ValueError, TypeError, struct.error, RecursionError) as error:
        raise UnreadablePickleError(str(error)) from error
    raise TooLargePickleError(f"it has more than {_MAX_OPERATIONS:,} operations")


class _Machine:
    """The state that the operations of a pickle work on."""

    def __init__(self, source: FileWindow) -> None:
        self.source = source
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self._outer: list[list[object]] = []

    def mark(self) -> None:
        self._outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[object]:
        items, self.stack = self.stack, self._outer.pop()
        return items

    def number(self, layout: str) -> Any:
        fixed = struct.Struct(layout)
        return fixed.unpack(self.source.read(fixed.size))[0]

    def data(self, kind: str, layout: str) -> bytes | LongData:
        num_bytes = self.number(layout)
        if num_bytes < 0:
            raise ValueError(f"a {kind} has {num_bytes} bytes")
        if num_bytes <= _LONG_BYTES:
            return self.source.read(num_bytes)
        self.source.skip(num_bytes)
        return LongData(kind, num_bytes)


_Operation = Callable[[_Machine], None]


def _push(value: Callable[[_Machine], object]) -> _Operation:
    def operation(machine: _Machine) -> None:
        made = value(machine)  # first: it may replace this stack by another one
        machine.stack.append(made)

    return operation


def _text(layout: str) -> _Operation:
    def operation(machine: _Machine) -> None:
        data = machine.data("text", layout)
        machine.stack.append(data.decode("utf-8", "surrogatepass") if isinstance(data, bytes) else data)

    return operation


def _bytes(layout: str) -> _Operation:
    return _push(lambda machine: machine.data("bytes", layout))


def _long(layout: str) -> _Operation:
    def operation(machine: _Machine) -> None:
        data = machine.data("integer", layout)
        machine.stack.append(pickle.decode_long(data) if isinstance(data, bytes) else data)

    return operation


def _int_line(machine: _Machine) -> object:
    line = machine.source.line()
    return line == b"01" if line in (b"00", b"01") else int(line)  # protocol 0 writes a bool like this


def _get(layout: str) -> _Operation:
    return _push(lambda machine: machine.memo[machine.number(layout)])


def _put(layout: str) -> _Operation:
    def operation(machine: _Machine) -> None:
        machine.memo[machine.number(layout)] = machine.stack[-1]

    return operation


def _put_line(machine: _Machine) -> None:
    machine.memo[int(machine.source.line())] = machine.stack[-1]


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _drop_mark(machine: _Machine) -> None:
    machine.pop_mark()


def _tuple(num_items: int) -> _Operation:
    def operation(machine: _Machine) -> None:
        items = tuple(machine.stack[len(machine.stack) - num_items :])
        if len(items) != num_items:
            raise IndexError
        machine.stack[len(machine.stack) - num_items :] = [items]

    return operation


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _appends(machine: _Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)


def _extend(target: object, items: list[object]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Made):
        target.state = (target.state, items)
    else:
        raise ValueError(f"it appends to a {type(target).__name__}")


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    _update(machine.stack[-1], items)


def _update(target: object, items: list[object]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    if isinstance(target, dict):
        target.update((key_of(key), value) for key, value in zip(items[::2], items[1::2], strict=True))
    elif isinstance(target, Made):
        target.state = (target.state, items)
    else:
        raise ValueError(f"it sets an item of a {type(target).__name__}")


def _dict_of(items: list[object]) -> dict[object, object]:
    made: dict[object, object] = {}
    _update(made, items)
    return made


def _global(machine: _Machine) -> Named:
    module, name = machine.source.line(), machine.source.line()
    return _named(module.decode(), name.decode())


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise ValueError("it names a class by something that is not a string")
    machine.stack.append(_named(module, name))


def _named(module: str, name: str) -> Named:
    return Named(f"{'builtins' if module == '__builtin__' else module}.{name}")


def _reduce(machine: _Machine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(result_of(function, arguments))


def _new_with_keywords(machine: _Machine) -> None:
    keywords, arguments, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Made(name_of(kind), (arguments, keywords)))


def _instance(machine: _Machine) -> None:
    kind = _global(machine)
    arguments = tuple(machine.pop_mark())
    machine.stack.append(result_of(kind, arguments))


def _object(machine: _Machine) -> None:
    kind, *arguments = machine.pop_mark() or [None]
    machine.stack.append(result_of(kind, tuple(arguments)))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Made):  # a dict may have attributes too, like a module's state_dict: ignored
        target.state = (target.state, state)


_OPERATIONS: Mapping[bytes, _Operation] = {
    pickle.PROTO: lambda machine: machine.source.skip(1),
    pickle.FRAME: lambda machine: machine.source.skip(8),
    pickle.NONE: _push(lambda machine: None),
    pickle.NEWTRUE: _push(lambda machine: True),
    pickle.NEWFALSE: _push(lambda machine: False),
    pickle.INT: _push(_int_line),
    pickle.BININT: _push(lambda machine: machine.number("<i")),
    pickle.BININT1: _push(lambda machine: machine.number("<B")),
    pickle.BININT2: _push(lambda machine: machine.number("<H")),
    pickle.LONG: _push(lambda machine: int(machine.source.line().rstrip(b"L"))),
    pickle.LONG1: _long("<B"),
    pickle.LONG4: _long("<i"),
    pickle.FLOAT: _push(lambda machine: float(machine.source.line())),
    pickle.BINFLOAT: _push(lambda machine: machine.number(">d")),
    pickle.STRING: _push(lambda machine: machine.source.line().strip(b"'\"")),
    pickle.BINSTRING: _bytes("<i"),
    pickle.SHORT_BINSTRING: _bytes("<B"),
    pickle.BINBYTES: _bytes("<I"),
    pickle.SHORT_BINBYTES: _bytes("<B"),
    pickle.BINBYTES8: _bytes("<Q"),
    pickle.BYTEARRAY8: _bytes("<Q"),
    pickle.UNICODE: _push(lambda machine: machine.source.line().decode("raw_unicode_escape")),
    pickle.BINUNICODE: _text("<I"),
    pickle.SHORT_BINUNICODE: _text("<B"),
    pickle.BINUNICODE8: _text("<Q"),
    pickle.EMPTY_LIST: _push(lambda machine: []),
    pickle.EMPTY_DICT: _push(lambda machine: {}),
    pickle.EMPTY_TUPLE: _push(lambda machine: ()),
    pickle.EMPTY_SET: _push(lambda machine: []),
    pickle.LIST: _push(lambda machine: machine.pop_mark()),
    pickle.DICT: _push(lambda machine: _dict_of(machine.pop_mark())),
    pickle.TUPLE: _push(lambda machine: tuple(machine.pop_mark())),
    pickle.FROZENSET: _push(lambda machine: machine.pop_mark()),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.ADDITEMS: _appends,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.MARK: _Machine.mark,
    pickle.POP: _pop,
    pickle.POP_MARK: _drop_mark,
    pickle.DUP: _push(lambda machine: machine.stack[-1]),
    pickle.GET: _push(lambda machine: machine.memo[int(machine.source.line())]),
    pickle.BINGET: _get("<B"),
    pickle.LONG_BINGET: _get("<I"),
    pickle.PUT: _put_line,
    pickle.BINPUT: _put("<B"),
    pickle.LONG_BINPUT: _put("<I"),
    pickle.MEMOIZE: _memoize,
    pickle.GLOBAL: _push(_global),
    pickle.STACK_GLOBAL: _stack_global,
    pickle.EXT1: _push(lambda machine: Named(f"extension {machine.number('<B')}")),
    pickle.EXT2: _push(lambda machine: Named(f"extension {machine.number('<H')}")),
    pickle.EXT4: _push(lambda machine: Named(f"extension {machine.number('<i')}")),
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _reduce,
    pickle.NEWOBJ_EX: _new_with_keywords,
    pickle.INST: _instance,
    pickle.OBJ: _object,
    pickle.BUILD: _build,
    pickle.PERSID: _push(lambda machine: Made("something kept elsewhere", machine.source.line().decode())),
    pickle.BINPERSID: _push(lambda machine: stored(machine.stack.pop())),
    pickle.NEXT_BUFFER: _push(lambda machine: Made("something kept elsewhere", None)),
    pickle.READONLY_BUFFER: lambda machine: None,
}
