"""The keys that sort the elements of a list, and a check for orders that a script did not draw."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, starmap
from operator import le
from typing import Any

from torch import Tensor

from lightning_faulttolerant.state.drawn.texts import directory_of, names_of, text_of
from lightning_faulttolerant.state.objects import kinds

Keys = Any  # an array of numbers, or a list of texts
_WRITTEN = {str, int, float, bool, type(None)}  # equal values of these have equal texts in Python
_NUMBERS = "biufmM"
_WIDTHS = (1, 2, 4, 8)
_MAX_PAIRS = 4_096
_DIGITS = re.compile("([0-9]+)")


def elements_of(value: Any) -> Any:
    """Return the elements of a value that is not a mapping, for indexing; an array of numbers stays an array."""
    if isinstance(value, Tensor):
        value = value.detach().resolve_neg()
        try:
            return elements_of(value.numpy())
        except TypeError:  # NumPy lacks such numbers: bfloat16
            return elements_of(value.float().numpy())
    if kinds.is_numpy(value, "ndarray"):
        is_plain = value.dtype.kind in _NUMBERS and value.dtype.itemsize in _WIDTHS
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


def _by_directory_and_numbers(name: str) -> list[object]:
    return [_by_numbers(part) for part in _by_directory(name.casefold())]


def _by_parts(name: str) -> list[str]:
    return name.split("/")


def _by_parts_and_numbers(name: str) -> list[object]:
    return [_by_numbers(part) for part in name.casefold().split("/")]


def _by_numbers_in_any_case(name: str) -> list[object]:
    return _by_numbers(name.casefold())


_ORDERS_OF_NAMES: tuple[Callable[[str], object], ...] = (
    str,
    str.casefold,
    _by_directory,
    _by_parts,
    _by_numbers,
    _by_numbers_in_any_case,
    _by_directory_and_numbers,
    _by_parts_and_numbers,
)
