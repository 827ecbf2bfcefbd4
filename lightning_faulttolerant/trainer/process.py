"""The data that this process keeps for all its fits, whichever package their Trainers come from.

Its environment switches the callback on (``PL_FAULT_TOLERANT_TRAINING``) and says which autosaves are trusted
(``PL_FAULT_TOLERANT_TRUST``). A fit inside a hook of another fit is a part of that fit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_faulttolerant.trainer.run.directory import Script

Registered = tuple[Callable[[], object], Callable[[object], object]]
"""The functions that return a state, and that restore it."""

OBJECTS, SETTINGS = "objects", "settings"
"""The parts of the state with the user's own objects, and with the settings of the process."""

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


def next_number(script: Script) -> int:
    """Return the number of a fit or an evaluation. A process that Lightning creates for it uses its script's count."""
    num_fits[os.getpid()] = num_fits.get(os.getpid(), 0) + 1
    return current_number(script)


def current_number(script: Script) -> int:
    """Return the number of the fit or evaluation that began last in this process.

    Args:
        script: The process that created the callback.
    """
    number = num_fits.get(os.getpid(), 0)
    return max(number, script.num_begun()) if script.is_elsewhere else number


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


# The thread of each trainer's fit.
_threads_of_fits: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def begin_fit(trainer: object) -> None:
    """Note that a fit of `trainer` begins in this thread."""
    _threads_of_fits[trainer] = threading.get_ident()


def is_fit_in_progress(trainer: Any) -> bool:
    """Return whether a fit of `trainer` is in progress in this thread. One that an exception has ended is not."""
    is_running = trainer.state.fn is not None and trainer.state.status == "running"
    return is_running and _threads_of_fits.get(trainer) == threading.get_ident()


def is_nested_fit(trainer: object) -> bool:
    """Return whether a fit of another trainer is in progress, and this one runs in one of its hooks."""
    return any(other is not trainer and is_fit_in_progress(other) for other in list(_threads_of_fits))
