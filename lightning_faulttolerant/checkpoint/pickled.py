"""Read a pickle without running any of it: a description replaces whatever it would import, call or load.

Nothing is imported, called or constructed by name, so a hostile file can do no more than be refused. Memory and
time are bounded by `_MAX_OPERATIONS`; values of more than `_LONG_BYTES` are skipped unread.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import IO, Any

from lightning_faulttolerant.checkpoint.described import LongData, Made, Named, key_of, name_of, result_of, stored

_MAX_OPERATIONS = 10_000_000
_LONG_BYTES = 64 * 1024
_WINDOW_BYTES = 64 * 1024


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
        >>> import io, pathlib, pickle
        >>> data = pickle.dumps({"step": 3, "folder": pathlib.PurePosixPath("/data")})
        >>> found = describe_pickle(io.BytesIO(data), begin=0, num_bytes=len(data))
        >>> found["step"], found["folder"].name
        (3, 'pathlib.PurePosixPath')
    """
    machine = _Machine(_Window(file, begin=begin, end=begin + num_bytes))
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


class _Window:
    """Reads a part of a file through a buffer, and skips unneeded bytes."""

    def __init__(self, file: IO[bytes], *, begin: int, end: int) -> None:
        self._file = file
        self._next = begin  # the end of the buffer in the file
        self._end = end
        self._buffer = b""
        self._at = 0

    def read(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            self._fill(num_bytes)
            end = num_bytes
        data = self._buffer[self._at : end]
        self._at = end
        return data

    def skip(self, num_bytes: int) -> None:
        in_buffer = min(num_bytes, len(self._buffer) - self._at)
        self._at += in_buffer
        self._next += num_bytes - in_buffer
        if self._next > self._end:
            raise ValueError("it ends too early")

    def line(self) -> bytes:
        """Return the bytes up to a newline, without it."""
        end = self._buffer.find(b"\n", self._at)
        if end < 0:
            self._fill(0)
            end = self._buffer.find(b"\n")
        if end < 0:
            raise ValueError("one of its lines does not end")
        data = self._buffer[self._at : end]
        self._at = end + 1
        return data

    def _fill(self, num_wanted: int) -> None:
        left = self._buffer[self._at :]
        num_bytes = min(max(_WINDOW_BYTES, num_wanted) - len(left), self._end - self._next)
        self._file.seek(self._next, os.SEEK_SET)
        data = self._file.read(max(0, num_bytes))
        self._next += len(data)
        self._buffer, self._at = left + data, 0
        if len(self._buffer) < num_wanted:
            raise ValueError("it ends too early")


class _Machine:
    """The state that the operations of a pickle work on."""

    def __init__(self, source: _Window) -> None:
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
