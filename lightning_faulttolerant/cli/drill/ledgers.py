"""The events of a run from the ledgers of its processes, joined where a restart resumed: each batch counts once."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line

STEPS = (ledger.BATCH, ledger.EVALUATED)
COMPARED = (*STEPS, ledger.VALIDATED, ledger.LOG, ledger.END)
FIT = "fit"
TRAIN, VALIDATION = "train", "validation"
STAGES = (TRAIN, VALIDATION, "test", "predict")
"""What a batch may be of. Those of ``Trainer.validate`` are of ``validation``, too."""
# Fields about the line itself, not about the training.
_NOT_COMPARED = ("event", "fit", "time")
_ALL_EVALUATED = sys.maxsize

Place = tuple[int, int, int, int]
"""Fit (or evaluation), epoch, number of finished training batches of the epoch, and of finished batches of the
validation run after them, or of the evaluation.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a ledger that takes part in the comparison.

    Args:
        kind: ``batch``, ``evaluated``, ``validated``, ``log`` or ``end``.
        fit: Number of the fit or evaluation, from 1.
        function: ``fit``, ``validate``, ``test`` or ``predict``.
        ordinal: Number among the calls of that function, from 1.
        values: The values that are compared.
        place: The event's place in the run. A batch counts as done in its own place.
        in_validation: Whether it was written in a validation run.
        is_epoch_end: Whether it was written after the last batch of a training epoch.
        process: Number of the process that wrote it, from 0.
        is_restarted: Whether that process is not the run's first one. A process that a launcher restarted counts too.
        time: Time of the event, seconds since 1970.
    """

    kind: str
    fit: int
    function: str
    ordinal: int
    values: dict[str, Any]
    place: Place
    in_validation: bool
    is_epoch_end: bool
    process: int
    is_restarted: bool
    time: float

    def __str__(self) -> str:
        epoch, batch, evaluated = self.place[1:]
        number = "" if self.ordinal == 1 else f" {self.ordinal}"
        if self.function != FIT:
            call = f"{self.function}{number}"
            where = {ledger.EVALUATED: f"batch {evaluated - 1}", ledger.LOG: self._logged}
            return f"{where.get(self.kind, 'the end')} of {call}"
        run = f"the validation run after batch {batch - 1} of epoch {epoch}"
        where = {
            ledger.BATCH: f"batch {batch - 1} of epoch {epoch}",
            ledger.EVALUATED: f"batch {evaluated - 1} of {run}",
            ledger.VALIDATED: run,
            ledger.LOG: self._logged,
        }
        found = where.get(self.kind, "the end of the fit")
        return f"{found} of fit{number}" if number else found

    @property
    def _logged(self) -> str:
        return f"values logged at step {self.values.get('step')}"

    @property
    def stage(self) -> str:
        """What a batch is of, one of `STAGES`."""
        if self.function in STAGES:
            return self.function
        return VALIDATION if self.kind == ledger.EVALUATED else TRAIN

    @property
    def run(self) -> tuple[int, ...]:
        """The same for all batches of one fit's training, of one validation run, and of one evaluation."""
        return self.place[:3] if self.kind == ledger.EVALUATED else self.place[:1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A place where a fit continued from a checkpoint.

    Args:
        process: Number of the process, from 0.
        place: The place up to which everything was done before.
        where: The kind of place.
        text: The position in words.
        is_exact: Whether everything was restored exactly.
        not_exact: What was not restored exactly, as the run itself reports it.
        path: Path of the checkpoint.
    """

    process: int
    place: Place
    where: str
    text: str
    is_exact: bool
    not_exact: tuple[str, ...] = ()
    path: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the fit had finished."""
        return self.where in ledger.ENDS

    def kept_of(self, events: Sequence[Event]) -> list[Event]:
        """Return the events of the fit that happened before the restored state was captured."""
        return [event for event in events if self._was_before(event)]

    def _was_before(self, event: Event) -> bool:
        if self.is_finished:
            return event.kind != ledger.END
        if event.kind == ledger.END or event.place[:3] != self.place[:3]:
            return event.kind != ledger.END and event.place < self.place
        if self.where == ledger.BATCH_END:
            return event.kind == ledger.BATCH
        if self.place[3] != _ALL_EVALUATED:
            begun = event.values.get("validation_batch", sys.maxsize)
            return begun <= self.place[3] or (not event.in_validation and not event.is_epoch_end)
        if self.where == ledger.EPOCH_END:
            return not event.is_epoch_end
        return True


@dataclass(kw_only=True, slots=True)
class RankOfRun:
    """The events of one rank over all processes of a run.

    Args:
        rank: Number of the rank.
        fits: For each fit of the script, the events that count, in order.
        begun: The lines that begin a fit, each with the number of the process.
        resumed: The resumptions, in order.
        calls: The function of each fit or evaluation, and its number among the calls of it, by its number.
        autosaves: For each autosave, the number of the process and the place.
        is_restarted: Whether a fit began more than once.
    """

    rank: int
    fits: dict[int, list[Event]] = field(default_factory=dict)
    calls: dict[int, tuple[str, int]] = field(default_factory=dict)
    begun: list[tuple[int, Line]] = field(default_factory=list)
    resumed: list[Resumption] = field(default_factory=list)
    autosaves: list[tuple[int, Place]] = field(default_factory=list)
    is_restarted: bool = False
    _earlier: dict[int, list[Event]] = field(default_factory=dict)

    @property
    def events(self) -> list[Event]:
        """All events that count, in order."""
        return [event for fit in sorted(self.fits) for event in self.fits[fit]]

    @property
    def batches(self) -> list[Event]:
        """The training batches that count, in order."""
        return [event for event in self.events if event.kind == ledger.BATCH]

    @property
    def steps(self) -> list[Event]:
        """The batches of training and of evaluations that count, in order."""
        return [event for event in self.events if event.kind in STEPS]

    def add(self, process: int, line: Line) -> None:
        """Add the next line of a process."""
        fit, kind = int(line.get("fit", 1)), line.get("event")
        events = self.fits.setdefault(fit, [])
        if kind == ledger.FIT:
            self.is_restarted |= fit in self._earlier
            self.begun.append((process, line))
            function = str(line.get("function", FIT))
            before = [number for number, (other, _) in self.calls.items() if number < fit and other == function]
            self.calls[fit] = function, len(before) + 1
            # Keep these until the fit resumes or begins again. A process that did nothing discards nothing.
            self._earlier[fit] = events or self._earlier.get(fit, [])
            self.fits[fit] = []
        elif kind == ledger.RESUMED:
            resumption = resumption_of(process, line)
            self.resumed.append(resumption)
            self.fits[fit] = resumption.kept_of(self._earlier.get(fit, [])) + events
        elif kind == ledger.AUTOSAVE:
            self.autosaves.append((process, place_of(line)))
        elif kind in COMPARED:
            events.append(self._event(process, fit, line, events[-1].place if events else (fit, 0, 0, 0)))

    def _event(self, process: int, fit: int, line: Line, last: Place) -> Event:
        function, ordinal = self.calls.get(fit, (FIT, 1))
        return Event(
            kind=line["event"],
            fit=fit,
            function=function,
            ordinal=ordinal,
            # A run may have millions of events, so their names are stored once.
            values={sys.intern(name): value for name, value in line.items() if name not in _NOT_COMPARED},
            place=place_of(line) if {"epoch", "batch"} <= line.keys() else last,
            in_validation=line["event"] in (ledger.VALIDATED, ledger.EVALUATED) or bool(line.get("validating", False)),
            is_epoch_end=bool(line.get("epoch_end", False)),
            process=process,
            is_restarted=self.is_restarted,
            time=float(line.get("time", 0.0)),
        )


class BatchNumbers:
    """Counts the batches of a whole run, of training and of evaluations, that are done at a place.

    Args:
        steps: The batches of the uninterrupted run.
    """

    def __init__(self, steps: Sequence[Event]) -> None:
        self._steps = sorted(steps, key=lambda event: event.place)
        self._places = [event.place for event in self._steps]
        self._trained = [event.place for event in self._steps if event.stage == TRAIN]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_trained(self) -> int:
        """The number of training batches."""
        return len(self._trained)

    @property
    def num_fits(self) -> int:
        """The number of fits and evaluations in the script."""
        return self._places[-1][0] if self._places else 0

    def at(self, place: Place) -> int:
        """Return the number of batches of the whole run that are done at a place."""
        return bisect.bisect_right(self._places, place)

    def trained_at(self, place: Place) -> int:
        """Return the number of training batches of the whole run that are done at a place."""
        return bisect.bisect_right(self._trained, place)

    def trained_before(self, number: int) -> int:
        """Return how many of the first `number` batches are training batches."""
        return self.trained_at(self._places[number - 1]) if number else 0

    def step(self, number: int) -> Event:
        """Return the batch that has `number` batches before it."""
        return self._steps[min(number, len(self._steps) - 1)]

    def of_stages(self, stages: Sequence[str]) -> list[int]:
        """Return the numbers of the batches of some stages, in order."""
        return [number for number, step in enumerate(self._steps) if step.stage in stages]

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that the run has batches of."""
        found = {step.stage for step in self._steps}
        return tuple(stage for stage in STAGES if stage in found)

    def begin_of_run(self, number: int) -> int:
        """Return the number of the first batch of the training, validation run, or evaluation that a batch is of."""
        step = self.step(number)
        fit, epoch, batch = (*step.run, 0, 0)[:3]
        return self.at((fit, epoch, batch, 0))

    def place_of(self, number: int) -> ledger.BatchPlace:
        """Return the place before the batch that has `number` batches before it."""
        step = self.step(number)
        *first, batch, evaluated = step.place
        return (*first, batch - 1) if step.stage == TRAIN else (*first, batch, evaluated - 1)


def join(rank: int, processes: Iterable[Iterable[Line]]) -> RankOfRun:
    """Join the lines of all processes on one rank. After a place where a later process continued, its lines count.

    Args:
        rank: Number of the rank.
        processes: The lines of each process of the drill, in order. A rank that a launcher restarts keeps writing to
            the same file.
    """
    run = RankOfRun(rank=rank)
    for process, lines in enumerate(processes):
        for line in lines:
            run.add(process, line)
    return run


def place_before(batch: ledger.BatchPlace) -> Place:
    """Return the place up to which everything is done before a batch."""
    fit, epoch, number, evaluated = (*batch, _ALL_EVALUATED)[:4]
    return fit, epoch, number, evaluated


def resumption_of(process: int, line: Line) -> Resumption:
    """Return the place where a fit or an evaluation continued.

    Args:
        process: Number of the process that wrote the line.
        line: A ``resumed`` line.
    """
    return Resumption(
        process=process,
        place=place_of(line),
        where=str(line.get("where", "")),
        text=str(line.get("text", "")),
        is_exact=bool(line.get("exact", True)),
        not_exact=tuple(line.get("not_exact", ())),
        path=str(line.get("path", "")),
    )


def place_of(line: Line) -> Place:
    """Return the place of a line that has one. A batch counts as done in its own place."""
    kind, where = line["event"], line.get("where")
    fit, epoch, batch = (int(line.get(name, default)) for name, default in (("fit", 1), ("epoch", 0), ("batch", 0)))
    if kind == ledger.BATCH:
        return fit, epoch, batch + 1, 0
    if kind not in (ledger.RESUMED, ledger.AUTOSAVE):
        return fit, epoch, batch, int(line.get("validation_batch", 0))
    if where in ledger.ENDS:
        return fit, sys.maxsize, 0, 0
    evaluated = 0 if where in (ledger.BATCH_END, ledger.VALIDATION_START) else _ALL_EVALUATED
    return fit, epoch, batch, int(line.get("validation_batch", evaluated))
