"""The part of a ledger that belongs to one fit or evaluation: opened when it is set up, closed when it is over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import LedgerError
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE, path_of_rank
from lightning_faulttolerant.records.lines import LineFile
from lightning_faulttolerant.trainer import compat, process
from lightning_faulttolerant.trainer.any_session import AnySession
from lightning_faulttolerant.trainer.ledger.fault import Fault, read_fault
from lightning_faulttolerant.trainer.ledger.ledger import FitLedger
from lightning_faulttolerant.trainer.ledger.strike_places import StrikePlaces
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.run import nested_fits as under_way
from lightning_faulttolerant.trainer.run.launched import Script
from lightning_faulttolerant.trainer.settings.options import Options, checked_ledger

_num_fits = process.num_fits


def path_of(options: Options) -> str | None:
    """Return the path of the requested ledger: the callback's argument, else the environment's; ``None`` if neither.

    Raises:
        ValueError: If it is a URL.
    """
    return options.ledger or checked_ledger(os.environ.get(LEDGER_VARIABLE) or None)


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
        number = _next_number(options.script)
        fault = read_fault()
        self._patches = Patches()
        self._begin: list[Callable[[], None]] = []
        self._ledger: FitLedger | None = None
        path = path_of(options)
        if path is not None:
            file = _opened(path_of_rank(path, trainer.global_rank))
            self._ledger = FitLedger(trainer, file, number=number, session=session, patches=self._patches)
            self._begin.append(self._ledger.take_seams)
        if fault is not None and fault.batch[0] == number:
            self._begin.append(partial(Fault(trainer, fault).take_seams, self._patches))
        if session is not None and path is not None:
            self._begin.append(partial(StrikePlaces(trainer, session, number).take_seams, self._patches))
        if self._begin:
            self._patches.around(compat.signal_connector(trainer), "register_signal_handlers", self._around_begin)

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
    return not (compat.is_nobodys_training(trainer) or under_way.is_inside_another(trainer))


def _next_number(script: Script) -> int:
    """Return the number of a fit or an evaluation. A process that Lightning creates for it uses its script's count."""
    number = _num_fits[os.getpid()] = _num_fits.get(os.getpid(), 0) + 1
    return max(number, script.num_begun()) if script.is_elsewhere else number


def _opened(path: str) -> LineFile:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return LineFile(path)
    except OSError as error:
        raise LedgerError(
            f"The ledger can't be written to {path}: {error}. Nothing could be compared. Pass a path that can be"
            f" written, as FaultTolerance(ledger=...) or {LEDGER_VARIABLE}."
        ) from error
