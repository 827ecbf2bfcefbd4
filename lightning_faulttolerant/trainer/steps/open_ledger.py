"""The part of a ledger that belongs to one fit or evaluation: opened when it is set up, closed when it is over.

A drill asks for more through the environment: an exception at some place, autosaves, and a place to wait at. A strike
needs an autosave to continue from, and short scripts and big models have none in time. A fast script would be past the
place of its strike before the drill sees it there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import DrillFault, LedgerError
from lightning_faulttolerant.records.ledger import (
    FAULT_VARIABLE,
    HOLD_VARIABLE,
    LEDGER_VARIABLE,
    SAVE_VARIABLE,
    BatchPlace,
    FaultPlace,
    path_of_rank,
    places_in,
)
from lightning_faulttolerant.records.lines import LineFile
from lightning_faulttolerant.records.requests import replay_requested
from lightning_faulttolerant.trainer.any_session import AnySession
from lightning_faulttolerant.trainer.compat import BEFORE_FETCH, is_nobodys_training, signal_connector
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import FIT, function_of, loop_of, num_evaluated, stage_of
from lightning_faulttolerant.trainer.process import is_nested_fit, next_number
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.steps.compat import logger_connector
from lightning_faulttolerant.trainer.steps.ledger import FitLedger, is_evaluating, training_place


class OpenLedger:
    """The ledger of one fit or evaluation, if one is requested, and the fault that a drill requests in it.

    Args:
        trainer: The trainer that runs it.
        options: The options of the callback.
        session: Its session; ``None`` if the environment has switched it off.

    Raises:
        LedgerError: If the file can't be written.
        ValueError: If the environment requests a ledger or a fault, but names no valid file or place.
    """

    def __init__(self, trainer: Trainer, options: Options, session: AnySession | None) -> None:
        self._trainer = trainer
        number = next_number(options.script)
        fault = read_fault()
        self._patches = Patches()
        self._begin: list[Callable[[], None]] = []
        self._ledger: FitLedger | None = None
        path = options.ledger if (request := replay_requested()) is None else request.ledger
        if path is not None:
            file = _opened(path_of_rank(path, trainer.global_rank))
            self._ledger = FitLedger(trainer, file, number=number, session=session, patches=self._patches)
            self._begin.append(self._ledger.take_seams)
        if fault is not None and fault.batch[0] == number:
            self._begin.append(partial(Fault(trainer, fault).take_seams, self._patches))
        if session is not None and path is not None:
            self._begin.append(partial(StrikePlaces(trainer, session, number).take_seams, self._patches))
        if self._begin:
            self._patches.around(signal_connector(trainer), "register_signal_handlers", self._around_begin)

    def _around_begin(self, original: Method) -> None:
        original()
        # The real work begins here: what a finder has trained before, in on_fit_start, does not count.
        while self._begin:
            self._begin.pop(0)()

    def is_of(self, trainer: Trainer) -> bool:
        """Return whether this is the ledger of a fit or an evaluation of `trainer`."""
        return self._trainer is trainer

    @contextlib.contextmanager
    def ended(self, *, finished: bool) -> Iterator[None]:
        """Close the ledger after the block, which ends the fit or the evaluation.

        Args:
            finished: Whether it has finished.
        """
        self._patches.undo()  # they are on top of the session's
        try:
            yield
            if finished and self._ledger is not None:
                self._ledger.end()
        finally:
            self.close()

    def close(self) -> None:
        """Remove the patches and close the file. May be called twice."""
        self._patches.undo()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def begins_while_off(trainer: Trainer) -> bool:
    """Return whether a ledger is to be written although the environment switches fault tolerance off."""
    return not (is_nobodys_training(trainer) or is_nested_fit(trainer))


def _opened(path: str) -> LineFile:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return LineFile(path)
    except OSError as error:
        raise LedgerError(
            f"The ledger can't be written to {path}: {error}. Nothing could be compared. Set {LEDGER_VARIABLE} to "
            "a writable path."
        ) from error


# How often torchrun has restarted the ranks, as its documentation says.
_RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def read_fault() -> FaultPlace | None:
    """Return the place at which the environment requests a fault, if it does.

    Raises:
        ValueError: If it does not name a place.
    """
    text = os.environ.get(FAULT_VARIABLE)
    if not text:
        return None
    places = [FaultPlace.parse(place) for place in text.split(",")]
    num_restarts = int(os.environ.get(_RESTARTS_VARIABLE, "0"))
    return places[num_restarts] if num_restarts < len(places) else None


class Fault:
    """Raises an exception in a fit or an evaluation. It does so once per process: no other one has the number.

    Args:
        trainer: The trainer that runs it.
        place: The place of the fault.
    """

    def __init__(self, trainer: Trainer, place: FaultPlace) -> None:
        self._trainer = trainer
        self._place = place

    def take_seams(self, patches: Patches) -> None:
        """Begin to watch for the place."""
        trainer, hook = self._trainer, self._place.hook
        epoch_loop = trainer.fit_loop.epoch_loop
        if self._place.is_in_evaluation:
            patches.around(trainer.strategy, f"{stage_of(trainer)}_step", self._around_before)
        elif hook == "start":
            patches.around(epoch_loop.automatic_optimization, "run", self._around_before)
            patches.around(epoch_loop.manual_optimization, "run", self._around_before)
        elif hook == "step":
            patches.around(trainer.strategy, "backward", self._around_after)
        else:
            patches.around(logger_connector(trainer), "on_batch_end", self._around_after)

    def _around_before(self, original: Method, *args: object, **kwargs: object) -> object:
        self._strike()
        return original(*args, **kwargs)

    def _around_after(self, original: Method, *args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        self._strike()
        return result

    def _strike(self) -> None:
        place: tuple[int, ...] = tuple(training_place(self._trainer).values())
        if self._place.is_in_evaluation:
            place = (*place, num_evaluated(self._trainer) - 1)
        elif not self._trainer.training:
            return
        if place == self._place.batch[1:] and not self._trainer.sanity_checking:
            raise DrillFault(
                f"A drill requested this exception with {FAULT_VARIABLE}={self._place}. The script is fine. Run it "
                "without the variable to continue."
            )


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

    def _wrap_advance(self, original: Callable[..., object]) -> Callable[..., object]:
        def advance(*args: object, **kwargs: object) -> object:
            self._pass(self._session.save_before_batch)
            return original(*args, **kwargs)

        return advance

    def _wrap_before_fetch(self, original: Callable[..., object]) -> Callable[..., object]:
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
