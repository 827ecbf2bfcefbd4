"""The data that this process keeps for all its fits, whichever package their Trainers come from."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable

Registered = tuple[Callable[[], object], Callable[[object], object]]
"""The functions that return a state, and that restore it."""

OBJECTS = "objects"
"""The part of the state that holds the user's own objects."""

IMPORTED_AT = time.time()
"""When the callback was imported, seconds since 1970."""

num_fits: dict[int, int] = {}
"""The number of fits, by process: a forked process begins again."""

continued: dict[str, str] = {}
"""The directory that a run continues in, by the directory that it would have."""

has_told: set[str] = set()
"""The messages that have been printed: each is printed once."""

left_out: dict[int, weakref.ref[object]] = {}
"""Callbacks that are not part of a run, by their IDs: a user's callback may have no hash."""


def leave_out(callbacks: Iterable[object]) -> None:
    """Leave the state of these callbacks out of a run: they count what happens in one process."""
    left_out.update((id(callback), weakref.ref(callback)) for callback in callbacks)


def is_left_out(callback: object) -> bool:
    """Return whether a callback is left out of a run."""
    known = left_out.get(id(callback))
    return known is not None and known() is callback
