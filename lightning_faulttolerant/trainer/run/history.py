"""Writes the history of a run from the training process, and never disturbs the fit.

``records/history.py`` describes the lines, ``history_file.py`` where they are kept. Nothing here raises, except what a
signal handler raises. Nothing is drawn at random, and a boundary only compares two numbers.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.records.history import (
    ALIVE,
    ALIVE_EVERY_SECONDS,
    ALIVE_EVERY_SHARE,
    AUTOSAVE,
    BEGIN,
    END,
    FINISHED,
    FIT,
    INCIDENT,
    SKIPPED,
    START,
    UNSAVED,
    VALIDATION,
    name_of,
)
from lightning_faulttolerant.records.history_parser import Failures, failures_of
from lightning_faulttolerant.records.requests import Skip
from lightning_faulttolerant.records.runs import Parent
from lightning_faulttolerant.supervision.heartbeats import last_hang
from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition, num_evaluated, position_of
from lightning_faulttolerant.trainer.process import IMPORTED_AT
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.run.history_file import HistoryFile, NoHistory, sum_of_validations
from lightning_faulttolerant.trainer.sections import OwnTimes

_MAX_TEXT = 300


def _without_harm(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that does nothing on ranks without a file, and that reports errors instead of raising them."""

    @functools.wraps(method)
    def guarded(self: HistoryWriter, *args: object, **kwargs: object) -> None:
        if isinstance(self.file, NoHistory):
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - no error of the history may end the training
            self.file.announce(error)

    return guarded


@dataclass(slots=True)
class _Validation:
    """The validation run in progress."""

    since: float
    first: int
    waited: float = 0.0


