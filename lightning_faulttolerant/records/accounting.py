"""Cuts the time of a chapter into segments without gaps; ``goodput.py`` explains each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_faulttolerant.records.goodput import (
    DOWN,
    KINDS,
    OUTSIDE,
    REDONE,
    RESTARTING,
    RESTORING,
    SAVING,
    STARTING,
    TRAINING,
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
    segments = segments_of(chapter)
    return ChapterReport(number=number, chapter=chapter, account=account_of(segments), segments=tuple(segments))


def account_of(segments: Iterable[Segment]) -> Account:
    """Return the sums of each kind.

    Args:
        segments: The segments of a chapter, or of a part of it.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for segment in segments:
        seconds[segment.kind].append(segment.seconds)
    return Account(**{kind: math.fsum(found) for kind, found in seconds.items()})


def segments_of(chapter: Chapter) -> list[Segment]:
    """Return the segments of a chapter in order of time; each begins where the previous one ends.

    Args:
        chapter: A chapter with at least one process.
    """
    cut = _Cut(chapter.processes[0].began)
    for index, process in enumerate(chapter.processes):
        if index:
            cut.until(process.began, DOWN, index - 1)
        has_trained = False
        for fit in process.fits:
            lead = OUTSIDE if has_trained else RESTARTING if index else STARTING
            if fit.started is None:
                cut.until(fit.last_seen, lead, index)
                continue
            if index:
                cut.redo(fit.number, continues_from(fit, chapter.processes[:index]))
            restored = 0.0 if fit.resumed is None else fit.resumed.seconds
            cut.until(fit.started - restored, lead, index)
            cut.until(fit.started, RESTORING if fit.resumed is not None else lead, index)
            if fit.has_trained:
                _cut_fit(cut, fit, index)
                has_trained = True
            cut.until(fit.last_seen, lead, index)
    if chapter.done is not None:
        cut.until(chapter.done, OUTSIDE, len(chapter.processes) - 1)
    return cut.segments or [Segment(kind=STARTING, began=cut.end, ended=cut.end, process=0)]


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
        (time for other in same for time, place in marks(other) if _is_not_after(place, fit.place)), default=-math.inf
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


def _is_not_after(place: RunPlace, other: RunPlace | None) -> bool:
    return other is not None and (place.epoch, place.batch) <= (other.epoch, other.batch)


class _Cut:
    """The segments so far, and where they end."""

    def __init__(self, began: float) -> None:
        self.segments: list[Segment] = []
        self.end = began

    def until(self, end: float, kind: str, process: int, fit: int | None = None) -> None:
        """Add a segment up to a time, unless that time has passed already."""
        if end > self.end:
            self.segments.append(Segment(kind=kind, began=self.end, ended=end, process=process, fit=fit))
            self.end = end

    def redo(self, fit: int, time: float) -> None:
        """Note that a fit continues from the state of a time: what it trained since then is done again."""
        index = len(self.segments) - 1
        while index >= 0 and self.segments[index].ended > time:
            segment = self.segments[index]
            if segment.kind == TRAINING and segment.fit == fit:
                kept = [replace(segment, ended=time)] if segment.began < time else []
                self.segments[index : index + 1] = [
                    *kept,
                    replace(segment, kind=REDONE, began=max(segment.began, time)),
                ]
            index -= 1


def _cut_fit(cut: _Cut, fit: FitHistory, process: int) -> None:
    for began, ended in _waits(fit.autosaves):
        cut.until(min(began, fit.last_seen), TRAINING, process, fit.number)
        cut.until(min(ended, fit.last_seen), SAVING, process, fit.number)
    cut.until(fit.last_seen, TRAINING, process, fit.number)


def _waits(autosaves: Iterable[Autosave]) -> list[tuple[float, float]]:
    """Return when training waited. For several autosaves with only a known sum, return one wait of that length."""
    return sorted((autosave.taken, autosave.taken + autosave.seconds) for autosave in autosaves)
