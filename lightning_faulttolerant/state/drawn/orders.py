"""The order of a list, an array, or a mapping: kept in few bytes, and restored for the same elements."""

from __future__ import annotations

import hashlib
import re
import uuid
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.drawn.keys import (
    Keys,
    are_sorted,
    array_of,
    bits_of,
    elements_of,
    is_sorted_by_name,
    keys_of,
)
from lightning_faulttolerant.state.drawn.texts import NotPlainError, digest_of, directory_of, is_number, text_of
from lightning_faulttolerant.state.objects import kinds

_MAX_ELEMENTS = 4_000_000
_MAX_CHARACTERS = 400_000_000
_NUM_MEASURED = 64
_LEVEL = 1
_KEYS, _VALUES = "keys", "values"
_UUID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


def is_ordered(value: Any) -> bool:
    """Return whether the order of `value` can be kept: a list, a mapping, a one-dimensional array that is not large.

    A large array, such as a memory-mapped corpus on a disk, is not even read.
    """
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        return is_plain and value.dim() == 1 and value.numel() <= _MAX_ELEMENTS
    if kinds.is_array(value):
        return bool(value.ndim == 1 and value.size <= _MAX_ELEMENTS)
    return type(value) is tuple or (kinds.is_plain_container(value) and not isinstance(value, set))


def digest(value: object) -> str:
    """Return a digest of the elements and their order; in a long list, up to 1,024 elements are read.

    All UUIDs in a mapping count as equal: libraries draw new ones in each process, to name objects.

    Raises:
        NotPlainError: If an element is not plain.
    """
    lists = _lists(value)
    if isinstance(value, dict):
        lists[_VALUES] = ["UUID" if _is_uuid(each) else each for each in lists[_VALUES]]
    return " to ".join(map(_digest, lists.values()))


def kept_order(value: object) -> dict[str, object] | None:
    """Return the order of `value`, for `in_order`; ``None`` if it is sorted, or too large to keep."""
    lists = _lists(value)
    try:
        if any(map(_is_too_large, lists.values())):
            return None
        keys = {name: keys_of(elements) for name, elements in lists.items()}
    except (NotPlainError, TypeError):
        return None
    if all(are_sorted(keys[name]) or is_sorted_by_name(elements) for name, elements in lists.items()):
        return None
    return {name: _kept(elements, keys[name]) for name, elements in lists.items()}


def in_order(value: object, kept: Mapping[str, Any]) -> Any:
    """Return the elements of `value` in an order that was kept: a list, or the pairs of a mapping.

    Returns:
        The elements, or ``None`` if they are not those of the kept order.
    """
    lists = _lists(value)
    if lists.keys() != kept.keys():
        return None
    try:
        orders = {name: _order(elements, kept[name]) for name, elements in lists.items()}
    except NotPlainError:
        return None
    found = {name: _taken(lists[name], order) for name, order in orders.items() if order is not None}
    if found.keys() != lists.keys():
        return None
    if isinstance(value, dict):
        return dict(zip(found[_KEYS], found[_VALUES], strict=True))
    return found[_VALUES]


def fill(value: Any, elements: Any) -> bool:
    """Replace the elements of `value` in place; return whether it allows that."""
    if isinstance(value, tuple):
        return False
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(torch.as_tensor(elements).to(value.dtype))
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


def _lists(value: object) -> dict[str, Sequence[object]]:
    if isinstance(value, dict):
        return {_KEYS: list(value), _VALUES: list(value.values())}
    return {_VALUES: elements_of(value)}


def _is_uuid(value: object) -> bool:
    return isinstance(value, uuid.UUID) or (isinstance(value, str) and _UUID.fullmatch(value) is not None)


def _digest(elements: Any) -> str:
    if kinds.is_array(elements):
        return f"[{len(elements)}] {elements.dtype} crc {zlib.crc32(bits_of(elements)):08x}"
    return digest_of(elements)


def _is_too_large(elements: Sequence[object]) -> bool:
    if kinds.is_array(elements):
        return False
    return len(elements) > _MAX_ELEMENTS or len(elements) * _mean_length(elements) > _MAX_CHARACTERS


def _kept(elements: Sequence[object], keys: Keys) -> dict[str, Any]:
    order, summed = _sorted(elements, keys)
    found: dict[str, Any] = {"length": len(keys), "elements": summed}
    if are_sorted(order):
        return found
    places = order.astype("int32")
    places[order] = torch.arange(len(order), dtype=torch.int32).numpy()
    return {**found, "order": zlib.compress(places.tobytes(), _LEVEL)}


def _order(elements: Sequence[object], kept: Mapping[str, Any]) -> Any:
    """Return the indices of the elements in the order that was kept; ``None`` if the elements are others."""
    if len(elements) != kept["length"]:
        return None
    order, summed = _sorted(elements, keys_of(elements))
    if summed != kept["elements"]:
        return None
    if "order" not in kept:
        return order
    return order[torch.frombuffer(bytearray(zlib.decompress(kept["order"])), dtype=torch.int32).numpy()]


def _taken(elements: Sequence[Any], order: Any) -> Sequence[object]:
    if kinds.is_array(elements):
        found: Sequence[Any] = elements[order]
        return found
    return [elements[i] for i in order.tolist()]


def _sorted(elements: Sequence[object], keys: Keys) -> tuple[Any, str]:
    """Return the indices that sort the keys, and a digest of the sorted keys."""
    if kinds.is_array(keys):
        bits = bits_of(keys)
        order = bits.argsort(kind="stable")
        return order, _hash_of(bits[order].tobytes())
    order = array_of(sorted(range(len(keys)), key=keys.__getitem__), "int64")
    ordered = [keys[i] for i in order.tolist()]
    # These are names; the prefix of their directory is removed here, from all in one step.
    prefix = directory_of([ordered[0], ordered[-1]]) if keys is elements and ordered else ""
    text = ("\0" + "\0".join(ordered)).replace(f"\0{prefix}", "\0")
    return order, _hash_of(text.encode("utf-8", "surrogatepass"))


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _mean_length(elements: Sequence[object]) -> float:
    measured = elements[:: max(1, len(elements) // _NUM_MEASURED)]
    return sum(8 if is_number(one) else len(text_of(one)) for one in measured) / max(1, len(measured))
