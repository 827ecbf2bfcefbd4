"""The module that serves a Trainer: `served`, or its twin for ``pytorch_lightning``. It is loaded on first use."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.trainer.bases import PACKAGES

_OURS = dict(zip(PACKAGES, ("lightning_faulttolerant.trainer", "lightning_faulttolerant.twin"), strict=True))
_OLDEST = (2, 5, 6)


def is_module(value: object) -> bool:
    """Return whether `value` is a ``LightningModule`` of either package."""
    return _package_with("LightningModule", value) is not None


def served(trainer: object) -> Any:
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


def served_of_any() -> Any:
    """Return the module that serves the loaded package, or ``lightning.pytorch`` if both or neither are loaded."""
    return _served(next((package for package in PACKAGES if package in sys.modules), PACKAGES[0]))


def _served(package: str) -> object:
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
