"""The fits in progress in this process. A fit inside a hook of another fit is a part of that fit."""

from __future__ import annotations

import threading
import weakref
from typing import Any

# The thread of each trainer's fit.
_threads: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def begin(trainer: object) -> None:
    """Note that a fit of `trainer` begins in this thread."""
    _threads[trainer] = threading.get_ident()


def is_under_way(trainer: Any) -> bool:
    """Return whether a fit of `trainer` is in progress in this thread. One that an exception has ended is not."""
    is_running = trainer.state.fn is not None and trainer.state.status == "running"
    return is_running and _threads.get(trainer) == threading.get_ident()


def is_inside_another(trainer: object) -> bool:
    """Return whether a fit of another trainer is in progress, and this one runs in one of its hooks."""
    return any(other is not trainer and is_under_way(other) for other in list(_threads))
