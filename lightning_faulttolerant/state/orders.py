"""The order of a list, an array, or a mapping: kept in few bytes, and restored for the same elements.

Elements are compared by texts, which are equal if the values are equal, in this process and in others. An order that a
key explains, such as the names of files, was not drawn by the script.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, starmap
from operator import le
from pathlib import PurePath
from typing import Any

import torch

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
    return issubclass(type(value), _NUMBERS) or kinds.is_numpy(value, "number")


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
    elif isinstance(value, torch.Tensor) or kinds.is_array(value):
        parts.append(_array(value))
    elif (
        kinds.is_walked(value)
        and not isinstance(value, (torch.utils.data.Dataset, torch.nn.Module))
        and not callable(value)
    ):
        parts.append(type(value).__qualname__)
        _write(kinds.attributes(value), parts, prefix)
    else:
        raise NotPlainError(f"a {type(value).__name__}")


def _leaf(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return f"{type(value).__name__} {value.item() if kinds.is_numpy(value, 'generic') else value!r}"


def _array(value: Any) -> str:
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested or value.is_meta):
        raise NotPlainError("a tensor without elements")
    flat = value.detach().reshape(-1) if isinstance(value, torch.Tensor) else value.reshape(-1)
    stride = max(1, len(flat) // _NUM_SAMPLED)
    return f"{list(value.shape)} {value.dtype} crc {zlib.crc32(str(flat[::stride].tolist()).encode()):08x}"


Keys = Any  # an array of numbers, or a list of texts
_WRITTEN = {str, int, float, bool, type(None)}  # equal values of these have equal texts in Python
_NUMBER_KINDS = "biufmM"
_WIDTHS = (1, 2, 4, 8)
_MAX_PAIRS = 4_096
_DIGITS = re.compile("([0-9]+)")


def elements_of(value: Any) -> Any:
    """Return the elements of a value that is not a mapping, for indexing; an array of numbers stays an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_neg()
        try:
            return elements_of(value.numpy())
        except TypeError:  # NumPy lacks such numbers: bfloat16
            return elements_of(value.float().numpy())
    if kinds.is_numpy(value, "ndarray"):
        is_plain = value.dtype.kind in _NUMBER_KINDS and value.dtype.itemsize in _WIDTHS
        return value if is_plain else value.tolist()
    return list(value) if isinstance(value, deque) else value


def array_of(numbers: Sequence[object], dtype: str) -> Any:
    """Return numbers in a NumPy array, which sorts them a hundred times faster than Python does.

    Raises:
        OverflowError: If one is too large for it.
    """
    import numpy as np  # noqa: PLC0415, RUF100 - optional for the package: torchmetrics brings it

    return np.array(numbers, dtype=dtype)


def bits_of(numbers: Any) -> Any:
    """Return an array of numbers as integers that are equal if all bits are equal, even for two NaNs."""
    return numbers.copy().view(f"i{numbers.dtype.itemsize}")


def keys_of(elements: Sequence[Any]) -> Keys:
    """Return the sort keys of elements: numbers and texts themselves, the text of anything else.

    Raises:
        NotPlainError: If an element has no text.
    """
    if kinds.is_array(elements):
        return elements
    types = set(map(type, elements))
    if types <= {int}:
        try:
            return array_of(elements, "int64")
        except OverflowError:
            return list(map(repr, elements))
    if types <= {float}:
        return array_of(elements, "float64")
    if types <= {str}:
        return elements
    prefix = directory_of(elements)
    if types <= {tuple} and set(map(type, chain.from_iterable(elements))) <= _WRITTEN:
        # A million names with labels take a second; `text_of` would take ten.
        return [repr((element[0][len(prefix) :], *element[1:]) if prefix else element) for element in elements]
    return [text_of(element, prefix=prefix) for element in elements]


def are_sorted(keys: Keys) -> bool:
    """Return whether each key is at least the one before it."""
    if kinds.is_array(keys):
        return bool((keys[1:] >= keys[:-1]).all())
    return all(starmap(le, pairwise(keys)))


def is_sorted_by_name(elements: Sequence[object]) -> bool:
    """Return whether file names are in an order in which a program lists them.

    In a long list, up to 8,192 neighbors are compared.
    """
    step = max(1, len(elements) // _MAX_PAIRS)
    names = names_of([elements[j] for i in range(0, len(elements) - 1, step) for j in (i, i + 1)])
    if not names:
        return False
    return any(all(starmap(le, pairwise(map(key, names)))) for key in _ORDERS_OF_NAMES)


def _by_numbers(name: str) -> list[object]:
    """Return a key that compares the numbers inside a text as numbers: ``2`` comes before ``10``."""
    parts = _DIGITS.split(name)
    parts[1::2] = [part.lstrip("0") for part in parts[1::2]]
    return [(len(part), part) if i % 2 else part for i, part in enumerate(parts)]


def _by_directory(name: str) -> tuple[str, str]:
    directory, _, base = name.rpartition("/")
    return directory, base


_ORDERS_OF_NAMES: tuple[Callable[[str], object], ...] = (
    str,
    str.casefold,
    _by_directory,
    lambda name: name.split("/"),
    _by_numbers,
    lambda name: _by_numbers(name.casefold()),
    lambda name: list(map(_by_numbers, _by_directory(name.casefold()))),
    lambda name: list(map(_by_numbers, name.casefold().split("/"))),
)


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
    if isinstance(value, torch.Tensor):
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


def in_order(value: object, kept: Mapping[str, Any]) -> object:
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
    if isinstance(value, torch.Tensor):
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


def _kept(elements: Sequence[object], keys: Keys) -> dict[str, object]:
    order, summed = _sorted(elements, keys)
    found: dict[str, object] = {"length": len(keys), "elements": summed}
    if are_sorted(order):
        return found
    places = order.astype("int32")
    places[order] = torch.arange(len(order), dtype=torch.int32).numpy()
    return {**found, "order": zlib.compress(places.tobytes(), _LEVEL)}


def _order(elements: Sequence[object], kept: Mapping[str, Any]) -> object:
    """Return the indices of the elements in the order that was kept; ``None`` if the elements are others."""
    if len(elements) != kept["length"]:
        return None
    order, summed = _sorted(elements, keys_of(elements))
    if summed != kept["elements"]:
        return None
    if "order" not in kept:
        return order
    return order[torch.frombuffer(bytearray(zlib.decompress(kept["order"])), dtype=torch.int32).numpy()]


def _taken(elements: Sequence[object], order: Any) -> Sequence[object]:
    if kinds.is_array(elements):
        found: Sequence[object] = elements[order]
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
