"""The accelerators of this process, by names that also hold in the process that resumes.

A rank's own device may have another number there: eight ranks on one machine have ``cuda:0`` to ``cuda:7``, but on two
machines twice ``cuda:0`` to ``cuda:3``. So the current device is just ``cuda``; only the others have a number.
"""

from __future__ import annotations

from typing import Any

import torch

_KINDS = ("cuda", "xpu")


def initialised() -> list[tuple[str, Any]]:
    """Return the kind and torch's module of every accelerator that is in use in this process."""
    # `is_initialized` is False in a forked data-loading worker, where a call into CUDA would fail.
    # It is checked first: `is_available` may call the driver.
    modules = [(kind, getattr(torch, kind, None)) for kind in _KINDS]
    return [(kind, m) for kind, m in modules if m is not None and m.is_initialized() and m.is_available()]


def is_device(name: str) -> bool:
    """Return whether `name` is the name of an accelerator's device."""
    return name.partition(":")[0] in _KINDS


def name_of(kind: str, index: int) -> str:
    """Return the name of a device."""
    return kind if _is_current(getattr(torch, kind), index) else f"{kind}:{index}"


def is_here(name: str) -> bool:
    """Return whether this process has a device of this name."""
    kind, _, index = name.partition(":")
    module = getattr(torch, kind, None)
    if kind not in _KINDS or module is None or not module.is_available():
        return False
    if not index:
        return bool(module.device_count())
    return int(index) < module.device_count() and not _is_current(module, int(index))


def _is_current(module: Any, index: int) -> bool:
    return bool(module.is_initialized()) and index == module.current_device()
