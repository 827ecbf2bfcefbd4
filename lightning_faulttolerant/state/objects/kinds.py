"""The kind of a value: one that never changes, one to search, or one to leave alone.

The items of containers are read and written by Python's own methods: no code of a user's subclass runs.
"""

from __future__ import annotations

import array
import ctypes
import datetime
import decimal
import enum
import fractions
import inspect
import io
import math
import mmap
import pathlib
import re
import sys
import threading
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_faulttolerant.state import reachable
from lightning_faulttolerant.state.reachable import MANIFESTS, has_dict, is_a, is_users, once_per_kind, slots_of

CONTAINERS = (list, dict, set, deque)


def length_of(value: object) -> int:
    """Return the number of items in a container."""
    return int(_own(value).__len__(value))


def items_of(value: object) -> list[object]:
    """Return the items of a list, a set, or a deque; the keys of a dict."""
    return [key for key, _ in pairs_of(value)] if isinstance(value, dict) else list(_own(value).__iter__(value))


def pairs_of(value: dict[object, object]) -> list[tuple[object, object]]:
    """Return the keys and values of a dict, in its order."""
    own: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    return list(own.items(value))


def fill(value: Any, items: Iterable[Any]) -> None:
    """Replace the items of a container by these; pairs for a dict."""
    if isinstance(value, list):
        list.__setitem__(value, slice(None), items)
        return
    found = list(items)
    own: Any = OrderedDict if isinstance(value, OrderedDict) else _own(value)
    own.clear(value)
    if isinstance(value, dict):
        for key, child in found:
            own.__setitem__(value, key, child)
    elif isinstance(value, deque):
        deque.extend(value, found)
    else:
        set.update(value, found)


def _own(value: object) -> Any:
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


# The history of inputs and outputs in a notebook.
_OF_IPYTHON = re.compile(r"In|Out|_{1,3}|_[dio]h|_i{1,3}|_i?\d+")

_LEAVES = frozenset({type(None), type(...), bool, int, float, complex, str, bytes, range, slice, datetime.date,
                     datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
                     fractions.Fraction, uuid.UUID, re.Pattern, torch.dtype, torch.device,
                     torch.Size})  # fmt: skip
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodWrapperType)
_EXACT_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
# The root packages of objects that stand for a resource outside of Python, or that hold the whole program.
_LIVE_ROOTS = frozenset({
    "IPython", "_asyncio", "_io", "_pytest", "_thread", "_weakref", "asyncio", "builtins", "concurrent", "contextlib",
    "contextvars", "ctypes", "fsspec", "hypothesis", "io", "ipykernel", "jupyter_client", "lightning",
    "lightning_fabric",
    "lightning_utilities", "litdata", "logging", "matplotlib", "mlflow", "mmap", "multiprocessing", "neptune",
    "pluggy", "pytest", "pytorch_lightning", "queue", "re", "rich", "select", "shelve", "signal", "socket",
    "sqlite3", "streaming", "subprocess", "tempfile", "tensorboard", "tensorboardX", "threading", "tqdm", "traitlets",
    "wandb", "weakref", "zipfile",
    "aim", "aiohttp", "av", "boto3", "botocore", "clearml", "comet_ml", "cv2", "dask", "decord", "google", "grpc",
    "h5py", "httpx", "lmdb", "netCDF4", "psycopg2", "pymongo", "pysam", "rasterio", "ray", "redis", "requests",
    "soundfile", "sqlalchemy", "swanlab", "tables", "tiledb", "torch", "trackio", "urllib3", "zarr",
    "zmq"})  # fmt: skip
# Packages whose objects keep data in memory that only they can read.
_DATA_ROOTS = frozenset({"PIL", "datasets", "jax", "numpy", "pandas", "polars", "pyarrow"})
_WALKED_OF_THREADING = ("Barrier", "BoundedSemaphore", "Event", "Semaphore")
_OWN = "lightning_faulttolerant."
_TORCH_WALKED = ("torch.nn.", "torch.optim.", "torch.utils.data.dataset", "torch.utils.data.sampler",
                 "torch.utils.data.distributed", "torch.quasirandom", "torch.distributions.",
                 "torch.amp.", "torch.cuda.amp.")  # fmt: skip
# A user's own package may have the name of one that is left alone, but not one of these.
_LIGHTNINGS = frozenset({"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"})


def is_leaf(value: object) -> bool:
    """Return whether `value` can't change and refers to nothing that can."""
    return type(value) in _LEAVES or is_leaf_kind(type(value))


@once_per_kind
def is_leaf_kind(kind: type) -> bool:
    """Return whether all instances of `kind` are leaves, including the user's own classes of leaves."""
    numpy = sys.modules.get("numpy")
    is_numpys = numpy is not None and issubclass(kind, numpy.generic)
    return kind in _LEAVES or is_numpys or issubclass(kind, (enum.Enum, pathlib.PurePath))


def is_leaf_type(kind: type) -> bool:
    """Return whether all instances of `kind` are leaves."""
    return kind in _LEAVES


