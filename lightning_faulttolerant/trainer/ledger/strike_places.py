"""Requests of a drill to a fit, so that its strikes can hit: autosaves at some places, and a place to wait at.

A strike needs an autosave to continue from, and short scripts and big models have none in time. A fast script would be
past the place of its strike before the drill sees it there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.records.ledger import HOLD_VARIABLE, SAVE_VARIABLE, BatchPlace, places_in
from lightning_faulttolerant.trainer.compat import num_completed
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import BOUNDARY, position_of
from lightning_faulttolerant.trainer.session import Session

# A drill strikes within a few milliseconds. If the drill is gone, the training must still finish.
_HOLD_SECONDS, _LOOK_EVERY_SECONDS = 30.0, 0.002


class StrikePlaces:
    """Saves and waits where a drill requests it.

    Args:
        trainer: The trainer of the fit.
        session: The session of the fit.
        number: The number of the fit in its script, from 1.

    Raises:
        ValueError: If the environment's request is not in the format of `places_in`.
    """

    def __init__(self, trainer: Trainer, session: Session, number: int) -> None:
        self._trainer = trainer
        self._session = session
        self._number = number
        self._saves = _read(SAVE_VARIABLE)
        self._holds = _read(HOLD_VARIABLE) if trainer.is_global_zero else []

    def take_seams(self, patches: Patches) -> None:
        """Begin to watch for the places."""
        if self._saves or self._holds:
            patches.wrap(self._trainer.fit_loop.epoch_loop, "advance", self._wrap_advance)

    def _wrap_advance(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def advance(*args: Any, **kwargs: Any) -> Any:
            place = (self._number, self._trainer.current_epoch, num_completed(self._trainer))
            autosaver = self._session.autosaver
            if autosaver is not None and not autosaver.pace.is_first:
                if place in self._saves:
                    autosaver.save_unless_saved(position_of(self._trainer, BOUNDARY))
                if place in self._holds:
                    self._wait()
            return original(*args, **kwargs)

        return advance

    def _wait(self) -> None:
        """Wait until this process is killed or told to stop."""
        until = time.monotonic() + _HOLD_SECONDS
        while self._session.stopping.signals.requested is None and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_SECONDS)


def _read(name: str) -> list[BatchPlace]:
    text = os.environ.get(name)
    return places_in(name, text) if text else []
