"""The user's own modules: those whose files are neither Python's nor of an installed package."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.users import global_path, is_users_module


def users_namespaces() -> dict[str, Namespace]:
    """Return the globals of the user's modules, and the attributes of the classes that are made there, by name."""
    found: dict[str, Namespace] = {}
    for name, module in _users_modules():
        found[global_path(name)] = Namespace(owner=module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[global_path(name, value.__qualname__)] = Namespace(owner=value)
    return found


def users_variables() -> dict[str, Any]:
    """Return the same as mappings of names to values, as they are."""
    return {name: vars(namespace.owner) for name, namespace in users_namespaces().items()}


_found: tuple[int, list[tuple[str, types.ModuleType]]] = (0, [])


def _users_modules() -> list[tuple[str, types.ModuleType]]:
    """Return them; there are thousands of modules, so they are only looked through when others were imported."""
    global _found
    if _found[0] != len(sys.modules):
        _found = (len(sys.modules), list(_search()))
    return _found[1]


def _search() -> Iterator[tuple[str, types.ModuleType]]:
    seen: set[int] = set()
    main = sys.modules.get("__main__")
    for name, module in list(sys.modules.items()):
        if name == "__mp_main__" and main is not None and main is not module and is_users_module(main):
            continue  # the main module of before somebody put another one in its place (runpy, a debugger)
        if isinstance(module, types.ModuleType) and id(module) not in seen and is_users_module(module):
            seen.add(id(module))
            yield "__main__" if name == "__mp_main__" else name, module
