"""Packages that are needed only by data sets that use them."""

from __future__ import annotations

import importlib
from types import ModuleType

_DISTRIBUTIONS = {"PIL": "pillow", "PIL.Image": "pillow", "snappy": "python-snappy"}


def extra(module: str, *, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Its name in an import.
        purpose: Its purpose here, as the end of a sentence: "to read images".

    Raises:
        ImportError: If it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _DISTRIBUTIONS.get(module, module)
        raise ImportError(
            f"{name} is needed {purpose} and can't be imported ({error}). "
            f"Run: pip install lightning-faulttolerant[streaming]"
        ) from error
