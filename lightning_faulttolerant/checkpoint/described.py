"""Stand-ins for the objects of a pickle that is not run: names, tensors without values, data too long to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
            dtype = _STORAGE_DTYPES.get(name.rpartition(".")[2], "uint8")
            return Storage(key, dtype, num_values * _ITEM_BYTES[dtype])
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

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
}