class _Validations:
    """The validation runs of a fit.

    Args:
        trainer: The trainer that runs the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.current: _Validation | None = None
        self._over: dict[str, object] | None = None
        """The line about those that are over and not yet written."""

    def begin(self, *, continues: bool) -> None:
        first = num_evaluated(self._trainer) if continues else 0
        self.current = _Validation(since=round(time.time(), 3), first=first)

    def end(self, place: Mapping[str, int]) -> None:
        run, self.current = self.current, None
        if run is None:  # `begin` has failed, and this has been reported
            return
        until = round(time.time(), 3)
        line = {
            **place,
            "since": run.since,
            "until": until,
            "seconds": round(max(until - run.since - run.waited, 0.0), 3),
            "first": run.first,
            "num_batches": num_evaluated(self._trainer) - run.first,
            "number": 1,
        }
        self._over = sum_of_validations(self._over, line)

    def take_line(self) -> dict[str, object] | None:
        """Return the line to write, once."""
        line, self._over = self._over, None
        return line

    def inside(self) -> dict[str, object]:
        """Return since when the run in progress runs, if there is one."""
        run = self.current
        if run is None:
            return {}
        return {"validation": {"since": run.since, "first": run.first, "waited": round(run.waited, 3)}}


class HistoryWriter:
    """Adds one fit or evaluation to the history of its run, from `begin` to `end`.

    Args:
        trainer: The trainer that runs the fit.
        file: The history. Default: nothing is written, as on ranks other than 0.
        fit: The number of the fit in its script.
        function: The Trainer's function: ``fit``, ``validate``, ``test``, or ``predict``.
    """

    def __init__(self, trainer: Trainer, file: HistoryFile | None = None, *, fit: int = 0, function: str = FIT) -> None:
        self._trainer = trainer
        self.file: HistoryFile = NoHistory() if file is None else file
        self._fit = fit
        self._function = function
        self._validations = _Validations(trainer)
        self._noted: set[str] = set()
        """Those of `START` and `END` that are noted."""
        self.saved: TrainerPosition | None = None
        """The position of the last autosave."""
        self._untold: dict[str, Any] = {}
        self.skips: list[Skip] = []
        """The batches that the fit has left out before it was resumed."""
        self.times = OwnTimes()
        """What this rank spends its time on."""
        self._began = perf_counter()
        self.due_at = float("inf")
        """The ``time.perf_counter`` time at which a sign of life is due. A boundary need not call before."""

    def failures(self) -> Failures:
        """Return the failures of the run before this fit. None are known on ranks without a file."""
        try:
            return failures_of(self.file.lines(), fit=self._fit)
        except Exception as error:  # noqa: BLE001 - no error of the history may end the training
            self.file.announce(error)
            return Failures()

    @_without_harm
    def begin(self, script: Script, *, directory: str = "") -> None:
        """Note that a fit begins.

        Args:
            script: The process in which the callback was created.
            directory: The directory of the run, or its URL: what watches a run notes there how it hung.
        """
        hang = last_hang(directory)
        self._add(
            BEGIN,
            process=script.token[:12],
            pid=script.process_id,
            host=socket.gethostname(),
            process_began=process_began(script.process_id),
            **({} if self._function == FIT else {"function": self._function}),
            **({} if hang is None else {"hang": {"since": hang[0], "until": hang[1]}}),
        )

    @_without_harm
    def start(
        self,
        choice: Choice | None,
        report: ResumeReport | None,
        position: TrainerPosition | None = None,
        parent: Parent | None = None,
    ) -> None:
        """Note that the first batch can be fetched. Only the first call of a fit has an effect.

        Args:
            choice: The checkpoint that the fit continues from.
            report: The report of the resume, if anything was restored.
            position: Where the checkpoint was taken.
            parent: What the run begins from, if it is a branch.
        """
        if START in self._noted:
            return
        self._noted.add(START)
        names = ("path", "position", "seconds", "restored", "not_exact", "notes")
        resumed = None
        if report is not None:
            told = {**asdict(report), "not_exact": report.all_not_exact, "seconds": round(report.seconds, 6)}
            resumed = {**{name: told[name] for name in names}, "repeats": report.proof.num_to_repeat}
        self._add(
            START,
            **self._start_place(position),
            num_ranks=self._trainer.world_size,
            continues=choice is not None and choice.continues,
            resumed=resumed,
            **({} if parent is None else {"parent": parent.state_dict()}),
            **({"skipped": [list(skip) for skip in self.skips]} if self.skips else {}),
        )

    @_without_harm
    def autosave(self, series: AutosaveSeries | None, path: str, position: TrainerPosition, *, seconds: float,
                 taken: float, is_in_background: bool = False) -> None:  # fmt: skip
        """Note that an autosave is written and verified. May be called in the thread that wrote it.

        Args:
            series: Knows the size of the autosave.
            path: The path of the autosave.
            position: The position of its state.
            seconds: How many seconds training waited for it.
            taken: When its state was taken, by ``time.perf_counter``.
            is_in_background: Whether it was written in the background.
        """
        if not is_in_background:
            self._write_validated()
        self._add(
            AUTOSAVE,
            **self._place_of(position),
            **self._validations.inside(),
            name=name_of(path),
            taken=round(time.time() - (perf_counter() - taken), 3),
            seconds=round(seconds, 6),
            bytes=None if series is None else series.num_bytes.get(path),
            in_background=is_in_background,
            **({"data": round(self.times.data_taken, 3)} if self._function == FIT else {}),
            **({"slow": [asdict(each) for each in self.times.slow]} if self.times.slow else {}),
        )
        self.saved = position

    @_without_harm
    def skip(self, skip: Skip, text: str) -> None:
        """Note that a batch is left out.

        Args:
            skip: Epoch and batch.
            text: Why it could not be loaded; empty if it was.
        """
        self._write_validated()
        self._add(SKIPPED, epoch=skip[0], batch=skip[1], global_step=self._trainer.global_step, text=text[:_MAX_TEXT])

    def note_taken(self) -> None:
        """Note that a state is taken, for an autosave that is written later."""
        self.times.data_taken = self.times.data

    def note_wait(self, seconds: float) -> None:
        """Note for how many seconds the fit has waited for an autosave: a validation run does not count them."""
        if self._validations.current is not None:
            self._validations.current.waited += seconds

    @_without_harm
    def begin_validation(self, *, continues: bool) -> None:
        """Note that a validation run inside the fit begins.

        Args:
            continues: Whether an earlier process has begun it.
        """
        self._validations.begin(continues=continues)

    @_without_harm
    def end_validation(self) -> None:
        """Note that the validation run is over. It is written before the next line, or now if a line is due."""
        self._validations.end(self._place())
        if perf_counter() >= self.due_at:
            self._write_validated()

    def _write_validated(self) -> None:
        line = self._validations.take_line()
        if line is not None:
            self._add(VALIDATION, **line)

    @_without_harm
    def unsaved(self, *, since: float, until: float | None, tries: int, text: str) -> None:
        """Note that saves fail, or that they succeed again. Failures after the first are written then, or at the end.

        Args:
            since: The time of the first save that failed, in seconds since 1970.
            until: The time at which a save succeeded again; ``None`` if none has yet.
            tries: How many saves failed.
            text: Why the last of them failed.
        """
        line = {"since": round(since, 3), "until": until and round(until, 3), "tries": tries, "text": text[:_MAX_TEXT]}
        self._untold = line if until is None and tries > 1 else {}
        if not self._untold:
            self._add(UNSAVED, **line)

    @_without_harm
    def incident(self, step: int, text: str, name: str) -> None:
        """Note that the flight recorder has written an incident.

        Args:
            step: The training batch, counted from 0 over all epochs.
            text: What happened.
            name: The name of the file with the state before the step; empty if there is none.
        """
        self._add(INCIDENT, **self._here(), step=step, text=text[:_MAX_TEXT], name=name)

    @_without_harm
    def alive(self) -> None:
        """Leave a sign of life."""
        self._write_validated()
        self._add(ALIVE, **self._here())

    @_without_harm
    def end(self, exception: BaseException | None) -> None:
        """Note how the fit ended, and wait until all lines are written. Only the first call of a fit has an effect.

        Args:
            exception: The exception that ended the fit, if any.
        """
        if END in self._noted:
            return
        self._noted.add(END)
        if self._untold:
            self._add(UNSAVED, **self._untold)
        saved = self.saved and self._place_of(self.saved)
        self._write_validated()
        self._add(END, **self._here(), **_end_of(exception), saved=saved)
        self.due_at = float("inf")
        self.file.flush()

    def _add(self, event: str, **more: object) -> None:
        now, (least, most) = perf_counter(), ALIVE_EVERY_SECONDS
        # Set before the line is written: after a failure, the next try is as far away.
        self.due_at = now + min(max((now - self._began) * ALIVE_EVERY_SHARE, least), most)
        self.file.add({"event": event, "fit": self._fit, "time": round(time.time(), 3), **more})

    def _here(self) -> dict[str, object]:
        """Return the current place, and whether it is in a validation run."""
        is_evaluating = self._validations.current is not None or self._function != FIT
        place: dict[str, Any] = self._place()
        if self._function == FIT:
            place["data"] = round(self.times.data, 3)
        return (
            {**place, "num_validated": num_evaluated(self._trainer), **self._validations.inside()}
            if is_evaluating
            else place
        )

    def _place(self) -> dict[str, int]:
        return self._place_of(position_of(self._trainer, BOUNDARY))

    def _start_place(self, position: TrainerPosition | None) -> dict[str, int]:
        if position is None:
            return {**self._place(), **({} if self._function == FIT else {"num_validated": 0})}
        number = self._place_of(position).get("num_validated")
        return {**self._place(), **({} if number is None else {"num_validated": number})}

    def _place_of(self, position: TrainerPosition) -> dict[str, int]:
        place = {"epoch": position.epoch, "batch": position.batch, "global_step": position.global_step}
        is_after = position.is_of_evaluation and position.is_finished  # how many batches it had depends on the rank
        number = num_evaluated(self._trainer) if is_after else position.num_evaluated
        return place if number is None else {**place, "num_validated": number}


_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # some libraries color their messages, and a report is plain text


def _end_of(exception: BaseException | None) -> dict[str, str]:
    """Return why a fit ended, in a few words and at length."""
    if exception is None:
        return {"reason": FINISHED}
    if isinstance(exception, TrainingStopped):
        return {"reason": f"stopped by {exception.by}", "by": exception.by, "text": exception.reason[:_MAX_TEXT]}
    name = type(exception).__name__
    return {"reason": name, "text": f"{name}: {_COLOR.sub('', str(exception))}"[:_MAX_TEXT]}


@functools.cache
def process_began(process_id: int) -> float:
    """Return when a process of this machine was started, in seconds since 1970.

    An interactive session counts as started when the callback was imported. So does any process if the system does not
    report its start.

    Args:
        process_id: The id of this process, or of the process that created it.
    """
    if hasattr(sys, "ps1") or getattr(sys.modules.get("__main__"), "__file__", None) is None:
        return round(IMPORTED_AT, 3)
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return round(IMPORTED_AT, 3)
    return round(time.time() - age, 3)


def seconds_of_process() -> float:
    """Return how many seconds this process has run."""
    return max(time.time() - process_began(os.getpid()), 0.0)
