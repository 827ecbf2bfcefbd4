"""Classes and functions by name, looked up only among imported modules: other people may have written a checkpoint.

A checkpoint can name classes, which are created without running their code. It can also name functions of the user's
modules and a few of torch, NumPy, and Python's `math`. It can't name functions that read files or start programs.

`CantCarryError` and its subclasses say why a value can't be carried through a checkpoint.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.graph import Graph, name_of
from lightning_faulttolerant.state.objects.users import is_users_function
from lightning_faulttolerant.state.packing import is_packed


class CantCarryError(Exception):
    """A value can't be carried through a checkpoint."""


class LiveError(CantCarryError):
    """A value stands for a resource outside of Python, which is not state: an open file, a lock, a progress bar."""


class SavedError(LiveError):
    """A value is, or holds, a saved state: the next state would hold it together with those before it."""


class OpaqueError(CantCarryError):
    """A value is an object that only its library can read: it may be a handle of that library."""


class TooLargeError(CantCarryError):
    """A value is larger than the remaining room."""


def check_not_saved(value: dict[object, object]) -> None:
    """Raise if a dict is a state from this package."""
    if is_packed(value):
        raise SavedError("a state that was saved")


def why_not(value: object) -> CantCarryError:
    """Return why an unreadable value can't be carried."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if kinds.is_generator(value) or kinds.is_iterator(value) or kinds.is_loader_iterator(value):
        return CantCarryError(f"an iterator ({name}), which can't be copied")
    if kinds.holds_data(value) or kinds.is_hash(value):
        return CantCarryError(f"a {name}, which only its library can read")
    return LiveError(f"a {name}") if kinds.is_live(value) else OpaqueError(f"a {name}, which only its library can read")


BUILTINS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict,
                                                            set, frozenset, type(None), deque, Counter, OrderedDict,
                                                            defaultdict)}  # fmt: skip
_HARMLESS = frozenset({"argparse:Namespace", "collections:UserDict", "collections:UserList", "collections:UserString",
                       "types:SimpleNamespace"})  # fmt: skip
_OF_LIBRARIES = ("torch", "torch.nn.functional", "numpy", "math")  # their functions don't say where they are found
_FILES = ("from_file", "fromfile", "load", "save")
_PYTHONS = sys.stdlib_module_names - {"__main__"}


def class_name(kind: type, graph: Graph) -> str:
    """Return the name of a class.

    Raises:
        CantCarryError: If it can't be found by its name.
    """
    name = name_of(kind)
    if found_class(name, graph) is not kind:
        raise CantCarryError(f"a {kind.__qualname__}, whose class can't be found by its name")
    return name


def part_name(part: object, graph: Graph) -> str:
    """Return the name of a class or a function.

    Raises:
        CantCarryError: If it can't be found by its name, or is not part of a state.
    """
    own_name = getattr(part, "__name__", "")
    if found_part(f"builtins:{own_name}", graph) is part:
        return f"builtins:{own_name}"
    if isinstance(part, types.ModuleType):
        raise LiveError(f"the module {part.__name__}")
    qualname = getattr(part, "__qualname__", own_name)
    names = [f"{getattr(part, '__module__', None)}:{qualname}", *(f"{name}:{own_name}" for name in _OF_LIBRARIES)]
    name = next((name for name in names if found_part(name, graph) is part), None)
    if name is None:
        raise CantCarryError(f"the function {names[0]}, which can't be found by its name")
    return name


def found_class(name: str, graph: Graph) -> type | None:
    """Return the class of this name, from an imported module or from those that the fit began with."""
    known = graph.classes.get(name)
    if known is not None:
        return known
    found = _found(name)
    return found if isinstance(found, type) and not _runs_code(found) else None


def found_progress_bar(name: str) -> Callable[..., object] | None:
    """Return the tqdm bar class of this name, if it is imported."""
    found = _found(name)
    return found if isinstance(found, type) and kinds.is_progress_bar_class(found) else None


def found_part(name: str, graph: Graph) -> object:
    """Return the class or function of this name, if a checkpoint may name it."""
    module_name, _, qualname = name.partition(":")
    if module_name == "builtins":
        found = vars(builtins).get(qualname)
        return BUILTINS.get(qualname) or (found if isinstance(found, type) else None)
    found = _found(name)
    if isinstance(found, type):
        return found_class(name, graph)
    is_known = found is not None and graph.path_of(found) is not None
    return found if is_known or _is_harmless(found, module_name) else None


def _found(name: str) -> object:
    module_name, _, qualname = name.partition(":")
    if name in _HARMLESS:
        return vars(sys.modules[module_name]).get(qualname) if module_name in sys.modules else None
    if module_name.partition(".")[0] in _PYTHONS - {"math"}:
        return None
    found: object = sys.modules.get(module_name)
    for attribute in qualname.split("."):
        found = inspect.getattr_static(found, attribute, None)
        if isinstance(found, types.ModuleType):  # `torch:os.system` would lead to other modules
            return None
    if isinstance(found, staticmethod):
        found = found.__func__
    root = (getattr(found, "__module__", None) or "").partition(".")[0]
    return None if root in _PYTHONS - {"math"} else found


def _runs_code(kind: type) -> bool:
    """Return whether an object of this class runs its own code when it is deleted."""
    return hasattr(kind, "__del__")


def _is_harmless(found: Any, module_name: str) -> bool:
    if isinstance(found, types.FunctionType):
        return is_users_function(found) or module_name == "torch.nn.functional"
    is_fast = isinstance(found, types.BuiltinFunctionType) or kinds.is_numpy(found, "ufunc")
    return is_fast and module_name in _OF_LIBRARIES and not found.__name__.startswith(_FILES)


def method_name(method: types.MethodType) -> str:
    """Return the name of the attribute that holds a method in its object's class.

    Raises:
        CantCarryError: If its class has no such attribute.
    """
    own, owner = method.__func__, type(method.__self__)
    for name in (own.__name__, f"_{owner.__name__.lstrip('_')}{own.__name__}"):
        if inspect.getattr_static(owner, name, None) is own:
            return name
    raise CantCarryError(f"the method {own.__qualname__}, which can't be found by its name")


def found_method(owner: object, name: str) -> types.MethodType | None:
    """Return the method of this name from the class of `owner`."""
    found = inspect.getattr_static(type(owner), name, None)
    return types.MethodType(found, owner) if isinstance(found, types.FunctionType) else None
