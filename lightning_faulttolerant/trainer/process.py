"""The data that this process keeps for all its fits, whichever package their Trainers come from."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

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


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let Python not look for garbage in the block, and count its objects as old: modules, classes, states.

    If they counted as new, Python would soon visit all objects of torch and Lightning. That takes 0.3 s, longer than
    everything else in a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled and not _has_frozen_objects():  # else the user has frozen them, and these stay frozen
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


_found_frozen = False


def _has_frozen_objects() -> bool:
    """Return whether there are frozen objects, or were at an earlier call: to count a million takes 0.1 s."""
    global _found_frozen
    _found_frozen = _found_frozen or gc.get_freeze_count() > 0
    return _found_frozen
