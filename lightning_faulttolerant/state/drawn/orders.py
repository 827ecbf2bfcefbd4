"""The order of a list, an array, or a mapping: kept in few bytes, and given back to the same elements."""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, starmap
from operator import le
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.drawn.texts import NotPlainError, digest_of, directory_of, is_number, text_of
from lightning_faulttolerant.state.objects import kinds

_MAX_ELEMENTS = 4_000_000
_MAX_CHARACTERS = 400_000_000
_NUM_MEASURED = 64
_LEVEL = 1
_WRITTEN = {str, int, float, bool, type(None)}  # Python's own text of these is equal where they are
_KEYS, _VALUES = "keys", "values"


def is_ordered(value: Any) -> bool:
    """Return whether `value` is something whose order can be kept: a list, a mapping, an array of one dimension."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.layout is torch.strided and value.device.type == "cpu"
    if kinds.is_array(value):
        return bool(value.ndim == 1)
    return type(value) is tuple or (kinds.is_plain_container(value) and not isinstance(value, set))


def digest(value: Any) -> str:
    """Return what differs where the elements or their order do.

    Raises:
        NotPlainError: If an element is not plain.
    """
    lists = _lists(value)
    digests = [digest_of(lists[name]) for name in lists]
    return " to ".join(digests)


def kept_order(value: Any) -> dict[str, Any] | None:
    """Return the order of `value`, for `put_in_order`; ``None`` if it is sorted, or too large to keep."""
    try:
        kept = {name: _kept(elements) for name, elements in _lists(value).items()}
    except (NotPlainError, TypeError):
        return None
    return kept if any(one is not None and "order" in one for one in kept.values()) else None


def in_order(value: Any, kept: Mapping[str, Any]) -> Any:
    """Return the elements of `value` in an order that was kept: a list, or the pairs of a mapping.

    Returns:
        ``None`` if they are others.
    """
    lists = _lists(value)
    if lists.keys() != kept.keys() or None in kept.values():
        return None
    try:
        found = {name: _ordered(elements, kept[name]) for name, elements in lists.items()}
    except NotPlainError:
        return None
    ordered = {name: elements for name, elements in found.items() if elements is not None}
    if ordered.keys() != found.keys():
        return None
    if isinstance(value, dict):
        return dict(zip(ordered[_KEYS], ordered[_VALUES], strict=True))
    return ordered[_VALUES]


def fill(value: Any, elements: Any) -> bool:
    """Put elements into the very object that `value` is; return whether it takes them."""
    if isinstance(value, tuple):
        return False
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(torch.as_tensor(elements, dtype=value.dtype))
    elif isinstance(value, dict):
        value.clear()
        value.update(elements)
    elif isinstance(value, deque):
        value.clear()
        value.extend(elements)
    elif kinds.is_array(value) and not value.flags.writeable:
        return False
    else:
        value[:] = elements
    return True


def _lists(value: Any) -> dict[str, Sequence[Any]]:
    if isinstance(value, dict):
        return {_KEYS: list(value), _VALUES: list(value.values())}
    return {_VALUES: value.tolist() if hasattr(value, "tolist") else list(value)}


def _kept(elements: Sequence[Any]) -> dict[str, Any] | None:
    if len(elements) > _MAX_ELEMENTS or len(elements) * _mean_length(elements) > _MAX_CHARACTERS:
        return None
    keys = _keys(elements)
    order, summed = _sorted(keys)
    found: dict[str, Any] = {"length": len(keys), "elements": summed}
    if all(starmap(le, pairwise(keys))):
        return found  # the sorted one
    places = torch.empty(len(order), dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32)
    return {**found, "order": zlib.compress(places.numpy().tobytes(), _LEVEL)}


def _ordered(elements: Sequence[Any], kept: Mapping[str, Any]) -> list[Any] | None:
    if len(elements) != kept["length"]:
        return None
    order, summed = _sorted(_keys(elements))
    if summed != kept["elements"]:
        return None
    if "order" in kept:
        order = order[torch.frombuffer(bytearray(zlib.decompress(kept["order"])), dtype=torch.int32).long()]
    return [elements[i] for i in order.tolist()]


def _keys(elements: Sequence[Any]) -> list[Any]:
    """Return what the elements are sorted by: whole numbers and texts themselves, of everything else the text."""
    types = set(map(type, elements))
    if types <= {int}:
        return list(elements)
    prefix = directory_of(elements)
    if types <= {str}:
        return [element[len(prefix) :] for element in elements]
    if types <= {tuple} and set(map(type, chain.from_iterable(elements))) <= _WRITTEN:
        # A million names with labels take a second; `text_of` would take ten.
        return [repr((element[0][len(prefix) :], *element[1:]) if prefix else element) for element in elements]
    return [text_of(element, prefix=prefix) for element in elements]


def _sorted(keys: list[Any]) -> tuple[Tensor, str]:
    """Return which keys come first when they are sorted, and what differs where they do."""
    if all(type(key) is int for key in keys[:1]):
        try:
            values, order = torch.sort(torch.tensor(keys, dtype=torch.int64), stable=True)
            return order, _hash_of(values.numpy().tobytes())
        except (OverflowError, RuntimeError):  # longer ones
            keys = list(map(repr, keys))
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)
    text = "\0".join([keys[i] for i in order.tolist()])
    return order, _hash_of(text.encode("utf-8", "surrogatepass"))


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _mean_length(elements: Sequence[Any]) -> float:
    measured = elements[:: max(1, len(elements) // _NUM_MEASURED)]
    return sum(8 if is_number(one) else len(text_of(one)) for one in measured) / max(1, len(measured))
