"""The user's own modules: those whose files belong neither to Python nor to an installed package.

Globals that do not belong to a module count as one too: those of running functions, and of the classes of given
objects. See `is_detached`.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.users import global_path, is_detached, is_users_module

_FIRST_COPY = 2


class _Detached:
    """An object with the globals of a function as its attributes: the same dict.

    Args:
        variables: The globals.
    """

    def __init__(self, variables: dict[str, object]) -> None:
        self.__dict__ = variables


def users_namespaces(roots: Mapping[str, object]) -> dict[str, Namespace]:
    """Return the globals of the user's modules, and the attributes of the classes defined there, by name.

    Args:
        roots: Objects whose classes may have globals without a module, or mappings and sequences of such objects.
    """
    found: dict[str, Namespace] = {}
    for name, module in _with_detached(_users_modules(), roots):
        found[global_path(name)] = Namespace(owner=module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == vars(module).get("__name__"):
                found[global_path(name, value.__qualname__)] = Namespace(owner=value)
    return found


def users_variables(roots: Mapping[str, object]) -> dict[str, object]:
    """Return the same as direct mappings of names to values."""
    return {name: vars(namespace.owner) for name, namespace in users_namespaces(roots).items()}


def _with_detached(
    modules: list[tuple[str, types.ModuleType]], roots: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield modules, and globals that do not belong to a module."""
    yield from modules
    names = {name for name, _ in modules}
    found = {id(variables): variables for variables in (*_of_frames(), *_of_classes(roots)) if is_detached(variables)}
    for variables in found.values():
        own = str(variables.get("__name__"))
        copies = (f"{own}~{number}" for number in itertools.count(_FIRST_COPY))
        name = next(name for name in itertools.chain([own], copies) if name not in names)
        names.add(name)
        yield name, _Detached(variables)


def _of_frames() -> list[dict[str, object]]:
    """Return the globals of the running functions, the outermost first."""
    frame: types.FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        found.append(frame.f_globals)
        frame = frame.f_back
    return found[::-1]


def _of_classes(roots: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the globals of the functions of some objects' classes."""
    for root in roots.values():
        parts = root.values() if isinstance(root, Mapping) else root if isinstance(root, (list, tuple)) else [root]
        for part in parts:
            functions = [part, *(each for kind in type(part).__mro__ for each in vars(kind).values())]
            yield from (each.__globals__ for each in functions if isinstance(each, types.FunctionType))


_found: tuple[int, object, list[tuple[str, types.ModuleType]]] = (0, None, [])
_whose: dict[str, tuple[Any, bool]] = {}
"""For each name in `sys.modules`, its module and whether that is the user's."""


def _users_modules() -> list[tuple[str, types.ModuleType]]:
    """Return the user's modules; there are thousands of modules, so each is only checked once."""
    global _found, _whose
    num_modules, main = len(sys.modules), sys.modules.get("__main__")
    if _found[0] != num_modules or _found[1] is not main:
        _whose = {name: _looked_at(name, module) for name, module in list(sys.modules.items())}
        _found = (num_modules, main, list(_search()))
    return _found[2]


def _looked_at(name: str, module: object) -> tuple[object, bool]:
    known = _whose.get(name)
    if known is not None and known[0] is module:
        return known
    return module, isinstance(module, types.ModuleType) and is_users_module(module)


def _search() -> Iterator[tuple[str, types.ModuleType]]:
    seen: set[int] = set()
    main, is_mains = _whose.get("__main__", (None, False))
    for name, (module, is_users) in _whose.items():
        if name == "__mp_main__" and main is not module and is_mains:
            continue  # the main module before it was replaced (by runpy, a debugger)
        if is_users and id(module) not in seen:
            seen.add(id(module))
            yield "__main__" if name == "__mp_main__" else name, module
