"""Read a pickle without running any of it: stand-ins replace whatever it would import, call or load.

Nothing is imported, called or constructed by name, so a hostile file can do no more than be refused. Memory and time
are bounded by `_MAX_OPERATIONS`; values of more than `_LONG_BYTES` are skipped unread. The stand-ins are names, tensors
without values, and data too long to read.
"""

from __future__ import annotations

import io
import os
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

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
    source, machine = _Source(file, begin=begin, num_bytes=num_bytes), _Machine()
    try:
        for _ in range(_MAX_OPERATIONS):
            operation = _BY_CODE[source.read(1).decode("latin-1")]
            if operation.name == "STOP":
                return machine.stack.pop()
            machine.run(operation.name, source.argument_of(operation))
    except KeyError as error:
        raise UnreadablePickleError(f"it has an unknown operation or reference ({error})") from error
    except IndexError as error:
        raise UnreadablePickleError("pickle stack underflow") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadablePickleError(str(error)) from error
    raise TooLargePickleError(f"it has more than {_MAX_OPERATIONS:,} operations")


_BY_CODE = {operation.code: operation for operation in pickletools.opcodes}


class _TooLongError(Exception):
    """An argument is too long to be read. It was skipped."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Source:
    """Reads a pickle in blocks, as a file for ``pickletools``."""

    def __init__(self, file: IO[bytes], *, begin: int, num_bytes: int) -> None:
        self._file = file
        self._file.seek(begin)
        self._num_left = num_bytes
        self._block = io.BytesIO()

    def argument_of(self, operation: pickletools.OpcodeInfo) -> object:
        """Return the argument of an operation; a description of it if it is too long."""
        try:
            return None if operation.arg is None else operation.arg.reader(self)  # type: ignore[arg-type]
        except _TooLongError as error:
            return LongData(_KINDS.get(operation.name, "bytes"), error.num_bytes)

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        if num_bytes > _LONG_BYTES:
            self._skip(num_bytes)
            raise _TooLongError(num_bytes)
        data = self._block.read(num_bytes)
        if len(data) < num_bytes:
            self._next_block()
            data += self._block.read(num_bytes - len(data))
        return data

    def readline(self) -> bytes:
        """Return the bytes up to a newline; without one if none follows soon."""
        line = self._block.readline()
        if not line.endswith(b"\n"):
            self._next_block()
            line += self._block.readline()
        return line

    def _next_block(self) -> None:
        data = self._file.read(min(_LONG_BYTES, self._num_left))
        self._num_left -= len(data)
        self._block = io.BytesIO(data)

    def _skip(self, num_bytes: int) -> None:
        num_bytes -= len(self._block.read(num_bytes))
        if num_bytes > self._num_left:
            raise ValueError("it ends too early")
        self._num_left -= num_bytes
        self._file.seek(num_bytes, os.SEEK_CUR)


# What the operations are that have an argument of any length, besides bytes.
_KINDS = {"BINUNICODE": "text", "BINUNICODE8": "text", "LONG4": "integer"}


@dataclass(frozen=True, slots=True)
class _Effect:
    """What an operation does to the stack, by the table of ``pickletools``."""

    num_taken: int
    takes_items: bool
    """Whether it also takes all that lies above the last mark."""
    leaves_result: bool
    has_argument: bool

    @classmethod
    def of(cls, operation: pickletools.OpcodeInfo) -> _Effect:
        """Return the effect of an operation."""
        taken, takes_items = operation.stack_before, pickletools.markobject in operation.stack_before
        num_taken = taken.index(pickletools.markobject) if takes_items else len(taken)
        return cls(num_taken, takes_items, bool(operation.stack_after), operation.arg is not None)


_EFFECTS = {operation.name: _Effect.of(operation) for operation in pickletools.opcodes}


class _Machine:
    """The state that the operations of a pickle work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[object, object] = {}

    def run(self, name: str, argument: object) -> None:
        """Run an operation, with its argument."""
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif name == "MARK":
            self._outer.append(self.stack)
            self.stack = []
        elif name == "POP":
            self.stack.pop() if self.stack else self._pop_mark()
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        else:
            self._run(_EFFECTS[name], _RESULTS.get(name, _same), argument)

    def _run(self, effect: _Effect, result: Callable[..., object], argument: object) -> None:
        values = [argument] if effect.has_argument else []
        items = [self._pop_mark()] if effect.takes_items else []
        begin = len(self.stack) - effect.num_taken
        if begin < 0:
            raise IndexError
        values += self.stack[begin:]
        del self.stack[begin:]
        made = result(*values, *items)
        if effect.leaves_result:
            self.stack.append(made)

    def _pop_mark(self) -> list[object]:
        items, self.stack = self.stack, self._outer.pop()
        return items


def _same(value: object) -> object:
    return value


def _extended(target: object, items: list[object]) -> object:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Made):
        target.state = (target.state, items)
    else:
        raise ValueError(f"it appends to a {type(target).__name__}")
    return target


def _updated(target: object, items: list[object]) -> object:
    if len(items) % 2:
        raise ValueError("a key has no value")
    if isinstance(target, dict):
        target.update((key_of(key), value) for key, value in zip(items[::2], items[1::2], strict=True))
    elif isinstance(target, Made):
        target.state = (target.state, items)
    else:
        raise ValueError(f"it sets an item of a {type(target).__name__}")
    return target


def _named(module: object, name: object) -> Named:
    if not (isinstance(name, str) and isinstance(module, str)):
        raise ValueError("it names a class by something that is not a string")
    return Named(f"{'builtins' if module == '__builtin__' else module}.{name}")


def _global(module_and_name: str) -> Named:
    module, _, name = module_and_name.partition(" ")
    return _named(module, name)


def _object(items: list[object]) -> object:
    kind, *arguments = items or [None]
    return result_of(kind, tuple(arguments))


def _built(target: object, state: object) -> object:
    if isinstance(target, Made):  # a dict may have attributes too, like a module's state_dict: ignored
        target.state = (target.state, state)
    return target


# What an operation makes of its argument, of what it takes from the stack, and of the items above the last mark. The
# others, such as those of numbers and texts, leave the one value that they have.
_RESULTS: Mapping[str, Callable[..., object]] = {
    "BYTEARRAY8": lambda data: bytes(data) if isinstance(data, bytearray) else data,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), list),
    "EMPTY_DICT": dict,
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE"), tuple),
    **dict.fromkeys(("TUPLE1", "TUPLE2", "TUPLE3"), lambda *items: items),
    "DICT": lambda items: _updated({}, items),
    "APPEND": lambda target, item: _extended(target, [item]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _extended),
    "SETITEM": lambda target, key, value: _updated(target, [key, value]),
    "SETITEMS": _updated,
    "GLOBAL": _global,
    "STACK_GLOBAL": _named,
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), lambda number: Named(f"extension {number}")),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), result_of),
    "NEWOBJ_EX": lambda kind, arguments, keywords: Made(name_of(kind), (arguments, keywords)),
    "INST": lambda name, items: result_of(_global(name), tuple(items)),
    "OBJ": _object,
    "BUILD": _built,
    **dict.fromkeys(("PERSID", "NEXT_BUFFER"), lambda name=None: Made("something kept elsewhere", name)),
    "BINPERSID": stored,
}
