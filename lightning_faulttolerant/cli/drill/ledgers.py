"""What a run did, from the ledgers of its processes: joined where a restart resumed, so that each batch counts once."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line

COMPARED = (ledger.BATCH, ledger.VALIDATED, ledger.LOG, ledger.END)
# What a line says about itself, not about the training.
_NOT_COMPARED = ("event", "fit", "time")

Place = tuple[int, int, int]
"""Fit, epoch, and batches of the epoch done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a ledger that is compared.

    Args:
        kind: ``batch``, ``validated``, ``log`` or ``end``.
        fit: Number of the fit, from 1.
        values: What is compared.
        place: Where in the run it belongs; of a batch, the batches that are done when it is.
        in_validation: Whether it was made in a validation run.
        is_epoch_end: Whether it was made after the last batch of a training epoch.
        process: Number of the process that wrote it, from 0.
        is_restarted: Whether that was another one than the run's first, be it one that a launcher in it has made.
        time: When, seconds since 1970.
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
        behind = f"after batch {batch - 1} of epoch {epoch}"
        where = {
            ledger.BATCH: f"batch {batch - 1} of epoch {epoch}",
            ledger.VALIDATED: f"the validation run {behind}",
            ledger.LOG: f"values logged at step {self.values.get('step')}",
        }.get(self.kind, "the end of the fit")
        return where if self.fit == 1 else f"{where} of fit {self.fit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where a fit continued from a checkpoint.

    Args:
        process: Number of the process, from 0.
        place: How much was done before.
        text: The position in words.
        is_exact: Whether all was restored exactly.
        not_exact: What was not, as the run itself says.
        path: Of the checkpoint.
    """

    process: int
    place: Place
    text: str
    is_exact: bool
    not_exact: tuple[str, ...] = ()
    path: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the fit had come to its end."""
        return self.text.startswith("after the end")

    def kept_of(self, events: Sequence[Event]) -> list[Event]:
        """Return those of the fit's events that had happened when the state was taken that it continued from."""
        return [event for event in events if self._was_before(event)]

    def _was_before(self, event: Event) -> bool:
        if self.is_finished:
            return event.kind != ledger.END
        if event.kind == ledger.END or event.place != self.place:
            return event.kind != ledger.END and event.place < self.place
        if self.text.startswith("at the validation run"):
            return not event.in_validation and not event.is_epoch_end
        if self.text.startswith("after the step"):
            return event.kind == ledger.BATCH
        if self.text.startswith("at the end of epoch"):
            return not event.is_epoch_end
        return True


@dataclass(kw_only=True, slots=True)
class RankOfRun:
    """What one rank did over all processes of a run.

    Args:
        rank: Its number.
        fits: For each fit of the script the events that count, in order.
        begun: The lines with which its fits began, each with the number of the process.
        resumed: Where fits continued, in order.
        autosaves: For each autosave the process and the place of its position.
        is_restarted: Whether a fit was begun more than once.
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
        """All that counts, in order."""
        return [event for fit in sorted(self.fits) for event in self.fits[fit]]

    @property
    def batches(self) -> list[Event]:
        """The training batches that count, in order."""
        return [event for event in self.events if event.kind == ledger.BATCH]

    def add(self, process: int, line: Line) -> None:
        """Take the next line of a process."""
        fit, kind = int(line.get("fit", 1)), line.get("event")
        events = self.fits.setdefault(fit, [])
        if kind == ledger.FIT:
            self.is_restarted |= fit in self._earlier
            self.begun.append((process, line))
            # Until it is known whether the fit resumes or begins again. A process that did nothing takes nothing away.
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
    """Tells how many training batches of a whole run are done at a place.

    Args:
        batches: Of the uninterrupted run.
    """

    def __init__(self, batches: Sequence[Event]) -> None:
        self._places = sorted(event.place for event in batches)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_fits(self) -> int:
        """How many fits the script has."""
        return self._places[-1][0] if self._places else 0

    def at(self, place: Place) -> int:
        """Return how many batches are done where so many of that fit and epoch are."""
        return bisect.bisect_right(self._places, place)

    def of(self, resumption: Resumption) -> int:
        """Return how many batches did not have to be done again."""
        return self.at((resumption.place[0] + 1, -1, -1) if resumption.is_finished else resumption.place)

    def place_of(self, number: int) -> Place:
        """Return fit, epoch and index of the batch before which `number` are done."""
        fit, epoch, done = self._places[min(number, len(self._places) - 1)]
        return fit, epoch, done - 1


def join(rank: int, processes: Iterable[Iterable[Line]]) -> RankOfRun:
    """Join what the processes of a run wrote on one rank; after a place where a later one continued, its word counts.

    Args:
        rank: Whose ledgers these are.
        processes: The lines of each process of the drill, in order. A launcher that starts its ranks again makes them
            write on in the same file.
    """
    run = RankOfRun(rank=rank)
    for process, lines in enumerate(processes):
        for line in lines:
            run.add(process, line)
    return run


def resumption_of(process: int, line: Line) -> Resumption:
    """Return where a fit continued.

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
        # A run may have millions: their names are kept once.
        values={sys.intern(name): value for name, value in line.items() if name not in _NOT_COMPARED},
        place=place,
        in_validation=kind == ledger.VALIDATED or bool(line.get("validating", False)),
        is_epoch_end=bool(line.get("epoch_end", False)),
        process=process,
        is_restarted=is_restarted,
        time=float(line.get("time", 0.0)),
    )
