"""What serves a Trainer: `served`, or its twin for those of ``pytorch_lightning``, loaded when one is first met."""

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


def served(trainer: Any) -> Any:
    """Return what serves a Trainer of its package.

    Raises:
        UnsupportedTrainerError: If it is a Trainer of neither package.
    """
    package = _package_with("Trainer", trainer)
    if package is None:
        raise UnsupportedTrainerError(
            "FaultTolerance serves the Trainers of lightning.pytorch and of pytorch_lightning, and this is a"
            f" {type(trainer).__module__}.{type(trainer).__name__}. Nothing would be saved. Leave the callback out."
        )
    return _served(package)


def served_of_any() -> Any:
    """Return what serves Trainers of the package that is loaded; of ``lightning.pytorch`` if both are, or none is."""
    return _served(next((package for package in PACKAGES if package in sys.modules), PACKAGES[0]))


def _served(package: str) -> Any:
    version = getattr(sys.modules.get(package), "__version__", "")
    if version and tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST:
        raise UnsupportedTrainerError(
            f"FaultTolerance serves {package} from version {'.'.join(map(str, _OLDEST))} on, and this is {version}."
            f" Install a newer one: pip install -U {'lightning' if package == PACKAGES[0] else 'pytorch-lightning'}"
        )
    return importlib.import_module(f"{_OURS[package]}.served")


def _package_with(name: str, value: object) -> str | None:
    for package in PACKAGES:
        kind = getattr(sys.modules.get(package), name, None)
        if kind is not None and isinstance(value, kind):
            return package
    return None
