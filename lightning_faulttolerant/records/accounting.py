"""Cuts the time of a chapter into segments without gaps; ``goodput.py`` explains each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_faulttolerant.records.goodput import (
    DOWN,
    EVALUATION,
    HUNG,
    KINDS,
    OUTSIDE,
    REDONE,
    RESTARTING,
    RESTORING,
    SAVING,
    STARTING,
    TRAINING,
    USEFUL,
    Account,
    ChapterReport,
    RunReport,
    Segment,
)
from lightning_faulttolerant.records.history import (
    Autosave,
    Chapter,
    FitHistory,
    Process,
    RunHistory,
    RunPlace,
    name_of,
)


def report_of(history: RunHistory, *, run_id: str, path: str, made: float, is_whole: bool = False) -> RunReport | None:
    """Return the report of a run, or ``None`` if nothing is known of it.

    Args:
        history: The history of the run.
        run_id: The id of the run.
        path: Its directory or URL.
        made: The current time.
        is_whole: Whether all chapters are shown, not only the last one.
    """
    if not history.chapters:
        return None
    reports = [chapter_report(chapter, number) for number, chapter in enumerate(history.chapters, start=1)]
    return RunReport(
        run_id=run_id,
        path=path,
        made=made,
        chapters=tuple(reports if is_whole else reports[-1:]),
        num_chapters=len(reports),
        num_forgotten=history.num_forgotten,
        num_unread=history.num_unread,
    )


def chapter_report(chapter: Chapter, number: int = 1) -> ChapterReport:
    """Return a chapter with the account of its time.

    Args:
        chapter: The chapter.
        number: Its number in the history, from 1.
    """
    cut = _cut(chapter)
    segments = cut.segments or [Segment(kind=STARTING, began=cut.end, ended=cut.end, process=0)]
    account = account_of(segments)
    data = min(math.fsum(_data_seconds(cut, chapter)), account.training)
    return ChapterReport(
        number=number,
        chapter=chapter,
        account=replace(account, data=data, training=account.training - data),
        segments=tuple(segments),
    )


def account_of(segments: Iterable[Segment]) -> Account:
    """Return the sums of each kind.

    Args:
        segments: The segments of a chapter, or of a part of it.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for segment in segments:
        seconds[segment.kind].append(segment.seconds)
    return Account(**{kind: math.fsum(found) for kind, found in seconds.items()})


def _data_seconds(cut: _Cut, chapter: Chapter) -> Iterator[float]:
    """Yield for how long the training of each fit that counts has waited for data."""
    trained: dict[tuple[int, int | None], float] = {}
    for segment in cut.segments:
        if segment.kind == TRAINING:
            key = (segment.process, segment.fit)
            trained[key] = trained.get(key, 0.0) + segment.seconds
    for index, process in enumerate(chapter.processes):
        for fit in process.fits:
            until = min(
                (time for by, number, time in cut.redos if number == fit.number and by > index), default=math.inf
            )
            waited = max((seconds for time, seconds in fit.data if time <= until), default=0.0)
            yield min(waited, trained.get((index, fit.number), 0.0))


def _cut(chapter: Chapter) -> _Cut:
    """Return the segments of a chapter in order of time; each begins where the previous one ends."""
    cut = _Cut(chapter.processes[0].began)
    hangs = [*(process.hang for process in chapter.processes[1:]), None]
    for index, process in enumerate(chapter.processes):
        if index:
            if process.hang is not None:
                since, until = process.hang
                cut.until(min(since, process.began), DOWN, index - 1)
                cut.until(min(until, process.began), HUNG, index - 1)
            cut.until(process.began, DOWN, index - 1)
        has_trained = False
        for fit in process.fits:
            lead = OUTSIDE if has_trained else RESTARTING if index else STARTING
            if fit.started is None:
                cut.until(fit.last_seen, lead, index)
                continue
            if index:
                cut.redo(index, fit.number, continues_from(fit, chapter.processes[:index]))
            restored = 0.0 if fit.resumed is None else fit.resumed.seconds
            cut.until(fit.started - restored, lead, index)
            cut.until(fit.started, RESTORING if fit.resumed is not None else lead, index)
            if fit.has_trained:
                _cut_fit(cut, fit, index, hangs[index])
                has_trained = True
            cut.until(fit.last_seen, lead, index)
    if chapter.done is not None:
        cut.until(chapter.done, OUTSIDE, len(chapter.processes) - 1)
    return cut


