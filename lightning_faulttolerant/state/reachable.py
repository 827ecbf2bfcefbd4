"""Every object that can be reached from some roots, with its path; and whose a class, a function, or a module is.

The walk evaluates no properties and calls no methods. It only reads what ``vars``, containers, partials, closures, and
bound methods hold, and no containers of more than 1,000 items.

The owner is the user, or Python, or an installed package. Libraries also set attributes on objects of the user's
classes. Another part of the state has those.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.metadata
import inspect
import logging
import os
import pathlib
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from lightning_faulttolerant.state import rng

_OWN = "lightning_faulttolerant"
_MAIN = "__main__"
_FROM_CLOUDPICKLE = "<dynamic-code>"  # the file of all code, since cloudpickle 3.1.3
_OWN_DIRECTORY = __file__.rpartition(f"{os.sep}{_OWN}{os.sep}")[0] + f"{os.sep}{_OWN}{os.sep}"
# Prefix of modules' names: a module may be called `module`, `trainer`, or `dataset`, like other objects.
_GLOBALS = "globals/"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_global(path: str) -> bool:
    """Return whether the path of an object begins with one of the user's modules."""
    return path.startswith(_GLOBALS)


def global_path(module_name: str, *names: str) -> str:
    """Return the path of one of the user's modules, or of a class there."""
    return ".".join((f"{_GLOBALS}{module_name}", *names))


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Return ``isinstance``; ``False`` for an object that can't be asked, such as a proxy of a deleted one."""
    return answers(lambda one: isinstance(one, kinds), value)


def answers(is_one: Callable[[Any], bool], value: object) -> bool:
    """Return the answer of `is_one`; ``False`` if the object raises an error, as any class may do anywhere."""
    try:
        return is_one(value)
    except Exception:  # noqa: BLE001 - any class may raise anything
        return False


def is_users(kind: type) -> bool:
    """Return whether a class is defined in one of the user's modules."""
    module = sys.modules.get(kind.__module__)
    return module is None or is_users_module(module) or is_detached_class(kind)


def is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is defined in one of the user's modules."""
    module = sys.modules.get(function.__module__)
    return module is None or is_users_module(module) or is_detached(function.__globals__)


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
    """Return whether a file belongs to Python or to an installed package, wherever that is installed."""
    return _is_installed(path) or _is_installed(os.path.realpath(path))


def _is_installed(path: str) -> bool:
    if path.startswith(_STANDARD_LIBRARY) or not _SITES.isdisjoint(path.split(os.sep)):
        return True
    return any(path in _recorded(str(directory)) for directory in pathlib.Path(path).parents if os.path.isabs(path))


_SITES = frozenset({"site-packages", "dist-packages"})
_STANDARD_LIBRARY = tuple({
    form + os.sep
    for name in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(inspect.getfile(os)))
    for form in (name, os.path.realpath(name))
})  # fmt: skip


@functools.cache
def _recorded(directory: str) -> frozenset[str]:
    """Return the files of the packages that are installed in a directory, as by ``pip install --target``."""
    records = (found.read_text("RECORD") or "" for found in importlib.metadata.distributions(path=[directory]))
    rows = csv.reader(line for record in records for line in record.splitlines())
    return frozenset(os.path.join(directory, row[0]) for row in rows if row)


_LIBRARIES = (
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "lightning_faulttolerant.",
    "streaming.",
    "litdata.",
)


