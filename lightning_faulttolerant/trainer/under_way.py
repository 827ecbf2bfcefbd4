"""Which fits are under way in this process: one inside a hook of another is a part of that one."""

from __future__ import annotations

import threading
import weakref

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

# By trainer, the thread of its fit.
_threads: weakref.WeakKeyDictionary[Trainer, int] = weakref.WeakKeyDictionary()


def begin(trainer: Trainer) -> None:
    """Note that a fit of `trainer` begins in this thread."""
    _threads[trainer] = threading.get_ident()


def is_under_way(trainer: Trainer) -> bool:
    """Return whether a fit of `trainer` is under way in this thread; one that an exception has ended is not."""
    is_fitting = trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING
    return is_fitting and _threads.get(trainer) == threading.get_ident()


def is_inside_another(trainer: Trainer) -> bool:
    """Return whether a fit of another trainer is under way, in one of whose hooks this one runs."""
    return any(other is not trainer and is_under_way(other) for other in list(_threads))
