"""Attributes that a library's own code sets on objects of the user's classes: another part of the state has them."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

_LIBRARIES = (
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "lightning_faulttolerant.",
    "streaming.",
    "litdata.",
)


# Attributes of libraries' own samplers that move during an iteration. Drawing the batches again moves them too.
_MOVED = {
    "lhotse.dataset.sampling.": frozenset({"_iter", "_remaining_duration", "_reusable", "_shuffled_items", "cuts_iter",
                                           "remaining_cuts", "rng", "sampled_indexes"}),
}  # fmt: skip

_known: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def is_librarys(code: type | types.FunctionType) -> bool:
    """Return whether a class or a function belongs to one of these libraries."""
    return (code.__module__ or "").startswith(_LIBRARIES)


def names_in_libraries(kind: type) -> frozenset[str]:
    """Return every name that a class's methods from a library use; the library's attributes are among them."""
    if kind not in _known:
        methods = (value for base in kind.__mro__ if is_librarys(base) for value in vars(base).values())
        moved = (names for base in kind.__mro__ for of, names in _MOVED.items() if base.__module__.startswith(of))
        _known[kind] = names_in_code(methods).union(*moved)
    return _known[kind]


def names_in_code(methods: Iterable[Any]) -> frozenset[str]:
    """Return every name that some methods and properties use."""
    functions = [method.fget if isinstance(method, property) else method for method in methods]
    return frozenset(n for f in functions if isinstance(f, types.FunctionType) for n in f.__code__.co_names)
