"""Base classes for both packages of Lightning: their subclasses work in a Trainer of either.

A package's own class becomes a base as soon as the package is imported, before or after ours. We import neither
ourselves: that takes seconds. The module that serves a Trainer, `served` or its twin, is loaded on first use.
"""

from __future__ import annotations

import importlib
import re
import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_faulttolerant.errors import UnsupportedTrainerError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_PREFIXES = ("lightning.", "lightning_fabric.", "pytorch_lightning.")

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _LightningsIO
    from lightning.pytorch import Callback as _LightningsCallback
    from lightning_fabric.plugins import CheckpointIO as _OthersIO
    from pytorch_lightning import Callback as _OthersCallback

    class AnyCallback(_LightningsCallback, _OthersCallback):  # type: ignore[misc]  # each hook has its own Trainer
        """A callback for a Trainer of either package."""

    class AnyCheckpointIO(_LightningsIO, _OthersIO):
        """A ``CheckpointIO`` for a Trainer of either package."""

else:

    class _Python:
        """A class to derive from. If a class derives from ``object`` alone, its bases can't be changed."""

    class AnyCallback(_Python):
        """A callback for a Trainer of either package."""

    class AnyCheckpointIO(_Python, metaclass=ABCMeta):
        """A ``CheckpointIO`` for a Trainer of either package."""


# For each module of Lightning's, the class that it defines and our class that derives from it.
_BASES: dict[str, tuple[str, type]] = {
    "lightning.pytorch.callbacks.callback": ("Callback", AnyCallback),
    "pytorch_lightning.callbacks.callback": ("Callback", AnyCallback),
    "lightning.fabric.plugins.io.checkpoint_io": ("CheckpointIO", AnyCheckpointIO),
    "lightning_fabric.plugins.io.checkpoint_io": ("CheckpointIO", AnyCheckpointIO),
}


def names_of_hooks() -> set[str]:
    """Return the names of all attributes that a callback inherits from Lightning."""
    return {name for base in AnyCallback.__bases__ for name in dir(base)}


def is_empty_hook(function: object, name: str) -> bool:
    """Return whether `function` is the empty hook `name` that every callback inherits, in one of the packages."""
    return any(function is getattr(base, name, None) for base in AnyCallback.__bases__)


def is_lightnings(module: str | None) -> bool:
    """Return whether a module, given by name, belongs to one of Lightning's packages."""
    return (module or "").startswith(_PREFIXES)


def _derive(module: ModuleType) -> None:
    name, ours = _BASES[module.__name__]
    base = getattr(module, name, None)
    if base is not None and base not in ours.__bases__:
        ours.__bases__ = (*ours.__bases__, base)


class _Watch(MetaPathFinder):
    """Makes our classes derive from Lightning's as soon as the module that defines them is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _BASES:
            return None
        others = (
            finder.find_spec(fullname, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            _then_derive(spec.loader)
        return spec


def _then_derive(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _derive(module)

    loader.exec_module = exec_module


sys.meta_path.insert(0, _Watch())
for _name in _BASES:
    if _name in sys.modules:
        _derive(sys.modules[_name])


_OURS = dict(zip(PACKAGES, ("lightning_faulttolerant.trainer", "lightning_faulttolerant.twin"), strict=True))
_OLDEST = (2, 5, 6)


def is_module(value: object) -> bool:
    """Return whether `value` is a ``LightningModule`` of either package."""
    return _package_with("LightningModule", value) is not None


def served(trainer: object) -> ModuleType:
    """Return the module that serves a Trainer of its package.

    Raises:
        UnsupportedTrainerError: If `trainer` is a Trainer of neither package.
    """
    package = _package_with("Trainer", trainer)
    if package is None:
        raise UnsupportedTrainerError(
            "FaultTolerance supports the Trainers of lightning.pytorch and pytorch_lightning, but this is a "
            f"{type(trainer).__module__}.{type(trainer).__name__}. Nothing would be saved. Leave the callback out."
        )
    return _served(package)


def served_of_any() -> ModuleType:
    """Return the module that serves the loaded package, or ``lightning.pytorch`` if both or neither are loaded."""
    return _served(next((package for package in PACKAGES if package in sys.modules), PACKAGES[0]))


def _served(package: str) -> ModuleType:
    version = getattr(sys.modules.get(package), "__version__", "")
    if version and tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST:
        raise UnsupportedTrainerError(
            f"FaultTolerance needs {package} {'.'.join(map(str, _OLDEST))} or newer, but this is {version}. Install a "
            f"newer one: pip install -U {('lightning' if package == PACKAGES[0] else 'pytorch-lightning')}"
        )
    return importlib.import_module(f"{_OURS[package]}.served")


def _package_with(name: str, value: object) -> str | None:
    for package in PACKAGES:
        kind = getattr(sys.modules.get(package), name, None)
        if kind is not None and isinstance(value, kind):
            return package
    return None
