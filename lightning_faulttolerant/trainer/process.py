"""What this process keeps of all its fits, whichever package their Trainers come from."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

Registered = tuple[Callable[[], Any], Callable[[Any], object]]
"""The functions that return a state, and that restore it."""

OBJECTS = "objects"
"""The part of the state in which the user's own objects are."""

IMPORTED_AT = time.time()
"""When the callback was imported, seconds since 1970."""

num_fits: dict[int, int] = {}
"""How many fits there were, by process: one that is forked begins again."""

continued: dict[str, str] = {}
"""By the directory that a run would have, the one that it continues in."""

has_told: set[str] = set()
"""What is said once."""

left_out: dict[int, weakref.ref[Any]] = {}
"""Callbacks that are no part of a run, by their ids: those of users may have no hash."""


def leave_out(callbacks: Iterable[Any]) -> None:
    """Let what these keep be no part of a run: they count what happens in one process."""
    left_out.update((id(callback), weakref.ref(callback)) for callback in callbacks)


def is_left_out(callback: Any) -> bool:
    """Return whether a callback is no part of a run."""
    known = left_out.get(id(callback))
    return known is not None and known() is callback