def is_named(value: object) -> bool:
    """Return whether `value` is a part of the program: a class, a function, a module."""
    return is_a(value, _NAMED)


def contents_of_cell(cell: types.CellType) -> list[object]:
    """Return the value of a closure's variable, in a list; an empty list if it is not bound."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def is_shared_value(value: object) -> bool:
    """Return whether `value` is a number, or an array of numbers, that processes share (``multiprocessing.Value``)."""
    # Of the class: a loaded library (ctypes.CDLL) looks up any attribute among its functions, and may raise.
    is_simple = type(value).__module__ == "ctypes" and hasattr(type(value), "value")
    return is_simple or isinstance(value, ctypes.Array) or hasattr(type(value), "get_obj")


def memory_of(value: Any) -> memoryview:
    """Return the memory of a value that satisfies `is_shared_value`."""
    return memoryview(value.get_obj() if hasattr(value, "get_obj") else value).cast("B")


def is_buffer(value: object) -> bool:
    """Return whether `value` is one of Python's own arrays of bytes or numbers, or a file in memory."""
    return type(value) in (bytearray, array.array, io.StringIO, io.BytesIO)


def content_of_buffer(value: Any) -> tuple[Any, int]:
    """Return the content of a buffer, and the position of a file in memory."""
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return (None, 0) if value.closed else (value.getvalue(), value.tell())
    return bytes(value), 0


def is_shared(value: object) -> bool:
    """Return whether other processes see writes to `value`."""
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and value.device.type == "cpu"
        return is_dense and bool(value.is_shared())  # type: ignore[no-untyped-call]
    return is_shared_value(value)


def is_numpy(value: object, kind: str) -> bool:
    """Return whether `value` is an instance of this NumPy class; NumPy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), getattr(numpy, kind))


def is_array(value: Any) -> bool:
    """Return whether `value` is a NumPy array of numbers or texts, rather than of objects."""
    return is_numpy(value, "ndarray") and not value.dtype.hasobject


def is_mapped(array: Any) -> bool:
    """Return whether an array is in a memory-mapped file, by itself or as a part of another one."""
    while is_numpy(array, "ndarray"):
        if is_numpy(array, "memmap"):
            return True
        array = array.base
    return isinstance(array, mmap.mmap)


def is_stand_in(value: object) -> bool:
    """Return whether `value` only claims to hold data: a mock, or a proxy (``weakref.proxy``) of what does."""
    of_data = (torch.Tensor, torch.nn.Module, tuple, *CONTAINERS)
    return isinstance(value, of_data) and not issubclass(type(value), of_data)


def is_container(value: object) -> bool:
    """Return whether `value` is a list, dict, set, or deque, or an instance of a user's subclass of these."""
    return isinstance(value, CONTAINERS)


def is_plain_container(value: object) -> bool:
    """Return whether `value` is one of Python's own containers, which have no attributes."""
    return type(value) in _EXACT_CONTAINERS


def num_bytes(value: object) -> float:
    """Return the approximate size of a table or a similar object; infinity if it does not report one."""
    try:
        if hasattr(value, "memory_usage"):  # of pandas
            usage = value.memory_usage()
            return float(usage if isinstance(usage, int) else usage.sum())
        return float(getattr(value, "nbytes", math.inf))
    except Exception:  # noqa: BLE001 - the library may raise anything
        return math.inf


def num_items(value: Any) -> int:
    """Return the number of items in a container, an array, or a tensor; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return 0 if is_lazy(value) else value.numel()
    if is_numpy(value, "ndarray"):
        return int(value.size)
    return length_of(value) if is_container(value) else 0


def is_generator(value: object) -> bool:
    """Return whether `value` is the result of a Python generator function."""
    return isinstance(value, types.GeneratorType)


def is_loader_iterator(value: object) -> bool:
    """Return whether `value` is an iterator of a torch ``DataLoader``."""
    return type(value).__module__ == "torch.utils.data.dataloader" and hasattr(value, "__next__")


def is_iterator(value: object) -> bool:
    """Return whether `value` is one of Python's own iterators, such as that of a list, or of itertools."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__")


def is_optimizer(value: object) -> bool:
    """Return whether `value` is an optimizer of torch's kind: its tensors are carried by parameter, in place."""
    return isinstance(value, torch.optim.Optimizer)


def is_walked(value: object) -> bool:
    """Return whether `value` is an instance whose attributes are its state."""
    return _is_walked_kind(type(value))


WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


@once_per_kind
def _is_walked_kind(kind: type) -> bool:
    module = kind.__module__ or ""
    if kind in (Namespace, threading.local):
        return True
    if module.startswith(_OWN) or is_file_system(kind):
        return False
    if module == "torch" or module.startswith("torch."):
        return module.startswith(_TORCH_WALKED)
    if module.startswith(MANIFESTS):
        return False
    if module == "queue" or (module == "threading" and kind.__name__ in _WALKED_OF_THREADING):
        return True  # their locks are live, their content is state
    if kind in WEAK:
        return True
    root = module.partition(".")[0]
    if root in _LIVE_ROOTS | _DATA_ROOTS and (root in _LIGHTNINGS or not is_users(kind)):
        # A class of a notebook or an extension may also name `builtins`; those with attributes are walked.
        return False
    return has_dict(kind) or any("__slots__" in vars(base) for base in kind.__mro__[:-1])


