"""Reads the lines of a history into chapters, processes, and fits, and finds its failures.

Anything malformed counts as missing. Times in the result never go back: if the clock of another machine is slow, a line
gets the time of the previous line.

A failure ends a fit or an evaluation and loses work: it was killed, or it ended without saving where it was. A stop
that saved its state is none. Only the time after the first batch counts: a failure at the start has no work to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from lightning_faulttolerant.records.history import (
    ALIVE,
    AUTOSAVE,
    AUTOSAVES,
    BEGIN,
    DONE,
    END,
    EVALUATIONS,
    FIT,
    INCIDENT,
    SECTIONS,
    SHORTENED,
    SKIPPED,
    START,
    UNSAVED,
    VALIDATION,
    Autosave,
    Chapter,
    FitHistory,
    Process,
    Resumed,
    RunHistory,
    RunPlace,
    SkippedBatch,
    SlowRank,
    Unsaved,
    Validations,
)
from lightning_faulttolerant.records.lines import Line
from lightning_faulttolerant.records.runs import parent_from

_OF_FITS = (BEGIN, START, AUTOSAVE, AUTOSAVES, VALIDATION, UNSAVED, INCIDENT, SKIPPED, ALIVE, END)
_MAX_NUMBER = 1e15
_MAX_TIME = 2.5e11  # a time after the year 9892 can't be shown


def history_of(lines: Iterable[Line], *, num_unread: int = 0) -> RunHistory:
    """Return the history that the lines record.

    A chapter ends with the script. It also ends where a start does not continue although an autosave existed.

    Args:
        lines: The lines of one file, in order.
        num_unread: How many more lines the file has, which are torn or damaged.
    """
    reader = _Reader()
    for line in lines:
        reader.read(line)
    chapters = tuple(chapter.made() for chapter in reader.chapters if chapter.processes)
    return RunHistory(chapters=chapters, num_forgotten=reader.num_forgotten, num_unread=num_unread)


def place_of(line: object) -> RunPlace | None:
    """Return the place that a line names, or ``None`` if it names none.

    Args:
        line: The parsed JSON.
    """
    if not isinstance(line, dict):
        return None
    epoch, batch, step = (_whole(line.get(name)) for name in ("epoch", "batch", "global_step"))
    if epoch is None or batch is None or step is None:
        return None
    return RunPlace(epoch=epoch, batch=batch, global_step=step, num_validated=_whole(line.get("num_validated")))


@dataclass(slots=True)
class _Fit:
    number: int
    began: float
    last_seen: float
    function: str = FIT
    known: dict[str, Any] = field(default_factory=dict)
    autosaves: list[Autosave] = field(default_factory=list)
    unsaved: dict[float, Unsaved] = field(default_factory=dict)
    validations: list[Validations] = field(default_factory=list)
    skipped: list[SkippedBatch] = field(default_factory=list)
    unfinished: Validations | None = None
    incidents: list[str] = field(default_factory=list)
    alive: list[tuple[float, RunPlace]] = field(default_factory=list)
    data: list[tuple[float, float]] = field(default_factory=list)

    def made(self) -> FitHistory:
        unfinished = [] if self.unfinished is None else [self.unfinished]
        return FitHistory(
            number=self.number,
            function=self.function,
            began=self.began,
            last_seen=self.last_seen,
            autosaves=tuple(self.autosaves),
            unsaved=tuple(self.unsaved.values()),
            validations=(*self.validations, *unfinished),
            incidents=tuple(self.incidents),
            alive=tuple(self.alive),
            skipped=tuple(self.skipped),
            data=tuple(self.data),
            **self.known,
        )


@dataclass(slots=True)
class _Process:
    token: str | None
    began: float
    pid: int | None = None
    host: str = ""
    hang: tuple[float, float] | None = None
    fits: list[_Fit] = field(default_factory=list)

    def made(self) -> Process:
        fits = tuple(fit.made() for fit in self.fits)
        return Process(began=self.began, pid=self.pid, host=self.host, hang=self.hang, fits=fits)


@dataclass(slots=True)
class _Chapter:
    processes: list[_Process] = field(default_factory=list)
    done: float | None = None

    def made(self) -> Chapter:
        return Chapter(processes=tuple(process.made() for process in self.processes), done=self.done)


class _Reader:
    def __init__(self) -> None:
        self.chapters = [_Chapter()]
        self.num_forgotten = 0
        self._now = -math.inf

    def read(self, line: Line) -> None:
        time = _time(line.get("time"))
        if time is None:
            return
        event = line.get("event")
        if event == SHORTENED:
            self.num_forgotten += _whole(line.get("number")) or 0
            return
        if event == DONE:
            if self._processes:
                self.chapters[-1].done = self._now = max(time, self._now)
            return
        number = _whole(line.get("fit"))
        if number is None or event not in _OF_FITS:
            return
        before, self._now = self._now, max(time, self._now)
        if event == BEGIN:
            self._begin(line, number, before)
            return
        fit = self._fit(number)
        if event == START:
            self._start(fit, line)
        elif event == SKIPPED:
            fit.skipped += _skipped([[line.get("epoch"), line.get("batch")]], _text(line, "text"))
        elif event in (AUTOSAVE, AUTOSAVES):
            fit.autosaves.append(_autosave(line, self._now, lowest=fit.began))
        elif event == UNSAVED:
            unsaved = _unsaved(line, self._now, lowest=fit.began)
            fit.unsaved[unsaved.since] = unsaved
        elif event == INCIDENT:
            fit.incidents.append(_incident(line))
        elif event == VALIDATION:
            fit.validations.append(_validations(line, self._now, lowest=fit.began))
        fit.unfinished = None if event == VALIDATION else _unfinished(line, fit, self._now)
        place = place_of(line)
        if place is not None:
            fit.known["last_place"] = place
            if event == ALIVE:
                fit.alive.append((self._now, place))
        data = _number(line.get("data"))
        if data is not None:
            time = fit.autosaves[-1].taken if event in (AUTOSAVE, AUTOSAVES) else self._now
            fit.data.append((time, max(data, 0.0)))
        if event == END:
            fit.known.update(reason=_text(line, "reason") or "?", by=_text(line, "by"))
            fit.known.update(text=_text(line, "text"), saved=place_of(line.get("saved")))
        fit.last_seen = self._now

    @property
    def _processes(self) -> list[_Process]:
        return self.chapters[-1].processes

    def _add_process(self, process: _Process) -> None:
        if self.chapters[-1].done is not None:
            self.chapters.append(_Chapter())
        self._processes.append(process)

    def _begin(self, line: Line, number: int, before: float) -> None:
        token = _text(line, "process")
        is_same = bool(self._processes) and self._processes[-1].token == token and self.chapters[-1].done is None
        if not is_same:
            told = _time(line.get("process_began"))
            began = min(self._now if told is None else max(told, before), self._now)
            process = _Process(token=token, began=began, pid=_whole(line.get("pid")), host=_text(line, "host"))
            process.hang = _hang(line.get("hang"))
            self._add_process(process)
        function = _text(line, "function")
        fit = _Fit(number=number, began=self._now, last_seen=self._now)
        fit.function = function if function in EVALUATIONS else FIT
        self._processes[-1].fits.append(fit)

    def _fit(self, number: int) -> _Fit:
        """Return the fit that a line belongs to; if its first line was torn, its beginning is not known."""
        if not self._processes or self.chapters[-1].done is not None:
            self._add_process(_Process(token=None, began=self._now))
        fits = self._processes[-1].fits
        if not fits or fits[-1].number != number:
            fits.append(_Fit(number=number, began=self._now, last_seen=self._now))
        return fits[-1]

    def _start(self, fit: _Fit, line: Line) -> None:
        resumed = line.get("resumed")
        told = line.get("continues")
        # An evaluation that can only be run from its start continues the script with nothing restored.
        continues = told is True or (told is not False and isinstance(resumed, dict))
        if not continues and fit.number == 1 and len(self._processes[-1].fits) == 1:
            self._start_over()
        fit.skipped += _skipped(line.get("skipped"))
        fit.known["parent"] = parent_from(line.get("parent"))
        fit.known.update(started=self._now, num_ranks=_whole(line.get("num_ranks")), place=place_of(line))
        if isinstance(resumed, dict):
            fit.known["resumed"] = Resumed(
                path=_text(resumed, "path"),
                position=_text(resumed, "position"),
                seconds=max(_number(resumed.get("seconds")) or 0.0, 0.0),
                restored=_texts(resumed, "restored"),
                not_exact=_texts(resumed, "not_exact"),
                notes=_texts(resumed, "notes"),
                continues=continues,
                repeats=_whole(resumed.get("repeats")),
            )

    def _start_over(self) -> None:
        """Let the last process begin a new chapter, if earlier ones have left something to continue from."""
        *earlier, last = self._processes
        if any(fit.autosaves for process in earlier for fit in process.fits if fit.number == 1):
            self._processes.pop()
            self.chapters.append(_Chapter(processes=[last]))


def _hang(told: object) -> tuple[float, float] | None:
    since, until = (_time(told.get(name)) if isinstance(told, dict) else None for name in ("since", "until"))
    return None if since is None or until is None else (since, max(since, until))


def slow_of(told: object) -> tuple[SlowRank, ...]:
    """Return the slow ranks that a line names.

    Args:
        told: The parsed JSON.
    """
    found = []
    for each in told if isinstance(told, list) else ():
        rank, slower = (
            (_whole(each.get("rank")), _number(each.get("slower"))) if isinstance(each, dict) else (None, None)
        )
        if rank is not None and slower is not None and each.get("section") in SECTIONS:
            number = max(_whole(each.get("number")) or 1, 1)
            found.append(SlowRank(rank=rank, section=each["section"], slower=slower, number=number))
    return tuple(found)


def _autosave(line: Line, now: float, *, lowest: float) -> Autosave:
    seconds = max(_number(line.get("seconds")) or 0.0, 0.0)
    if line.get("event") == AUTOSAVES:
        longest = line.get("longest")
        longest = longest if isinstance(longest, dict) else {}
        number = max(_whole(line.get("number")) or 1, 1)
        taken, place = _number(line.get("since")), place_of(longest)
        most = max(_number(longest.get("seconds")) or 0.0, 0.0)
    else:
        number, taken, place, most = 1, _number(line.get("taken")), place_of(line), seconds
    return Autosave(
        time=now,
        taken=min(max(now - seconds if taken is None else taken, lowest), now),
        place=place,
        seconds=seconds,
        num_bytes=_whole(line.get("bytes")),
        is_in_background=line.get("in_background") is True,
        name=_text(line, "name"),
        number=number,
        longest=most,
        slow=slow_of(line.get("slow")),
    )


def _validations(line: Line, now: float, *, lowest: float) -> Validations:
    since, until = (_time(line.get(name)) for name in ("since", "until"))
    until = min(max(now if until is None else until, lowest), now)
    since = min(max(until if since is None else since, lowest), until)
    return Validations(
        since=since,
        until=until,
        place=place_of(line),
        seconds=min(max(_number(line.get("seconds")) or 0.0, 0.0), until - since),
        num_batches=_whole(line.get("num_batches")) or 0,
        number=max(_whole(line.get("number")) or 1, 1),
    )


def _unfinished(line: Line, fit: _Fit, now: float) -> Validations | None:
    """Return the validation run that a line comes from inside of; if the line does not say, the one known before."""
    told, place = line.get("validation"), place_of(line)
    since = _time(told.get("since")) if isinstance(told, dict) else None
    if not isinstance(told, dict) or since is None or place is None or place.num_validated is None:
        return fit.unfinished
    since, first, before = min(max(since, fit.began), now), _whole(told.get("first")) or 0, fit.unfinished
    num_batches = max(place.num_validated - first, 0)
    if before is not None and before.since == since:  # an autosave may hold an earlier state than the line before
        num_batches = max(num_batches, before.num_batches)
    waited = max(_number(told.get("waited")) or 0.0, 0.0)
    return Validations(
        since=since,
        until=now,
        place=place,
        seconds=max(now - since - waited, 0.0),
        num_batches=num_batches,
        is_over=False,
    )


def _skipped(places: object, text: str = "") -> list[SkippedBatch]:
    found = []
    for place in places if isinstance(places, list) else []:
        numbers = [_whole(number) for number in place] if isinstance(place, list) else []
        if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
            found.append(SkippedBatch(epoch=numbers[0], batch=numbers[1], text=text))
    return found


def _unsaved(line: Line, now: float, *, lowest: float) -> Unsaved:
    since, until = (_time(line.get(name)) for name in ("since", "until"))
    since = min(max(now if since is None else since, lowest), now)
    return Unsaved(
        since=since,
        until=None if until is None else min(max(until, since), now),
        tries=max(_whole(line.get("tries")) or 1, 1),
        text=_text(line, "text"),
    )


def _incident(line: Line) -> str:
    name = _text(line, "name")
    return (
        f"recorded an incident in step {_whole(line.get('step'))}: {_text(line, 'text')}{f' ({name})' if name else ''}"
    )


def _number(value: Any) -> float | None:
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
    return float(value) if is_one else None


def _time(value: object) -> float | None:
    found = _number(value)
    return found if found is not None and 0 <= found < _MAX_TIME else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_NUMBER else None


def _text(line: Line, name: str) -> str:
    found = line.get(name)
    return found if isinstance(found, str) else ""


def _texts(line: Line, name: str) -> tuple[str, ...]:
    found = line.get(name)
    return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


_NUM_RECENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """The failures of a run so far.

    Args:
        number: How many there were.
        seconds: The time in which they came, from the first batch of each fit to its end.
        save_seconds: How long training waits for an autosave; ``None`` if no autosave is known.
    """

    number: int = 0
    seconds: float = 0.0
    save_seconds: float | None = None

    def mean_seconds_between(self, more: float = 0.0) -> float:
        """Return the mean time between two failures, in seconds; infinity if there was none.

        Args:
            more: How many seconds the present process has trained without a failure.
        """
        return (self.seconds + more) / self.number if self.number else math.inf


def best_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the time from one save to the next with which the least time is lost, in seconds.

    Args:
        save_seconds: How long a save takes.
        failure_seconds: The mean time between two failures.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974. The limit for expensive
        saves is that of J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006.

    Example:
        >>> best_interval(0.5, 3600.0), best_interval(0.5, 0.5)
        (60.0, 0.5)
    """
    return min(math.sqrt(2.0 * save_seconds * failure_seconds), failure_seconds)


