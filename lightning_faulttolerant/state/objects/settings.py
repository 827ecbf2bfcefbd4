"""Settings of the whole process that training may change: those of torch, NumPy, and Python, and the environment.

Only variables of the environment that the user's code names are read and set: libraries keep ports and addresses there,
and other people may have written a checkpoint.
"""

from __future__ import annotations

import contextlib
import decimal
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch

from lightning_faulttolerant.state.objects.graph import of_namespace
from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.reachable import is_users_function

_Setting: TypeAlias = tuple[Callable[[], object], Callable[[Any], object]]


def _attribute(owner: Callable[[], object], name: str) -> _Setting:
    return lambda: getattr(owner(), name), lambda value: setattr(owner(), name, value)


def _variable(name: str) -> _Setting:
    def put(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return lambda: os.environ.get(name), put


_SETTINGS: dict[str, _Setting] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_deterministic_debug_mode()": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.benchmark": _attribute(lambda: torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _attribute(lambda: torch.backends.cudnn, "deterministic"),
    "numpy.geterr()": (
        lambda: json.dumps(sys.modules["numpy"].geterr()),  # it need not be installed
        lambda value: sys.modules["numpy"].seterr(**json.loads(value)),
    ),
    "decimal.getcontext().prec": _attribute(decimal.getcontext, "prec"),
    "decimal.getcontext().rounding": _attribute(decimal.getcontext, "rounding"),
}

# Of launchers and of this package, or what programs are found by: they belong to the process.
_NOT_STATE = ("CUDA", "GROUP_", "LD_", "LOCAL_", "MASTER_", "NODE_RANK=", "OMPI_", "PATH=", "PL_", "PMI", "PYTHON",
              "RANK=", "ROLE_", "SLURM", "TORCHELASTIC", "WORLD_SIZE=")  # fmt: skip


@final
class Settings:
    """All settings, as attributes.

    Args:
        namespaces: The user's modules and classes, by path.
    """

    __slots__ = ("_settings",)

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        variables = {f"os.environ[{name!r}]": _variable(name) for name in _variables_in(namespaces)}
        object.__setattr__(self, "_settings", {**_SETTINGS, **variables})

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]  # the settings are elsewhere
        found: dict[str, object] = {}
        for name, (read, _) in self._settings.items():  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):  # torch refuses to read some if they contradict each other
                found[name] = read()
        return found

    def __setattr__(self, name: str, value: object) -> None:
        self._settings[name][1](value)  # type: ignore[attr-defined]


def _variables_in(namespaces: Mapping[str, Namespace]) -> list[str]:
    """Return the variables of the environment that the user's code may name."""
    found = [one for path, namespace in namespaces.items() for _, one in of_namespace(path, namespace)]
    codes = [one.__code__ for one in found if isinstance(one, types.FunctionType) and is_users_function(one)]
    names = set[object]()
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        if "environ" in code.co_names:  # the names of arguments are in a tuple
            names.update(*(one if isinstance(one, tuple) else (one,) for one in code.co_consts))
    texts = {name for name in names if isinstance(name, str) and name.isidentifier()}
    return sorted(name for name in texts if not f"{name}=".startswith(_NOT_STATE))
