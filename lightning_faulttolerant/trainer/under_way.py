"""Which fits are under way in this process: one inside a hook of another is a part of that one."""

from __future__ import annotations

import threading
import weakref
from typing import Any

# By trainer, the thread of its fit.
_threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def begin(trainer: Any) -> None:
    """Note that a fit of `trainer` begins in this thread."""
    _threads[trainer] = threading.get_ident()


def is_under_way(trainer: Any) -> bool:
    """Return whether a fit of `trainer` is under way in this thread; one that an exception has ended is not."""
    is_fitting = trainer.state.fn == "fit" and trainer.state.status == "running"
    return is_fitting and _threads.get(trainer) == threading.get_ident()


def is_inside_another(trainer: Any) -> bool:
    """Return whether a fit of another trainer is under way, in one of whose hooks this one runs."""
    return any(other is not trainer and is_under_way(other) for other in list(_threads))
