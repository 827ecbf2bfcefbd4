"""Values that never change, as plain lists that a checkpoint can hold, and back."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.names import CantCarryError

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
    if isinstance(value, pathlib.PurePath) and kind in _PATHS.values():
        return ["path", kind.__name__, str(value)]
    if kinds.is_numpy(value, "generic"):
        return ["scalar", *encode_array(value.reshape(1))]
    if kind in (bytes, complex):
        return [kind.__name__, value if kind is bytes else [value.real, value.imag]]
    if kind in _DATES.values():
        return ["date", kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind is range or (kind is slice and all(type(part) in (int, type(None)) for part in _bounds(value))):
        return [kind.__name__, _bounds(value)]
    if kind in _TEXTS.values():
        return ["text", kind.__name__, str(value)]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if value is ...:
        return ["ellipsis"]
    raise CantCarryError(f"a {kind.__name__}")


def decode_leaf(kind: str, *rest: Any) -> object:
    """Return the leaf that `encode_leaf` encoded."""
    return _LEAVES[kind](*rest)


def _bounds(value: Any) -> list[object]:
    return [value.start, value.stop, value.step]


def encode_array(array: Any) -> list[object]:
    """Return the dtype, the shape, and the bytes of a NumPy array.

    Raises:
        CantCarryError: If its dtype differs when it is read again.
    """
    dtype: Any = array.dtype.str
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


_LEAVES: dict[str, Callable[..., object]] = {
    "bytes": bytes,
    "complex": lambda parts: complex(*parts),
    "path": lambda kind, text: _PATHS[kind](text),
    "scalar": lambda dtype, shape, content: decode_array(dtype, shape, content)[0],
    "date": lambda kind, text: _DATES[kind].fromisoformat(text),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "text": lambda kind, text: _TEXTS[kind](text),
    "size": torch.Size,
    "dtype": _torch_dtype,
    "device": torch.device,
    "ellipsis": lambda: ...,
}
