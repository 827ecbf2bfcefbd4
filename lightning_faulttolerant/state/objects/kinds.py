"""What kind of value an attribute holds: one that never changes, one to look into, or one to leave alone."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import pathlib
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

LIVE = "a live object"
"""Stands for what only this process can have: a lock, an open file, a progress bar. It is no state."""

_LEAVES = frozenset({type(None), type(...), bool, int, float, complex, str, bytes, range, slice, datetime.date,
                     datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
                     fractions.Fraction, uuid.UUID, torch.dtype, torch.device, torch.Size})  # fmt: skip
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodWrapperType)
_CONTAINERS = (list, dict, set, deque)
_EXACT_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
# The root packages of objects that stand for something outside of Python, or that hold the whole program.
_LIVE_ROOTS = frozenset({
    "_io", "_pytest", "_thread", "_weakref", "argparse", "asyncio", "builtins", "concurrent", "contextlib",
    "contextvars", "ctypes", "fsspec", "hypothesis", "io", "lightning", "lightning_fabric",
    "lightning_utilities", "litdata", "logging", "matplotlib", "mlflow", "mmap", "multiprocessing", "neptune",
    "pluggy", "pytest", "pytorch_lightning", "queue", "re", "rich", "select", "shelve", "signal", "socket",
    "sqlite3", "streaming", "subprocess", "tempfile", "tensorboard", "tensorboardX", "threading", "tqdm",
    "wandb", "weakref", "zipfile"})  # fmt: skip
# They keep data, in memory that only they can read.
_DATA_ROOTS = frozenset({"PIL", "datasets", "jax", "numpy", "pandas", "polars", "pyarrow"})
_OWN = "lightning_faulttolerant."
_TORCH_WALKED = ("torch.nn.", "torch.optim.", "torch.utils.data.dataset", "torch.utils.data.sampler",
                 "torch.utils.data.distributed", "torch.quasirandom", "torch.distributions.")  # fmt: skip


def is_leaf(value: Any) -> bool:
    """Return whether `value` can't change and refers to nothing that can."""
    return type(value) in _LEAVES or isinstance(value, (enum.Enum, pathlib.PurePath)) or is_numpy(value, "generic")


def is_leaf_type(kind: type) -> bool:
    """Return whether all instances of `kind` are leaves."""
    return kind in _LEAVES


def is_named(value: Any) -> bool:
    """Return whether `value` is a part of the program: a class, a function, a module."""
    return isinstance(value, _NAMED)


def contents_of_cell(cell: types.CellType) -> list[Any]:
    """Return what a variable of a closure holds, in a list; an empty one if it is not bound."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def is_shared_value(value: Any) -> bool:
    """Return whether `value` is a number, or an array of numbers, that processes share (``multiprocessing.Value``)."""
    is_simple = type(value).__module__ == "ctypes" and hasattr(value, "value")
    return is_simple or isinstance(value, ctypes.Array) or hasattr(type(value), "get_obj")


def memory_of(value: Any) -> memoryview:
    """Return the memory of what `is_shared_value` says is shared."""
    return memoryview(value.get_obj() if hasattr(value, "get_obj") else value).cast("B")


def is_shared(value: Any) -> bool:
    """Return whether other processes see what is written into `value`."""
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and value.device.type == "cpu"
        return is_dense and bool(value.is_shared())  # type: ignore[no-untyped-call]
    return is_shared_value(value)


def is_numpy(value: Any, kind: str) -> bool:
    """Return whether `value` is an instance of this class of NumPy's, which need not be there."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def is_array(value: Any) -> bool:
    """Return whether `value` is a NumPy array of numbers or texts, rather than of objects."""
    return is_numpy(value, "ndarray") and not value.dtype.hasobject


def is_container(value: Any) -> bool:
    """Return whether `value` is a list, dict, set, or deque, or one of the user's classes of these."""
    return isinstance(value, _CONTAINERS)


def is_plain_container(value: Any) -> bool:
    """Return whether `value` is a container of Python's own, which has no attributes."""
    return type(value) in _EXACT_CONTAINERS


