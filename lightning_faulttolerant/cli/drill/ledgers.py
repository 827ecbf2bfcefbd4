"""The events of a run from the ledgers of its processes, joined where a restart resumed: each batch counts once."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line

COMPARED = (ledger.BATCH, ledger.VALIDATED, ledger.LOG, ledger.END)
# Fields about the line itself, not about the training.
_NOT_COMPARED = ("event", "fit", "time")

Place = tuple[int, int, int]
"""Fit, epoch, and number of finished batches of the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a ledger that takes part in the comparison.

    Args:
        kind: ``batch``, ``validated``, ``log`` or ``end``.
        fit: Number of the fit, from 1.
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
    values: dict[str, Any]
    place: Place
    in_validation: bool
    is_epoch_end: bool
    process: int
    is_restarted: bool
    time: float

    def __str__(self) -> str:
        epoch, batch = self.place[1:]
        after_last = f"after batch {batch - 1} of epoch {epoch}"
        where = {
            ledger.BATCH: f"batch {batch - 1} of epoch {epoch}",
            ledger.VALIDATED: f"the validation run {after_last}",
            ledger.LOG: f"values logged at step {self.values.get('step')}",
        }.get(self.kind, "the end of the fit")
        return where if self.fit == 1 else f"{where} of fit {self.fit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A place where a fit continued from a checkpoint.

    Args:
        process: Number of the process, from 0.
        place: The place up to which everything was done before.
        text: The position in words.
        is_exact: Whether everything was restored exactly.
        not_exact: What was not restored exactly, as the run itself reports it.
        path: Path of the checkpoint.
        num_validated: How many batches of a validation run were done; ``None`` if it did not continue inside one.
    """

    process: int
    place: Place
    text: str
    is_exact: bool
    not_exact: tuple[str, ...] = ()
    path: str = ""
    num_validated: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the fit had finished."""
        return self.text.startswith("after the end")

    def kept_of(self, events: Sequence[Event]) -> list[Event]:
        """Return the events of the fit that happened before the restored state was captured."""
        return [event for event in events if self._was_before(event)]

    def _was_before(self, event: Event) -> bool:
        if self.is_finished:
            return event.kind != ledger.END
        if event.kind == ledger.END or event.place != self.place:
            return event.kind != ledger.END and event.place < self.place
        if self.text.startswith("at the validation run") or self.num_validated is not None:
            begun = event.values.get("validation_batch", sys.maxsize)
            return begun <= (self.num_validated or 0) or (not event.in_validation and not event.is_epoch_end)
        if self.text.startswith("after the step"):
            return event.kind == ledger.BATCH
        if self.text.startswith("at the end of epoch"):
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
        autosaves: For each autosave, the number of the process and the place.
        is_restarted: Whether a fit began more than once.
    """

    rank: int
    fits: dict[int, list[Event]] = field(default_factory=dict)
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

    def add(self, process: int, line: Line) -> None:
        """Add the next line of a process."""
        fit, kind = int(line.get("fit", 1)), line.get("event")
        events = self.fits.setdefault(fit, [])
        if kind == ledger.FIT:
            self.is_restarted |= fit in self._earlier
            self.begun.append((process, line))
            # Keep these until the fit resumes or begins again. A process that did nothing discards nothing.
            self._earlier[fit] = events or self._earlier.get(fit, [])
            self.fits[fit] = []
        elif kind == ledger.RESUMED:
            resumption = resumption_of(process, line)
            self.resumed.append(resumption)
            self.fits[fit] = resumption.kept_of(self._earlier.get(fit, [])) + events
        elif kind == ledger.AUTOSAVE:
            self.autosaves.append((process, (fit, int(line["epoch"]), int(line["batch"]))))
        elif kind in COMPARED:
            events.append(_event(process, fit, line, events, is_restarted=self.is_restarted))


class BatchNumbers:
    """Counts the training batches of a whole run that are done at a place.

    Args:
        batches: Training batches of the uninterrupted run.
    """

    def __init__(self, batches: Sequence[Event]) -> None:
        self._places = sorted(event.place for event in batches)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_fits(self) -> int:
        """The number of fits in the script."""
        return self._places[-1][0] if self._places else 0

    def at(self, place: Place) -> int:
        """Return the number of batches of the whole run that are done at a place."""
        return bisect.bisect_right(self._places, place)

    def of(self, resumption: Resumption) -> int:
        """Return the number of batches that did not have to be done again."""
        return self.at((resumption.place[0] + 1, -1, -1) if resumption.is_finished else resumption.place)

    def place_of(self, number: int) -> Place:
        """Return the fit, epoch and index of the batch that has `number` batches before it."""
        fit, epoch, done = self._places[min(number, len(self._places) - 1)]
        return fit, epoch, done - 1


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


def resumption_of(process: int, line: Line) -> Resumption:
    """Return the place where a fit continued.

    Args:
        process: Number of the process that wrote the line.
        line: A ``resumed`` line.
    """
    return Resumption(
        process=process,
        place=(int(line.get("fit", 1)), int(line["epoch"]), int(line["batch"])),
        text=str(line.get("text", "")),
        is_exact=bool(line.get("exact", True)),
        not_exact=tuple(line.get("not_exact", ())),
        path=str(line.get("path", "")),
        num_validated=line.get("validation_batch"),
    )


def _event(process: int, fit: int, line: Line, before: Sequence[Event], *, is_restarted: bool) -> Event:
    kind = line["event"]
    last = before[-1].place if before else (fit, 0, 0)
    place = (fit, int(line["epoch"]), int(line["batch"])) if {"epoch", "batch"} <= line.keys() else last
    if kind == ledger.BATCH:
        place = (*place[:2], place[2] + 1)
    return Event(
        kind=kind,
        fit=fit,
        # A run may have millions of events, so their names are stored once.
        values={sys.intern(name): value for name, value in line.items() if name not in _NOT_COMPARED},
        place=place,
        in_validation=kind == ledger.VALIDATED or bool(line.get("validating", False)),
        is_epoch_end=bool(line.get("epoch_end", False)),
        process=process,
        is_restarted=is_restarted,
        time=float(line.get("time", 0.0)),
    )
