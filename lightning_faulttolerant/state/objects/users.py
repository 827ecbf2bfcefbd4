"""Whose a class, a function, or a module is: the user's own, or Python's or of an installed package."""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
import types
from typing import Any

_OWN = "lightning_faulttolerant"
_OWN_DIRECTORY = __file__.rpartition(f"{os.sep}{_OWN}{os.sep}")[0] + f"{os.sep}{_OWN}{os.sep}"
# Before the names of modules: one may be called `module`, `trainer`, or `dataset`, as other objects are.
_GLOBALS = "globals/"


def is_global(path: str) -> bool:
    """Return whether the path of an object begins with one of the user's modules."""
    return path.startswith(_GLOBALS)


def global_path(module_name: str, *names: str) -> str:
    """Return the path of one of the user's modules, or of a class there."""
    return ".".join((f"{_GLOBALS}{module_name}", *names))


def is_users(kind: type) -> bool:
    """Return whether a class is made in one of the user's modules."""
    return _is_of_users_module(kind)


def is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is made in one of the user's modules."""
    return _is_of_users_module(function)


def is_users_frame(frame: types.FrameType) -> bool:
    """Return whether the code that runs in a frame is of one of the user's modules."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is None or is_users_module(module)


def is_users_file(path: str) -> bool:
    """Return whether a file is neither Python's, nor of an installed package, nor of this one."""
    return not _is_installed(path) and not path.startswith(_OWN_DIRECTORY)


def _is_of_users_module(part: Any) -> bool:
    module = sys.modules.get(part.__module__)
    return module is None or is_users_module(module)


def is_users_module(module: types.ModuleType) -> bool:
    """Return whether the file of a module is neither Python's nor of an installed package."""
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
