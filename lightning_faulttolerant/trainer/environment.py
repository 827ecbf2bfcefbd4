"""The environment variable ``PL_FAULT_TOLERANT_TRAINING``: what it asks for."""

from __future__ import annotations

import os

VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_ON = ("1", "automatic")
_OFF = ("0",)


def is_switched_off() -> bool:
    """Return whether the environment switches the callback off also where it was added."""
    return read_switch() == "off"


def read_switch() -> str:
    """Return what the environment asks for: ``on``, ``off`` or ``unset``.

    Raises:
        ValueError: If the variable has a value that means nothing.
    """
    value = os.environ.get(VARIABLE)
    if value is None or value == "":
        return "unset"
    if value.lower() in _ON:
        return "on"
    if value in _OFF:
        return "off"
    if value.lower() == "manual":
        raise ValueError(f"{VARIABLE}=manual is not available yet. Use 1 (or automatic), or 0, or unset it.")
    raise ValueError(f"{VARIABLE} must be 1 or automatic (on), 0 (off) or unset, got {value!r}.")
