"""The user's own modules: those whose files are neither Python's nor of an installed package."""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.state.objects.kinds import Namespace

_OWN = "lightning_faulttolerant"


def users_namespaces() -> dict[str, Namespace]:
    """Return the globals of the user's modules, and the attributes of the classes that are made there, by name."""
    found: dict[str, Namespace] = {}
    for name, module in _users_modules():
        found[name] = Namespace(owner=module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[f"{name}.{value.__qualname__}"] = Namespace(owner=value)
    return found


def users_variables() -> dict[str, Any]:
    """Return the same as mappings of names to values, as they are."""
    return {name: vars(namespace.owner) for name, namespace in users_namespaces().items()}


def is_users(kind: type) -> bool:
    """Return whether a class is made in one of the user's modules."""
    return _is_of_users_module(kind)


def is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is made in one of the user's modules."""
    return _is_of_users_module(function)


def is_users_frame(frame: types.FrameType) -> bool:
    """Return whether the code that runs in a frame is of one of the user's modules."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is None or _is_users(module)


def _is_of_users_module(part: Any) -> bool:
    module = sys.modules.get(part.__module__)
    return module is None or _is_users(module)


_found: tuple[int, list[tuple[str, types.ModuleType]]] = (0, [])


def _users_modules() -> list[tuple[str, types.ModuleType]]:
    """Return them; there are thousands of modules, so they are only looked through when others were imported."""
    global _found
    if _found[0] != len(sys.modules):
        _found = (len(sys.modules), list(_search()))
    return _found[1]


def _search() -> Iterator[tuple[str, types.ModuleType]]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and id(module) not in seen and _is_users(module):
            seen.add(id(module))
            yield "__main__" if name == "__mp_main__" else name, module


def _is_users(module: types.ModuleType) -> bool:
    if module.__name__.partition(".")[0] == _OWN:
        return False
    if module.__name__ == "__main__":
        return not _is_installed(getattr(module, "__file__", None) or "")
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and os.path.isabs(path) and not _is_installed(path)


@functools.lru_cache(maxsize=16_384)
def _is_installed(path: str) -> bool:
    return path.startswith(_installed()) or os.path.realpath(path).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(inspect.getfile(os))}
    return tuple({form for name in names if name for form in (name + os.sep, os.path.realpath(name) + os.sep)})