# Attributes of libraries' own samplers that move during an iteration: drawing the batches again moves them too. And
# what a transform has drawn for one sample, of any size: it draws it again before each use.
_MOVED = {
    "lhotse.dataset.sampling.": frozenset({"_iter", "_remaining_duration", "_reusable", "_shuffled_items", "cuts_iter",
                                           "remaining_cuts", "rng", "sampled_indexes"}),
    "monai.transforms.": frozenset({"noise", "_noise1", "_noise2", "rand_offset"}),
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


_log = logging.getLogger(__name__)

Path = tuple[tuple[str, Any], ...]

_PRIMITIVES = (int, float, complex, str, bytes, bytearray, bool, type(None), type, types.ModuleType, torch.Tensor)
# Libraries whose objects hold large data or the whole program, but none of the user's generators.
_OPAQUE_ROOTS = {"IPython", "PIL", "_asyncio", "_io", "_pytest", "argparse", "asyncio", "concurrent", "datetime",
                 "hypothesis", "importlib", "io", "ipykernel", "jupyter_client", "lightning", "lightning_fabric",
                 "logging", "multiprocessing", "numpy", "pandas", "pathlib", "pluggy", "pyarrow", "pytorch_lightning",
                 "pytest", "ray", "re", "sqlalchemy", "threading", "traitlets", "typing", "weakref", "zmq"}  # fmt: skip
# Our own objects that a run's callbacks can reach hold the whole run, and the user's loaders by a second path.
# A streaming data set knows each of its shards, and draws from no generator that it keeps.
_STREAMING = ("batch_memory", "cache", "epochs", "format", "opening", "order", "samples", "shards", "stream", "world")
# The items of a corpus that lhotse lists: up to millions of cuts and recordings.
MANIFESTS = ("lhotse.array", "lhotse.audio", "lhotse.cut", "lhotse.features", "lhotse.lazy", "lhotse.serialization",
             "lhotse.shar", "lhotse.supervision")  # fmt: skip
_OPAQUE_MODULES = ("lightning_faulttolerant.trainer", "lightning_faulttolerant.twin", "lightning_faulttolerant.loader",
                   "streaming.base", "litdata.", *MANIFESTS,
                   *(f"lightning_faulttolerant.streaming.{name}" for name in _STREAMING))  # fmt: skip
# litdata's data set holds the user's transform, and Lightning's wrapper of a sampler, on several ranks, the user's.
_WALKED = ("torch.utils.data", "torch.nn.modules.container", "torch.optim", "litdata.streaming.dataset",
           "lightning.fabric.utilities.distributed", "lightning_fabric.utilities.distributed")  # fmt: skip
# Tensors by parameter, as many as the model has. An optimizer's are in the checkpoint, and large.
OF_OPTIMIZERS = ("state", "param_groups")
# Large containers hold no generators in practice; walking them would take seconds at each autosave.
MAX_ITEMS = 1_000
_MAX_VISITED = 200_000
_MAX_DEPTH = 1_000


def path_name(path: Path) -> str:
    """Return the name of a path in the state, such as ``dataset.transform[0].rng``."""
    name = ""
    for kind, key in path:
        name += f".{key}" if kind == "attribute" else f"[{key!r}]" if name else str(key)
    return name


def is_generator(value: object) -> bool:
    """Return whether `value` has a state that draws change: a generator of Python, NumPy or torch, or its seeds."""
    if torch.Generator in type(value).__mro__:  # its metaclass makes `isinstance` slow
        return True
    if issubclass(type(value), random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    if issubclass(type(value), kinds) or rng.is_sequence(value):
        return True
    # A proxy of a generator answers like it; a mock does not.
    is_stand_in = isinstance(value, numpy_random.Generator)
    return is_stand_in and issubclass(type(value.bit_generator), numpy_random.BitGenerator)  # type: ignore[attr-defined]


def walk(queue: deque[tuple[Path, object]], *, known: Collection[int] = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything that can be reached from the objects of `queue`, each object once, the nearest first.

    Args:
        queue: Paths and objects to begin with; it is emptied.
        known: The ``id`` of objects that are skipped.
    """
    # Breadth first: near objects are found before large data further down uses up the number of visits.
    visited: set[int] = set()
    while queue:
        path, value = queue.popleft()
        if is_a(value, _PRIMITIVES) or id(value) in visited or id(value) in known or len(path) > _MAX_DEPTH:
            continue
        if len(visited) >= _MAX_VISITED:
            _log.warning("Generators after %s objects, from %s on, are not saved.", _MAX_VISITED, path_name(path))
            return
        visited.add(id(value))
        yield path, value
        try:
            if not is_generator(value):
                queue.extend([((*path, step), child) for step, child in _children(value)])
        except Exception as error:  # noqa: BLE001 - any class may raise anything: what can't be read is left alone
            _log.debug("An object can't be searched for generators (%s)", type(error).__name__)


def _children(value: object) -> Iterator[tuple[tuple[str, object], object]]:
    if isinstance(value, (dict, types.MappingProxyType, list, tuple, deque)) and len(value) > MAX_ITEMS:
        return
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from ((("item", key), child) for key, child in value.items() if not (is_pythons(key) or _is_bare(child)))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((("item", i), c) for i, c in enumerate(value) if not issubclass(type(c), _PRIMITIVES[:7]))
    elif isinstance(value, functools.partial):
        yield from ((("attribute", name), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        # Lightning gives each callback the module's `log`: a callback's holder does not hold the module.
        if is_generator(value.__self__) or not _is_opaque_module(value.__func__.__module__ or ""):
            yield ("attribute", "__self__"), value.__self__
    elif isinstance(value, types.FunctionType):
        yield from ((("cell", i), _cell(cell)) for i, cell in enumerate(value.__closure__ or ()))
        held = ("__defaults__", "__kwdefaults__", "__dict__")
        yield from ((("attribute", name), child) for name in held if (child := getattr(value, name)))
    elif isinstance(value, types.BuiltinMethodType):
        yield ("attribute", "__self__"), value.__self__
    elif _is_walked(type(value)):
        left_out = OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else ()
        yield from ((("attribute", name), child) for name, child in attributes(value).items() if name not in left_out)
        yield from ((("attribute", name), method) for name, method in _closures_of(type(value)))


def is_pythons(key: object) -> bool:
    """Return whether `key` is one of Python's own names in the globals of a module, such as ``__builtins__``."""
    return isinstance(key, str) and key.startswith("__") and key.endswith("__")


def _is_bare(value: object) -> bool:
    """Return whether `value` is a function that holds nothing."""
    if type(value) is not types.FunctionType:
        return False
    return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)


def is_opaque(value: object) -> bool:
    """Return whether the walk skips the attributes of `value`."""
    return not isinstance(value, (dict, list, deque)) and not _is_walked(type(value))


def _is_walked(kind: type) -> bool:
    module = kind.__module__ or ""
    if issubclass(kind, torch.nn.Module) or module.startswith(_WALKED):
        return True
    return not module.startswith("torch.") and module != "torch" and not _is_opaque_module(module)


def _is_opaque_module(module: str) -> bool:
    return module.partition(".")[0] in _OPAQUE_ROOTS or module.startswith(_OPAQUE_MODULES)


def once_per_kind(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache a function's result for each class."""
    return functools.lru_cache(maxsize=4_096)(function)  # type: ignore[return-value]  # it keeps the arguments


@once_per_kind
def _closures_of(kind: type) -> tuple[tuple[str, types.FunctionType], ...]:
    """Return the methods of a user's class that use variables of a function around it."""
    found = [item for base in kind.__mro__[::-1] if is_users(base) for item in vars(base).items()]
    functions = {name: one for name, one in found if isinstance(one, types.FunctionType)}
    return tuple((name, one) for name, one in functions.items() if set(one.__code__.co_freevars) - {"__class__"})


@once_per_kind
def has_dict(kind: type) -> bool:
    """Return whether objects of a class have a ``__dict__`` that Python code can read; asyncio's tasks have none."""
    if issubclass(kind, threading.local):
        return True
    return bool(kind.__dictoffset__) and any("__dict__" in vars(base) for base in kind.__mro__)


def own_dict(value: object) -> dict[str, object] | None:
    """Return the ``__dict__`` of an object directly, without running code of its class."""
    if not has_dict(type(value)) or isinstance(value, type):
        return None
    kind = threading.local if isinstance(value, threading.local) else object  # of one, the attributes in this thread
    found: dict[str, object] = kind.__getattribute__(value, "__dict__")
    return found


def attributes(value: object) -> dict[str, object]:
    """Return an object's own attributes, slots included, without running code of its class."""
    found = dict(own_dict(value) or {})
    for name, slot in slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # an empty slot
            found[name] = slot.__get__(value)
    return found


@once_per_kind
def slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the slots of a class and its bases, by name."""
    bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple((n, s) for base in bases for n, s in base.items() if isinstance(s, types.MemberDescriptorType))


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the variable is not bound yet
        return None


def take_step(value: Any, kind: str, key: Any) -> object:
    """Return the value that one step of a path leads to."""
    if kind == "attribute":
        own = own_dict(value)
        return own[key] if own is not None and key in own else getattr(value, key)
    return _cell(value.__closure__[key]) if kind == "cell" else value[key]
