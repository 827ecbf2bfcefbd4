"""The steps of a replay: what happens before the first of them, in each, and after the last one."""

from __future__ import annotations

import bdb
import pdb
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.processes import leave_process
from lightning_faulttolerant.records.replay import (
    ENDED,
    LEFT,
    PASSED,
    RAISED,
    REACHED,
    ReplayOutcome,
    ReplayRequest,
    StepPlace,
    read_start,
    replay_requested,
    write_outcome,
    write_sums,
)
from lightning_faulttolerant.trainer.compat import num_begun_in_all
from lightning_faulttolerant.trainer.incidents.flight_recorder import SeenStep, StepSeams, loss_and_norm, sums_of_step
from lightning_faulttolerant.trainer.ledger.requested import current_number
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.replay.changed_values import set_value
from lightning_faulttolerant.trainer.replay.protection import protect, redirect, save_logs
from lightning_faulttolerant.trainer.replay.step_dump import StepDump
from lightning_faulttolerant.trainer.run.directory import Script

_DONE, _FAILED = 0, 1


def replay_of(trainer: Trainer, script: Script) -> ReplayedSteps | None:
    """Return the replay that a function of a trainer belongs to; ``None`` if the environment requests none.

    Args:
        trainer: The trainer.
        script: The process that created the callback.
    """
    request = replay_requested()
    return None if request is None else ReplayedSteps(trainer, request, script)


def _debugged(function: Method, *args: object, **kwargs: object) -> object:
    """Call a function in the debugger, which stops at its first line. Unlike ``runcall``, quitting it raises."""
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        return function(*args, **kwargs)
    finally:
        debugger.quitting = True
        sys.settrace(None)


class ReplayedSteps:
    """Runs the steps, and ends the process after the last one: no later code of the script may write anything.

    Args:
        trainer: The trainer that runs the fit.
        request: The request for the replay.
        script: The process that created the callback.
    """

    def __init__(self, trainer: Trainer, request: ReplayRequest, script: Script) -> None:
        self.request = request
        self._trainer = trainer
        self._script = script
        self._patches = Patches()
        self._first = self._last = StepPlace(number=0)
        self._place = StepPlace(number=0, epoch=0, batch=0)
        self._prepared_at: StepPlace | None = None
        self._ranks: Ranks | None = None
        self._close_workers: Callable[[], None] = lambda: None
        self._dump: StepDump | None = None

    def protect(self) -> None:
        """Keep the trainer from the files of the run."""
        protect(self._trainer, self.request)

    def redirect(self) -> None:
        """Give the trainer another ``default_root_dir``, once the run is found."""
        redirect(self._trainer, self.request)

    def begin(self, loaders: Loaders, ranks: Ranks) -> None:
        """Take the seams of the loops, if this is the fit to replay. Call it when its real work begins.

        Args:
            loaders: The fit's loaders.
            ranks: The ranks that train together.
        """
        if current_number(self._script) != self.request.fit:
            return
        start = ranks.from_first("replay", read_start(self.request))
        place = None if start is None else start.place
        first, last = self.request.since or place, self.request.until or place
        assert first is not None
        assert last is not None
        self._first, self._last, self._ranks, self._close_workers = first, last, ranks, loaders.close_workers
        if self.request.dumps is not None:
            self._dump = StepDump(self._trainer, loaders, self.request.dumps, self._patches)
        if self.request.sums_after is not None:
            StepSeams(self._trainer, self._patches, after_backward=self._write_sums)
        self._patches.around(self._trainer.fit_loop.epoch_loop, "advance", self._around_advance)
        self._patches.around(self._trainer.fit_loop, "run", self._around_run)

    def _around_advance(self, original: Method, data_fetcher: object) -> None:
        self._place = place = self._here()
        if place.is_after(self._last):
            self._end(PASSED)
        if not place.is_before(self._first):
            self._prepare()
            if self._dump is not None:
                self._dump.begin(place)
        original(data_fetcher)
        if num_begun_in_all(self._trainer) == place.number:
            return  # it only returns to where a validation run continues
        if self._dump is not None:
            self._dump.write()
        if not self.request.is_of_exception and not place.is_before(self._last):
            self._end(REACHED)

    def _write_sums(self, seen: SeenStep) -> None:
        if seen.num_backward == self.request.sums_after and not self._place.is_before(self._last):
            loss, _ = loss_and_norm(seen.loss, ())
            write_sums(self.request, "" if loss is None else str(loss), sums_of_step(self._trainer, seen))

    def _here(self) -> StepPlace:
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return StepPlace(
            number=num_begun_in_all(self._trainer), epoch=self._trainer.current_epoch, batch=current.completed
        )

    def _prepare(self) -> None:
        """Prepare the first of the steps."""
        if self._prepared_at is not None:
            return
        self._prepared_at = self._place
        for key, value in self.request.values:
            set_value(self._trainer, key, value)
        if self.request.detects_anomalies:
            torch.autograd.set_detect_anomaly(True)
        if self.request.opens_debugger and self._trainer.is_global_zero:
            debugging = Patches()

            def debug(training_step: Method, *args: object, **kwargs: object) -> Any:
                debugging.undo()  # the next steps run without it
                return _debugged(training_step, *args, **kwargs)

            debugging.around(self._trainer.lightning_module, "training_step", debug)

    def _around_run(self, original: Method) -> None:
        try:
            original()
        except bdb.BdbQuit:
            self._end(LEFT)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and reports it
            self._fail(error)
        self._end(ENDED)

    def _fail(self, error: BaseException) -> NoReturn:
        traceback.print_exception(error)
        if self._dump is not None:
            self._dump.write()
        self._report(RAISED, f"{type(error).__name__}: {error}")
        self._leave(RAISED)

    def _end(self, word: str) -> NoReturn:
        """End the process; a collective, unless the user has quit the debugger."""
        self._report(word)
        if self._ranks is not None and word != LEFT:  # no rank may end while another one waits for it
            self._ranks.to_first("replayed", None)
            self._ranks.from_first("replayed", None)
        self._leave(word)

    def _report(self, word: str, text: str = "") -> None:
        """Report the end. Call this before any other rank may end, and with it the command that reads the reports."""
        changed = self._prepared_at if self.request.values else None
        outcome = ReplayOutcome(word=word, place=self._place, text=text, changed=changed)
        write_outcome(self.request, self._trainer.global_rank, outcome)

    def _leave(self, word: str) -> NoReturn:
        self._close_workers()
        save_logs(self._trainer)
        # Lightning's parent waits for a result of the processes that it has created, unless they fail.
        leave_process(_FAILED if word in (RAISED, LEFT) or self._script.is_elsewhere else _DONE)