def num_items(value: Any) -> int:
    """Return how many items a container, an array, or a tensor has; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if is_numpy(value, "ndarray"):
        return int(value.size)
    return len(value) if is_container(value) else 0


def is_generator(value: Any) -> bool:
    """Return whether `value` is what a generator function of Python returns."""
    return isinstance(value, types.GeneratorType)


def is_loader_iterator(value: Any) -> bool:
    """Return whether `value` is an iterator of a torch ``DataLoader``."""
    return type(value).__module__ == "torch.utils.data.dataloader" and hasattr(value, "__next__")


def is_iterator(value: Any) -> bool:
    """Return whether `value` is an iterator of Python's own, such as that of a list, or of itertools."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__")


def is_optimizer(value: Any) -> bool:
    """Return whether `value` is an optimizer of torch's kind: its tensors are carried by parameter, in place."""
    return isinstance(value, torch.optim.Optimizer)


def is_walked(value: Any) -> bool:
    """Return whether `value` is an instance whose attributes are its state."""
    kind = type(value)
    module = kind.__module__ or ""
    if isinstance(value, Namespace):
        return True
    if module.startswith(_OWN):
        return False
    if module == "torch" or module.startswith("torch."):
        return module.startswith(_TORCH_WALKED)
    root = module.partition(".")[0]
    if root in _LIVE_ROOTS or root in _DATA_ROOTS:
        # `builtins` is also what a class of a notebook's or an extension's may say; those with attributes are walked.
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__[:-1])


def holds_data(value: Any) -> bool:
    """Return whether `value` keeps data that nobody else can read: a table, an image."""
    return (type(value).__module__ or "").partition(".")[0] in _DATA_ROOTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """Names of something that is not looked into otherwise: the globals of a module, the attributes of a class.

    Args:
        owner: What has them.
        names: Only these; ``None`` for all but private ones of Python's own.
    """

    owner: Any
    names: tuple[str, ...] | None = None

    def attributes(self) -> dict[str, Any]:
        """Return the values that count as state: no functions, classes, modules, or descriptors."""
        if self.names is not None:
            return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}
        found = list(vars(self.owner).items())
        return {name: value for name, value in found if not name.startswith("__") and not _is_code(value)}


def _is_code(value: Any) -> bool:
    return is_named(value) or hasattr(type(value), "__get__") or type(value).__module__ in ("typing", "abc", "_abc")


def attributes(value: Any) -> dict[str, Any]:
    """Return what `value` holds in its own attributes, in slots too; no property is evaluated."""
    if isinstance(value, Namespace):
        return value.attributes()
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # an empty slot
            found[name] = slot.__get__(value)
    return found


def dict_of(value: Any) -> Mapping[str, Any]:
    """Return the ``__dict__`` of `value`, or of what it has the names of, as it is."""
    found: Mapping[str, Any] = vars(value.owner) if isinstance(value, Namespace) else value.__dict__
    return found


@functools.lru_cache(maxsize=4_096)
def has_slots(kind: type) -> bool:
    """Return whether objects of this class hold something outside of a ``__dict__``."""
    return kind is not Namespace and (bool(slots_of(kind)) or not kind.__dictoffset__)


@functools.lru_cache(maxsize=4_096)
def slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the slots of a class and its bases, by name."""
    bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple((n, s) for base in bases for n, s in base.items() if isinstance(s, types.MemberDescriptorType))


def has_state_methods(value: Any) -> bool:
    """Return whether `value` has ``state_dict`` and ``load_state_dict`` itself, with the arguments of torch's protocol.

    No ``__getattr__`` of a user's is called.
    """
    names = ("state_dict", "load_state_dict")
    if not all(callable(inspect.getattr_static(value, name, None)) for name in names):
        return False
    return follow_protocol(*(getattr(value, name) for name in names))


def follow_protocol(state_dict: Any, load_state_dict: Any) -> bool:
    """Return whether two methods have the arguments that torch's protocol gives them."""
    return not _num_required(state_dict) and _num_required(load_state_dict) == 1


def _num_required(method: Any) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(p.default is p.empty and (p.kind in kinds or p.kind is p.KEYWORD_ONLY) for p in parameters)
