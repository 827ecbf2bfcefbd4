"""The environment variables ``PL_FAULT_TOLERANT_TRAINING`` and ``PL_FAULT_TOLERANT_TRUST``."""

from __future__ import annotations

import os

VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
TRUST_VARIABLE = "PL_FAULT_TOLERANT_TRUST"
_ON = ("1", "automatic")
_OFF = ("0",)
_MANUAL = "manual"


def is_switched_off() -> bool:
    """Return whether the environment switches the callback off, even if the user added it."""
    return read_switch() == "off"


def is_manual() -> bool:
    """Return whether the user's own objects keep the positions of loaders."""
    return read_switch() == _MANUAL


def read_switch() -> str:
    """Return what the environment requests: ``on``, ``manual``, ``off``, or ``unset``.

    Raises:
        ValueError: If the variable has an unknown value.
    """
    value = os.environ.get(VARIABLE)
    if value is None or value == "":
        return "unset"
    if value.lower() in _ON:
        return "on"
    if value in _OFF:
        return "off"
    if value.lower() == _MANUAL:
        return _MANUAL
    raise ValueError(f"{VARIABLE} must be 1 or automatic (on), manual, 0 (off), or unset; got {value!r}.")


def read_trust() -> bool | None:
    """Return whether the environment says that autosaves are trusted; ``None`` if it is unset.

    Raises:
        ValueError: If the variable has an unknown value.
    """
    value = os.environ.get(TRUST_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{TRUST_VARIABLE} must be 1 (trusted), 0 (never trusted), or unset; got {value!r}.")
    return None if value == "" else value == "1"
