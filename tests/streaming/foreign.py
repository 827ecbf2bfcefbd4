"""The original library, MosaicML Streaming, as an oracle: we read what it writes, and it reads what we write.

It imports torchvision and transformers. The tests do not need them, and they are heavy or have no build for the CPU.
Empty stand-ins replace them during the import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_ABSENT = ("torchvision", "transformers")


class _StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module of the missing packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _StandIns()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


def mosaic(module: str = "streaming") -> Any:
    """Return a module of the original library by its name (``streaming.base.shuffle``)."""
    if module not in sys.modules:
        with _stand_ins(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("streaming")
            importlib.import_module(module)
    return sys.modules[module]