def failures_of(lines: Iterable[Line], *, fit: int) -> Failures:
    """Return the failures before a fit that has just begun, which the last lines are about.

    Args:
        lines: The lines of the history.
        fit: The number of the fit. Only its autosaves tell what a save costs.
    """
    history = history_of(lines)
    fits = [each for chapter in history.chapters for each in chapter.fits][:-1]
    started = [each for each in fits if each.started is not None]
    return Failures(
        number=sum(map(is_failure, started)),
        seconds=math.fsum(each.last_seen - (each.started or 0.0) for each in started),
        save_seconds=_save_seconds(history, fit),
    )


def is_failure(fit: FitHistory) -> bool:
    """Return whether a fit or an evaluation has ended with a loss of work.

    Args:
        fit: One that is over.
    """
    if fit.started is None or fit.is_finished:
        return False
    if fit.reason is None:
        return True
    return fit.last_place is not None and (fit.saved is None or _order(fit, fit.saved) < _order(fit, fit.last_place))


def _order(fit: FitHistory, place: RunPlace) -> tuple[float, ...]:
    # A validation run may be repeated after a stop that saved its start: no other interval would save it.
    return place.order if fit.is_evaluation else (place.epoch, place.batch)


def _save_seconds(history: RunHistory, fit: int) -> float | None:
    processes = chain.from_iterable(chapter.processes for chapter in history.chapters)
    series = [each.autosaves for process in processes for each in process.fits if each.number == fit]
    # The first save of a process takes longer: much of its work is done only once.
    later = [autosave for autosaves in series for autosave in autosaves[1:]]
    found: list[Autosave] = (later or list(chain.from_iterable(series)))[-_NUM_RECENT:]
    return fmean(autosave.seconds / autosave.number for autosave in found) if found else None
