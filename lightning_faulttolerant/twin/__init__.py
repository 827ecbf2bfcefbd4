"""A second copy of `lightning_faulttolerant.trainer` from the same files, for Trainers of ``pytorch_lightning``.

The two packages are one source under two names, so code that replaces methods of one's loops must be built with that
one's classes. Two kinds of modules are shared: those that keep something for the whole process, and those with objects
that both Trainers get.

A translation replaces whole names while a module is loaded, so each line stays where it is: tracebacks and
``inspect.getsource`` show the source file. The compiled code is cached next to the original's, under its own name.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class Translation:
    """Replaces dotted names in source code.

    Args:
        names: The names and their replacements, such as ``{"lightning.pytorch": "pytorch_lightning"}``. Anything after
            another dot stays: ``lightning.pytorch.loggers`` becomes ``pytorch_lightning.loggers``.

    Example:
        >>> Translation({"lightning.pytorch": "pytorch_lightning"}).translated("import lightning.pytorch as pl")
        'import pytorch_lightning as pl'
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?!\w)")

    def translated(self, source: str) -> str:
        """Return `source` with each name replaced."""
        return self._pattern.sub(lambda found: self._names[found[0]], source)


class TwinFinder(MetaPathFinder):
    """Finds the modules of a translated package. It is added to ``sys.meta_path``.

    Args:
        package: The name of the copy.
        directory: The directory with the source of the original.
        translation: The translation to apply.
    """

    def __init__(self, package: str, directory: str, translation: Translation) -> None:
        self._prefix = f"{package}."
        self._directory = directory
        self._translation = translation

    def install(self) -> None:
        """Register this finder with Python, unless one for the same package is registered."""
        if not any(isinstance(other, TwinFinder) and other._prefix == self._prefix for other in sys.meta_path):
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec for loading a module of the copy, or ``None`` for any other module."""
        if not fullname.startswith(self._prefix):
            return None
        parents = fullname.removeprefix(self._prefix).split(".")[:-1]
        spec = PathFinder.find_spec(fullname, [os.path.join(self._directory, *parents)])
        if spec is None or spec.origin is None:
            return None
        spec.loader = _TwinLoader(fullname, spec.origin, self._translation)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # no other finder may find the original there
        return spec


class _TwinLoader(SourceFileLoader):
    """Loads a translated module from the source file of the original."""

    def __init__(self, fullname: str, path: str, translation: Translation) -> None:
        super().__init__(fullname, path)
        self._translation = translation

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            return super().get_data(_cache_of_twin(path))
        return self._translation.translated(super().get_data(path).decode()).encode()

    def set_data(self, path: str, data: Any, **options: Any) -> None:
        super().set_data(_cache_of_twin(path), data, **options)


def _cache_of_twin(path: str) -> str:
    """Return the path of the copy's cached compiled code."""
    name, dot, rest = os.path.basename(path).partition(".")
    return os.path.join(os.path.dirname(path), f"{name}-twin{dot}{rest}")


_PARENT = __name__.rpartition(".")[0]
_ORIGINAL = f"{_PARENT}.trainer"

# None of these imports Lightning at import time.
SHARED = (
    "bases",
    "callback",
    "save.checkpoint_io",
    "run.history_file",
    "settings",
    "process",
    "recorder",
    "resume.report",
    "run.directory",
    "identity.starts",
    "signals",
    "switch",
)

TRANSLATION = Translation(
    {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _ORIGINAL: __name__}
)

TwinFinder(__name__, os.path.join(os.path.dirname(os.path.dirname(__file__)), "trainer"), TRANSLATION).install()
sys.modules.update({f"{__name__}.{name}": importlib.import_module(f"{_ORIGINAL}.{name}") for name in SHARED})
