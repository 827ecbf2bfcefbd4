"""The Python lines that let ``weights_only=True`` accept objects, tested before a user is told to paste them."""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_REFUSED_CLASS = re.compile(r"but got <class '([\w.]+)'>")
_MAX_ATTEMPTS = 20


def lines_to_allow(values: Iterable[object]) -> list[str] | None:
    """Return lines after which objects load with ``weights_only=True``, or ``None`` if none would help.

    Args:
        values: The objects. They are written into memory and loaded from there.

    Example:
        >>> from fractions import Fraction
        >>> lines_to_allow([Fraction(1, 3)])
        ['from fractions import Fraction', 'torch.serialization.add_safe_globals([Fraction])']
    """
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # torch before 2.6
        return None
    buffer = io.BytesIO()
    try:
        torch.save(list(values), buffer)
        buffer.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
        found = {name: _found(name) for name in names}
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
        return None
    if not _suffice(buffer, found) or not all(map(_may_be_allowed, found.values())):
        return None
    return _lines(found)


def _suffice(buffer: io.BytesIO, found: dict[str, Any]) -> bool:
    """Return whether everything loads once these are allowed; classes that only the load attempt names are added."""
    for _ in range(_MAX_ATTEMPTS):
        buffer.seek(0)
        try:
            with torch.serialization.safe_globals(list(found.values())):
                torch.load(buffer, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = _REFUSED_CLASS.search(str(error))
            if named is None or named[1] in found:
                return False
            try:
                found[named[1]] = _found(named[1])
            except (ImportError, AttributeError):
                return False
        except Exception:  # noqa: BLE001 - a class may run anything when it is loaded
            return False
        else:
            return True
    return False


def _found(name: str) -> Any:
    """Return the object with this full name; its module is the longest part in front that can be imported."""
    parts = name.split(".")
    for num_parts in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:num_parts]))
        except ImportError:
            continue
        for part in parts[num_parts:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def _may_be_allowed(value: object) -> bool:
    # With getattr or a similar function allowed, a file could call anything.
    return isinstance(value, type) or getattr(value, "__module__", None) != builtins.__name__


def _lines(found: Mapping[str, object]) -> list[str]:
    imports, listed, modules = set(), [], dict[str, str]()
    for name, value in found.items():
        module, path = _place_of(name, value)
        first, _, rest = path.partition(".")
        alias = first if modules.setdefault(first, module) == module else f"{module.replace('.', '_')}_{first}"
        if module not in ("builtins", "__main__", "__mp_main__"):
            imports.add(f"from {module} import {first}" + ("" if alias == first else f" as {alias}"))
        listed.append(f"{alias}.{rest}" if rest else alias)
    return [*sorted(imports), f"torch.serialization.add_safe_globals([{', '.join(listed)}])"]


def _place_of(name: str, value: object) -> tuple[str, str]:
    """Return the module, and the path in it, from which the object with this full name can be imported."""
    path = str(getattr(value, "__qualname__", name.rpartition(".")[2]))
    return (name.removesuffix(f".{path}") if name.endswith(f".{path}") else str(value.__module__)), path