def continues_from(fit: FitHistory, earlier: Sequence[Process]) -> float:
    """Return the time of the state that a fit continues from: training after that time is done again.

    Args:
        fit: A fit that has started.
        earlier: The processes before its own.

    Returns:
        The time at which the autosave's state was taken. For another checkpoint, such as one of Lightning's own, the
        last time at which the run is known to have been at or before its place. Minus infinity without a checkpoint.
    """
    if fit.resumed is None or not fit.resumed.continues:
        return -math.inf
    name = name_of(fit.resumed.path)
    same = [other for process in earlier for other in process.fits if other.number == fit.number]
    for other in reversed(same):
        for autosave in reversed(other.autosaves):
            if autosave.number == 1 and autosave.name == name:
                return autosave.taken
    return max(
        (
            time
            for other in same
            for time, place in marks(other)
            if fit.place is not None and place.order <= fit.place.order
        ),
        default=-math.inf,
    )


def marks(fit: FitHistory) -> Iterator[tuple[float, RunPlace]]:
    """Yield the times at which the place of a fit is known, with the place.

    Args:
        fit: Any fit.
    """
    if fit.started is not None and fit.place is not None:
        yield fit.started, fit.place
    yield from fit.alive
    for autosave in fit.autosaves:
        if autosave.number == 1 and autosave.place is not None:
            yield autosave.taken, autosave.place


class _Cut:
    """The segments so far, and where they end."""

    def __init__(self, began: float) -> None:
        self.segments: list[Segment] = []
        self.end = began
        self.redos: list[tuple[int, int, float]] = []
        """For each fit that continues: the index of its process, its number, and the time of its state."""

    def until(self, end: float, kind: str, process: int, fit: int | None = None) -> None:
        """Add a segment up to a time, unless that time has passed already."""
        if end > self.end:
            self.segments.append(Segment(kind=kind, began=self.end, ended=end, process=process, fit=fit))
            self.end = end

    def redo(self, process: int, fit: int, time: float) -> None:
        """Note that a process continues a fit from the state of a time: what it did since then is done again."""
        self.redos.append((process, fit, time))
        index = len(self.segments) - 1
        while index >= 0 and self.segments[index].ended > time:
            segment = self.segments[index]
            if segment.kind in USEFUL and segment.fit == fit:
                kept = [replace(segment, ended=time)] if segment.began < time else []
                self.segments[index : index + 1] = [
                    *kept,
                    replace(segment, kind=REDONE, began=max(segment.began, time)),
                ]
            index -= 1


def _cut_fit(cut: _Cut, fit: FitHistory, process: int, hang: tuple[float, float] | None) -> None:
    main = EVALUATION if fit.is_evaluation else TRAINING
    stretches = _stretches(fit)
    if hang is not None and fit.started is not None and fit.started <= hang[0] < fit.last_seen:
        # The signal that ends it may wake it up, so that it trains on, or writes a last line.
        stretches = sorted([*stretches, (*hang, HUNG)])
    for began, ended, kind in stretches:
        cut.until(min(began, fit.last_seen), main, process, fit.number)
        cut.until(min(ended, fit.last_seen), kind, process, fit.number)
    cut.until(fit.last_seen, main, process, fit.number)


def _stretches(fit: FitHistory) -> list[tuple[float, float, str]]:
    """Return when a fit waited for autosaves, and when it validated: the begin, the end, and the kind of each."""
    waits = sorted(map(_wait, fit.autosaves))
    made = [(began, ended, SAVING) for began, ended in waits]
    at, number = -math.inf, 0
    for run in fit.validations:
        at, seconds = max(at, run.since), run.seconds
        # If the waits of several autosaves are known as one, this comes around it, and ends later than the run did.
        while seconds > 0:
            while number < len(waits) and waits[number][1] <= at:
                number += 1
            following, resumes = waits[number] if number < len(waits) else (math.inf, math.inf)
            if following <= at:
                at = resumes
                continue
            end = min(following, at + seconds)
            if end <= at:
                break  # less than the clock tells apart
            made.append((at, end, EVALUATION))
            at, seconds = end, seconds - (end - at)
    return sorted(made)


def _wait(autosave: Autosave) -> tuple[float, float]:
    """Return when training waited. For several autosaves with only a known sum, return one wait of that length."""
    if autosave.number > 1 or autosave.is_in_background:
        return autosave.taken, autosave.taken + autosave.seconds
    return autosave.time - autosave.seconds, autosave.time
