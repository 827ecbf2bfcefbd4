"""Texts of plain values: equal if the values are equal, in this process and in others."""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_faulttolerant.state.objects import kinds

_NUM_SAMPLED = 1024
_MAX_PARTS = 4096  # of one element
_NUMBERS = (bool, int, float, complex)


class NotPlainError(Exception):
    """A value has no text that would be the same in another process."""


def text_of(value: object, *, prefix: str = "") -> str:
    """Return the text of an element of a data set: a name, a number, a mapping of these, a small tensor or object.

    Args:
        value: The element.
        prefix: The beginning of file names; it is left out, since data may be elsewhere on another machine.

    Raises:
        NotPlainError: If it is anything else.
    """
    parts: list[str] = []
    try:
        _write(value, parts, prefix)
    except RecursionError as error:
        raise NotPlainError("an element that holds itself") from error
    return "".join(parts)


def digest_of(values: Sequence[object]) -> str:
    """Return a digest of a list of elements; file names count without their common directory.

    In a long list, up to 1,024 elements are read.

    Raises:
        NotPlainError: If an element is not plain.
    """
    sampled = list(_sampled(values))
    prefix = directory_of(sampled)
    texts = [text_of(value, prefix=prefix) for value in sampled]
    return f"[{len(values)}] crc {zlib.crc32(chr(0).join(texts).encode('utf-8', 'surrogatepass')):08x}"


def directory_of(values: Sequence[object]) -> str:
    """Return the common directory of a list of files, with a slash at its end; empty if it is not such a list."""
    texts = names_of(values)
    if not texts:
        return ""
    first, last = min(texts), max(texts)
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: first.rfind("/", 0, length) + 1]


def names_of(values: Sequence[Any]) -> Sequence[str]:
    """Return the texts of a list of texts or paths, alone or first in a tuple; empty if it is another list."""
    kinds_of_values = set(map(type, values))
    if kinds_of_values <= {str}:
        return values
    names = [value[0] if isinstance(value, tuple) and value else value for value in values]
    if not all(issubclass(kind, (str, PurePath)) for kind in set(map(type, names))):
        return []
    return list(map(str, names))


def is_number(value: object) -> bool:
    """Return whether `value` is a single number."""
    return isinstance(value, _NUMBERS) or kinds.is_numpy(value, "number")


def _sampled(values: Sequence[object]) -> Iterator[object]:
    stride = max(1, len(values) // _NUM_SAMPLED)
    return (values[i] for i in range(0, len(values), stride))


def _write(value: object, parts: list[str], prefix: str) -> None:
    if len(parts) > _MAX_PARTS:
        raise NotPlainError("a large element")
    if isinstance(value, (str, PurePath)):
        parts.append(repr(str(value).removeprefix(prefix)))
    elif isinstance(value, enum.Enum) or kinds.is_leaf(value):
        parts.append(_leaf(value))
    elif isinstance(value, dict):
        for key, child in value.items():
            parts.append("{")
            _write(key, parts, prefix)
            _write(child, parts, prefix)
    elif isinstance(value, (list, tuple, set, frozenset)):
        is_set = isinstance(value, (set, frozenset))
        for child in sorted(text_of(item) for item in value) if is_set else value:
            parts.append("[")
            _write(child, parts, prefix)
        parts.append("]")
    elif isinstance(value, Tensor) or kinds.is_array(value):
        parts.append(_array(value))
    elif kinds.is_walked(value) and not isinstance(value, (Dataset, nn.Module)) and not callable(value):
        parts.append(type(value).__qualname__)
        _write(kinds.attributes(value), parts, prefix)
    else:
        raise NotPlainError(f"a {type(value).__name__}")


def _leaf(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return f"{type(value).__name__} {value.item() if kinds.is_numpy(value, 'generic') else value!r}"


def _array(value: Any) -> str:
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested or value.is_meta):
        raise NotPlainError("a tensor without elements")
    flat = value.detach().reshape(-1) if isinstance(value, Tensor) else value.reshape(-1)
    stride = max(1, len(flat) // _NUM_SAMPLED)
    return f"{list(value.shape)} {value.dtype} crc {zlib.crc32(str(flat[::stride].tolist()).encode()):08x}"
