"""Why a value can't be carried through a checkpoint."""

from __future__ import annotations

from typing import Any

from lightning_faulttolerant.state.blobs import is_packed
from lightning_faulttolerant.state.objects import kinds


class CantCarryError(Exception):
    """A value can't be carried through a checkpoint."""


class LiveError(CantCarryError):
    """A value stands for a resource outside of Python, which is not state: an open file, a lock, a progress bar."""


class SavedError(LiveError):
    """A value is, or holds, a saved state: the next state would hold it together with those before it."""


class OpaqueError(CantCarryError):
    """A value is an object that only its library can read: it may be a handle of that library."""


class TooLargeError(CantCarryError):
    """A value is larger than the remaining room."""


def check_not_saved(value: dict[Any, Any]) -> None:
    """Raise if a dict is a state from this package."""
    if is_packed(value):
        raise SavedError("a state that was saved")


def why_not(value: Any) -> CantCarryError:
    """Return why an unreadable value can't be carried."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if kinds.is_generator(value) or kinds.is_iterator(value) or kinds.is_loader_iterator(value):
        return CantCarryError(f"an iterator ({name}), which can't be copied")
    if kinds.holds_data(value) or kinds.is_hash(value):
        return CantCarryError(f"a {name}, which only its library can read")
    return LiveError(f"a {name}") if kinds.is_live(value) else OpaqueError(f"a {name}, which only its library can read")