def is_progress_bar(value: object) -> bool:
    """Return whether `value` is a tqdm bar that its user moves by hand."""
    return is_progress_bar_class(type(value)) and getattr(value, "iterable", None) is None and hasattr(value, "total")


def state_of_bar(bar: Any) -> list[object]:
    """Return the position of a bar, its total, its description, and whether it is shown."""
    return [bar.n, bar.total, getattr(bar, "desc", None), not bar.disable]


def is_progress_bar_class(kind: type) -> bool:
    """Return whether a class is one of tqdm's own bars."""
    return kind.__module__.partition(".")[0] == "tqdm" and callable(getattr(kind, "refresh", None))


def is_hash(value: object) -> bool:
    """Return whether `value` is a hash of `hashlib` that is being fed."""
    return (type(value).__module__ or "").startswith(("_hashlib", "_blake2", "_md5", "_sha")) and hasattr(
        value, "digest"
    )


def is_live(value: object) -> bool:
    """Return whether `value` stands for a resource outside of Python: a file, a connection, a logger of a service."""
    module = type(value).__module__ or ""
    root = module.partition(".")[0]
    is_live_module = root in _LIVE_ROOTS - {"builtins"} or f"{root}." == _OWN or module.startswith(MANIFESTS)
    return is_live_module or is_file_system(type(value))


def is_file_system(kind: type) -> bool:
    """Return whether a class is one of fsspec's file systems, or a user's own: it keeps connections, also for saves."""
    return any(base.__module__ == "fsspec.spec" for base in kind.__mro__)


def holds_data(value: object) -> bool:
    """Return whether `value` keeps data that no other code can read: a table, an image."""
    return (type(value).__module__ or "").partition(".")[0] in _DATA_ROOTS and not is_users(type(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """Names of an object that is not searched otherwise: the globals of a module, the attributes of a class.

    Args:
        owner: The module or class.
        names: Only these; ``None`` for all except Python's own private names.
    """

    owner: object
    names: tuple[str, ...] | None = None

    def attributes(self) -> dict[str, object]:
        """Return the values that count as state: no functions, classes, modules, or descriptors."""
        if self.names is not None:
            return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}
        found = {name: value for name, value in list(vars(self.owner).items()) if not _is_code(value)}
        is_notebook = "get_ipython" in vars(self.owner)
        names = (n for n in found if not (n.startswith("__") or (is_notebook and _OF_IPYTHON.fullmatch(n))))
        return {name: found[name] for name in names}


def _is_code(value: object) -> bool:
    is_descriptor = hasattr(type(value), "__get__") and not is_users(type(value))
    return is_named(value) or is_descriptor or type(value).__module__ in ("typing", "abc", "_abc")


def attributes(value: object) -> dict[str, object]:
    """Return an object's own attributes, slots included; no property is evaluated."""
    if isinstance(value, Namespace):
        return value.attributes()
    return reachable.attributes(value)


def dict_of(value: Any) -> Mapping[str, object]:
    """Return the ``__dict__`` of `value`, or of the owner of its names, directly."""
    return vars(value.owner) if isinstance(value, Namespace) else reachable.own_dict(value) or {}


@once_per_kind
def has_slots(kind: type) -> bool:
    """Return whether objects of this class hold values outside of a ``__dict__``."""
    return kind is not Namespace and (bool(slots_of(kind)) or not has_dict(kind))


def has_state_methods(value: object) -> bool:
    """Return whether `value` has ``state_dict`` and ``load_state_dict`` itself, with the arguments of torch's protocol.

    The user's ``__getattr__`` is not called.
    """
    own = reachable.own_dict(value) or ()
    if not all(name in own or _has_name(type(value), name) for name in STATE_METHODS):
        return False
    if not all(callable(inspect.getattr_static(value, name, None)) for name in STATE_METHODS):
        return False
    return follow_protocol(*(getattr(value, name) for name in STATE_METHODS))


STATE_METHODS = ("state_dict", "load_state_dict")


@once_per_kind
def _has_name(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__)


@once_per_kind
def is_record_kind(kind: type) -> bool:
    """Return whether objects of a class consist only of their ``__dict__``."""
    maker = next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))
    if maker is not object or issubclass(kind, torch.nn.Module) or any(_has_name(kind, n) for n in STATE_METHODS):
        return False
    return has_dict(kind) and not slots_of(kind) and _is_walked_kind(kind) is True


def follow_protocol(state_dict: object, load_state_dict: object) -> bool:
    """Return whether two methods have the arguments of torch's protocol."""
    return _num_required(state_dict) == 0 and _num_required(load_state_dict) == 1


def _num_required(method: Any) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a method of an extension reports nothing
        return -1
    return sum(p.default is p.empty and (p.kind in kinds or p.kind is p.KEYWORD_ONLY) for p in parameters)
