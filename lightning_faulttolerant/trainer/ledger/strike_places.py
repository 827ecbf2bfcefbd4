"""Requests of a drill, so that its strikes can hit: autosaves at some places, and a place to wait at.

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
from lightning_faulttolerant.trainer.any_session import AnySession
from lightning_faulttolerant.trainer.compat import BEFORE_FETCH
from lightning_faulttolerant.trainer.evaluation.compat import num_evaluated
from lightning_faulttolerant.trainer.functions import FIT, function_of, loop_of
from lightning_faulttolerant.trainer.ledger.evaluated_batches import is_evaluating, training_place
from lightning_faulttolerant.trainer.patches import Patches

# A drill strikes within a few milliseconds. If the drill is gone, the training must still finish.
_HOLD_SECONDS, _LOOK_EVERY_SECONDS = 30.0, 0.002


class StrikePlaces:
    """Saves and waits where a drill requests it.

    Args:
        trainer: The trainer that runs the fit or the evaluation.
        session: Its session.
        number: Its number in its script, from 1.

    Raises:
        ValueError: If the environment's request is not in the format of `places_in`.
    """

    def __init__(self, trainer: Trainer, session: AnySession, number: int) -> None:
        self._trainer = trainer
        self._session = session
        self._number = number
        self._saves = _read(SAVE_VARIABLE)
        self._holds = _read(HOLD_VARIABLE) if trainer.is_global_zero else []

    def take_seams(self, patches: Patches) -> None:
        """Begin to watch for the places."""
        if not any(place[0] == self._number for place in (*self._saves, *self._holds)):
            return
        if function_of(self._trainer) == FIT:
            patches.wrap(self._trainer.fit_loop.epoch_loop, "advance", self._wrap_advance)
        patches.wrap(loop_of(self._trainer), BEFORE_FETCH, self._wrap_before_fetch)

    def _wrap_advance(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def advance(*args: Any, **kwargs: Any) -> Any:
            self._pass(self._session.save_before_batch)
            return original(*args, **kwargs)

        return advance

    def _wrap_before_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def before_fetch() -> None:
            if is_evaluating(self._trainer):
                self._pass(self._session.save_before_evaluation_batch, num_evaluated(self._trainer))
            original()

        return before_fetch

    def _pass(self, save: Callable[[], None], *evaluated: int) -> None:
        """Save before this batch, and wait there, if that is requested."""
        place = (self._number, *training_place(self._trainer).values(), *evaluated)
        if place in self._saves:
            save()
        if place in self._holds:
            self._wait()

    def _wait(self) -> None:
        """Wait until this process is killed or told to stop."""
        until = time.monotonic() + _HOLD_SECONDS
        while self._session.stopping.signals.requested is None and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_SECONDS)


def _read(name: str) -> list[BatchPlace]:
    text = os.environ.get(name)
    return places_in(name, text) if text else []
