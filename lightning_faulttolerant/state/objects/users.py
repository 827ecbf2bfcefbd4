"""The owner of a class, a function, or a module: the user, or Python, or an installed package.

Libraries also set attributes on objects of the user's classes. Another part of the state has those.
"""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

_OWN = "lightning_faulttolerant"
_MAIN = "__main__"
_FROM_CLOUDPICKLE = "<dynamic-code>"  # the file of all code, since cloudpickle 3.1.3
_OWN_DIRECTORY = __file__.rpartition(f"{os.sep}{_OWN}{os.sep}")[0] + f"{os.sep}{_OWN}{os.sep}"
# Prefix of modules' names: a module may be called `module`, `trainer`, or `dataset`, like other objects.
_GLOBALS = "globals/"


def is_global(path: str) -> bool:
    """Return whether the path of an object begins with one of the user's modules."""
    return path.startswith(_GLOBALS)


def global_path(module_name: str, *names: str) -> str:
    """Return the path of one of the user's modules, or of a class there."""
    return ".".join((f"{_GLOBALS}{module_name}", *names))


def is_users(kind: type) -> bool:
    """Return whether a class is defined in one of the user's modules."""
    module = sys.modules.get(kind.__module__)
    return module is None or is_users_module(module) or is_detached_class(kind)


def is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is defined in one of the user's modules."""
    module = sys.modules.get(function.__module__)
    return module is None or is_users_module(module) or is_detached(function.__globals__)


def is_users_frame(frame: types.FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is None or is_users_module(module) or is_detached(frame.f_globals)


def is_detached(variables: Mapping[str, Any]) -> bool:
    """Return whether the globals of a function or of a frame are the user's, without belonging to a module.

    cloudpickle brings a script's functions to a worker with separate globals. submitit, Ray, and loky run scripts like
    this, and `__main__` is the worker's. A profiler runs a script in separate globals too.
    """
    name = variables.get("__name__") or ""
    module = sys.modules.get(name)
    if module is not None and vars(module) is variables:
        return False
    path = variables.get("__file__")
    if not isinstance(path, str):  # in a notebook
        return bool(name == _MAIN)
    return is_users_file(path)


def is_detached_class(kind: type) -> bool:
    """Return whether a class is defined in a script that is not the `__main__` of this process."""
    main = sys.modules.get(_MAIN)
    if kind.__module__ != _MAIN or main is None:
        return False
    return not is_users_module(main) and vars(main).get(kind.__qualname__.partition(".")[0]) is not kind


def file_of(frame: types.FrameType) -> str:
    """Return the file of a frame's code, as far as it is known."""
    file = frame.f_globals.get("__file__")
    return file if frame.f_code.co_filename == _FROM_CLOUDPICKLE and file else frame.f_code.co_filename


def is_users_file(path: str) -> bool:
    """Return whether a file belongs neither to Python, nor to an installed package, nor to this one."""
    return not is_installed(path) and not path.startswith(_OWN_DIRECTORY)


def is_users_module(module: types.ModuleType) -> bool:
    """Return whether a module's file belongs neither to Python nor to an installed package."""
    path = getattr(module, "__file__", None)
    return _is_users_name(module.__name__, path if isinstance(path, str) else None)


@functools.lru_cache(maxsize=16_384)
def _is_users_name(name: str, path: str | None) -> bool:
    """Return whether a module of this name and file is the user's."""
    if name.partition(".")[0] == _OWN:
        return False
    if name == _MAIN:
        return not is_installed(path or "")
    return path is not None and os.path.isabs(path) and not is_installed(path)


@functools.lru_cache(maxsize=16_384)
def is_installed(path: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return path.startswith(_installed()) or os.path.realpath(path).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(inspect.getfile(os))}
    return tuple({form for name in names if name for form in (name + os.sep, os.path.realpath(name) + os.sep)})


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


def names_in_code(methods: Iterable[object]) -> frozenset[str]:
    """Return every name that some methods and properties use."""
    functions = [method.fget if isinstance(method, property) else method for method in methods]
    return frozenset(n for f in functions if isinstance(f, types.FunctionType) for n in f.__code__.co_names)
